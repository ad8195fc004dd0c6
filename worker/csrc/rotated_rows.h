// Rows of numbers, rotated and rounded to 8 bits with one scale.
#pragma once

#include "rotated_format.h"

namespace tokend {

// What a block's rotation multiplies lengths by, squared.
int64_t rotated_block(int64_t in_features);

// Multiplies each block of numbers [in_features] by H; returns the bits of the largest
// magnitude, which are above those of any number where one of them is none.
uint32_t rotate(float* numbers, int64_t in_features);

// Rotates and rounds a row to codes; its numbers are overwritten.
RowFacts code_row(float* numbers, int64_t in_features, int8_t* codes);

// The input of a product, row `row`; `scratch` has in_features numbers.
RowFacts code_input(const TokendProduct& product, int64_t in_features, int64_t row, float* scratch, int8_t* codes);

// Memory of a thread for a row's numbers, aligned to 64.
float* row_scratch(int64_t in_features);

// Below this, some microseconds of one thread, waking others costs more than it saves.
constexpr int64_t PARALLEL_CODES = 1 << 13;

}  // namespace tokend
