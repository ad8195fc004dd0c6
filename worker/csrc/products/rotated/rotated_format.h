// The layout of a rotated weight and of the codes of rows.
#pragma once

#include "products/panels.h"
#include "products/rotated/rotated.h"

namespace tokend {

constexpr int64_t GROUP = 4;                         // inputs
constexpr int64_t GROUP_BYTES = PANEL_OUTPUTS * GROUP;
constexpr int64_t DEPTH = 64;  // inputs of a tile
constexpr int WEIGHT_ZERO = 128;
constexpr int LARGEST_CODE = 127;

struct RotatedLayout {
    int64_t outputs, inputs, panel_bytes;

    explicit RotatedLayout(const TokendRotatedShape& weight)
        : outputs(whole(weight.out_features, PAIR_OUTPUTS)),
          inputs(whole(weight.in_features, DEPTH)),
          panel_bytes(inputs * PANEL_OUTPUTS) {}
    int64_t num_pairs() const { return outputs / PAIR_OUTPUTS; }
    int64_t code_bytes() const { return outputs * inputs; }
    int64_t bytes() const { return code_bytes() + outputs * int64_t(sizeof(float)); }
    uint8_t* panel(const TokendRotatedShape& weight, int64_t index) const {
        return static_cast<uint8_t*>(weight.packed) + index * panel_bytes;
    }
    float* scales(const TokendRotatedShape& weight) const {
        return reinterpret_cast<float*>(static_cast<uint8_t*>(weight.packed) + code_bytes());
    }
};

// | scale and sum of each row | codes of row 0 | codes of row 1 | … |, each part aligned to 64.
struct RowFacts {
    float scale;    // NaN if one of the numbers is NaN or infinite
    int32_t start;  // -WEIGHT_ZERO * the sum of the codes: what the weight's offset adds, negated
};

struct CodesLayout {
    int64_t inputs;  // codes of a row, including padding
    // An odd number of cache lines, so that the same column of several rows falls into different
    // cache sets.
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

// Rows of numbers, rotated and rounded to 8 bits with one scale.

// Returns the size of rotated blocks, which is the square of the rotation's gain.
int64_t rotated_block(int64_t in_features);

// Multiplies each block of numbers [in_features] by H; returns the bits of the largest
// magnitude, which are above those of any number where one of them is none.
uint32_t rotate(float* numbers, int64_t in_features);

// Rotates and rounds a row to codes; its numbers are overwritten.
RowFacts code_row(float* numbers, int64_t in_features, int8_t* codes);

// The input of a product, row `row`; `scratch` has in_features numbers.
RowFacts code_input(const TokendProduct& product, int64_t in_features, int64_t row, float* scratch, int8_t* codes);

// A part of tokend_coded_product, by the calling thread alone.
void multiply_rotated_part(const TokendRotatedShape& weight, const TokendProduct& product, const void* codes,
                           const ProductPart& part);

// Memory of a thread for a row's numbers, aligned to 64.
float* row_scratch(int64_t in_features);

// Below this, some microseconds of one thread, waking other threads costs more than it saves.
constexpr int64_t PARALLEL_CODES = 1 << 13;

}  // namespace tokend
