// The layout of an FP8 weight.
#pragma once

#include <algorithm>

#include "products/bf16/bf16_format.h"
#include "products/fp8/fp8.h"

namespace tokend {

constexpr int64_t FP8_LINES_BYTES = LINE_BYTES;  // of two lines
constexpr int64_t FP8_PANEL_STEP_BYTES = PANEL_STEP_BYTES / 2;
constexpr int64_t FP8_STEP_BYTES = PAIR_STEP_BYTES / 2;
// Inputs whose sums get their scale together; the unpacked codes of a pair stay in the first cache.
constexpr int64_t FP8_PART_INPUTS = 128;

struct Fp8Layout {
    int64_t num_pairs, num_steps, num_groups, scale_outputs;

    explicit Fp8Layout(const TokendFp8Shape& weight)
        : num_pairs(whole(weight.out_features, PAIR_OUTPUTS) / PAIR_OUTPUTS),
          num_steps(weight.in_features / STEP_INPUTS),
          num_groups((weight.in_features + weight.scale_inputs - 1) / weight.scale_inputs),
          scale_outputs(weight.scale_outputs) {}
    int64_t scale_bytes() const { return whole(num_groups * (PAIR_OUTPUTS / scale_outputs) * 4, 64); }
    int64_t pair_bytes() const { return scale_bytes() + num_steps * FP8_STEP_BYTES; }
    int64_t bytes() const { return num_pairs * pair_bytes(); }
    uint8_t* pair(const TokendFp8Shape& weight, int64_t index) const {
        return static_cast<uint8_t*>(weight.packed) + index * pair_bytes();
    }
    // The scale of an output in group 0; the next group's is PAIR_OUTPUTS / scale_outputs further.
    float* scale(const TokendFp8Shape& weight, int64_t output) const {
        uint8_t* at = pair(weight, output / PAIR_OUTPUTS);
        return reinterpret_cast<float*>(at) + output % PAIR_OUTPUTS / scale_outputs;
    }
    // The first two inputs of an output; those of another line of the step are line_at further.
    uint8_t* column(const TokendFp8Shape& weight, int64_t output) const {
        const int64_t in_panel = output % PANEL_OUTPUTS;
        return pair(weight, output / PAIR_OUTPUTS) + scale_bytes() +
               output % PAIR_OUTPUTS / PANEL_OUTPUTS * FP8_PANEL_STEP_BYTES + in_panel / 4 * 16 + in_panel % 4 * 2;
    }
    static int64_t line_at(int64_t line) { return line / 2 * FP8_LINES_BYTES + line % 2 * 8; }
};

// A part of tokend_fp8_prepared_product, by the calling thread alone.
void multiply_fp8_part(const TokendFp8Shape& weight, const TokendProduct& product, const void* prepared,
                       const ProductPart& part);

}  // namespace tokend
