// Where the parts of a rotated weight and of the codes of rows are.
#pragma once

#include "panels.h"
#include "rotated.h"

namespace tokend {

constexpr int64_t GROUP = 4;                         // inputs
constexpr int64_t GROUP_BYTES = PANEL_OUTPUTS * GROUP;
constexpr int64_t DEPTH = 64;  // inputs of a tile
constexpr int WEIGHT_ZERO = 128;
constexpr int LARGEST_CODE = 127;

struct RotatedLayout {
    int64_t outputs, inputs, panel_bytes;

    explicit RotatedLayout(const TokendRotated& weight)
        : outputs(whole(weight.out_features, PAIR_OUTPUTS)),
          inputs(whole(weight.in_features, DEPTH)),
          panel_bytes(inputs * PANEL_OUTPUTS) {}
    int64_t num_pairs() const { return outputs / PAIR_OUTPUTS; }
    int64_t code_bytes() const { return outputs * inputs; }
    int64_t bytes() const { return code_bytes() + outputs * int64_t(sizeof(float)); }
    uint8_t* panel(const TokendRotated& weight, int64_t index) const {
        return static_cast<uint8_t*>(weight.packed) + index * panel_bytes;
    }
    float* scales(const TokendRotated& weight) const {
        return reinterpret_cast<float*>(static_cast<uint8_t*>(weight.packed) + code_bytes());
    }
};

// | scale and sum of each row | codes of row 0 | codes of row 1 | … |, each part aligned to 64.
struct RowFacts {
    float scale;    // NaN where one of the numbers is none
    int32_t start;  // -WEIGHT_ZERO * the sum of the codes: what the weight's offset adds, negated
};

struct CodesLayout {
    int64_t inputs;  // codes of a row with those that are filled up with zeros
    // An odd number of cache lines, so that the same place in several rows falls into
    // different sets of a cache.
    int64_t stride;
    int64_t facts_bytes;
    int64_t num_rows;

    CodesLayout(int64_t rows, int64_t in_features)
        : inputs(whole(in_features, DEPTH)),
          stride((inputs / DEPTH | 1) * DEPTH),
          facts_bytes(whole(rows * int64_t(sizeof(RowFacts)), 64)),
          num_rows(rows) {}
    int64_t bytes() const { return facts_bytes + num_rows * stride; }
    RowFacts* facts(void* memory) const { return static_cast<RowFacts*>(memory); }
    int8_t* codes(void* memory, int64_t row) const {
        return static_cast<int8_t*>(memory) + facts_bytes + row * stride;
    }
};

}  // namespace tokend
