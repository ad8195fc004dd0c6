// The layout of a bfloat16 weight.
#pragma once

#include "common/simd.h"
#include "products/bf16/bf16.h"
#include "products/panels.h"

namespace tokend {

constexpr int64_t STEP_INPUTS = 32;
constexpr int64_t STEP_LINES = STEP_INPUTS / 2;
constexpr int64_t LINE_BYTES = PANEL_OUTPUTS * 4;
constexpr int64_t PANEL_STEP_BYTES = STEP_LINES * LINE_BYTES;
constexpr int64_t PAIR_STEP_BYTES = 2 * PANEL_STEP_BYTES;

struct Bf16Layout {
    int64_t num_pairs, num_steps;

    explicit Bf16Layout(const TokendBf16Shape& weight)
        : num_pairs(whole(weight.out_features, PAIR_OUTPUTS) / PAIR_OUTPUTS),
          num_steps(whole(weight.in_features, STEP_INPUTS) / STEP_INPUTS) {}
    int64_t pair_bytes() const { return num_steps * PAIR_STEP_BYTES; }
    int64_t bytes() const { return num_pairs * pair_bytes(); }
    uint8_t* pair(const TokendBf16Shape& weight, int64_t index) const {
        return static_cast<uint8_t*>(weight.packed) + index * pair_bytes();
    }
    // The first two inputs of an output; the next are a line further, of the same step.
    uint8_t* column(const TokendBf16Shape& weight, int64_t output) const {
        return pair(weight, output / PAIR_OUTPUTS) + output % PAIR_OUTPUTS / PANEL_OUTPUTS * PANEL_STEP_BYTES +
               output % PANEL_OUTPUTS * 4;
    }
};

// Rows as a product with weights of bfloat16 reads them.

// Returns whether a product reads such rows in place, not prepared.
bool bf16_rows_in_place(int64_t dtype, int64_t in_features);

// Prepares row `row` of num_rows, in_features numbers at x (0 float32, 1 bfloat16), in its place of
// tokend_bf16_prepared_bytes: rounds them to bfloat16 and pads them with zeros.
void prepare_bf16_row(int64_t dtype, int64_t in_features, int64_t row, const void* x, void* prepared);

// A part of tokend_bf16_prepared_product, by the calling thread alone.
void multiply_bf16_part(const TokendBf16Shape& weight, const TokendProduct& product, const void* prepared,
                        const ProductPart& part);

}  // namespace tokend
