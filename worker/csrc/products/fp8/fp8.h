// The C interface of FP8 weights (E4M3: a sign, 4 bits of exponent, 3 of fraction) and products with
// them, and their memory layout.
//
// A number is code * scale. Columns of a row share a float32 scale, in groups of a multiple of 32
// columns. Products unpack the codes to bfloat16, which holds every one exactly, and multiply
// them with rows of bfloat16, prepared as for bf16.h:
//
//   weight   [ pair 0 | pair 1 | … ]           32 outputs each
//   pair     [ scales | step 0 | step 1 | … ]  32 inputs each
//   scales   for each group 32 floats, or one for all 32 outputs; whole lines of 64 bytes
//   step     [ panel 0 | panel 1 ]             16 outputs each
//   panel    [ lines 0, 1 | … | lines 14, 15 ] lines of 2 inputs each, as in bf16.h
//   2 lines  [ 4 outputs of the first | the same of the second ] …   64 bytes, 4 outputs x 2 inputs each
//
// A sum is one chain over parts of up to 128 inputs, each sum of a part times its scale. The result of
// a row is the same, bit by bit, for any batch and any number of threads.
#pragma once

#include <cstdint>

#include "products/packed/packed.h"

extern "C" {

struct TokendFp8Shape {
    int64_t out_features;
    int64_t in_features;    // whole steps of 32
    int64_t scale_inputs;   // columns of a group, whole steps
    int64_t scale_outputs;  // 1, or 32 where each 32 outputs from a multiple of 32 on share their scales
    void* packed;           // tokend_fp8_bytes, aligned to 64
};

// Returns the bytes of a weight; `packed` of the argument is not read.
__attribute__((visibility("default"))) int64_t tokend_fp8_bytes(const TokendFp8Shape* weight);

// Lays out outputs first … first + num_rows - 1 from rows of codes, `stride` bytes apart, and of
// scales, float32 [rows, groups]: of both row order[i] becomes output first + i, or row i if order is
// null. The memory of the weight is zero at first. Returns whether a code is NaN.
__attribute__((visibility("default"))) int64_t tokend_fp8_pack(
    const TokendFp8Shape* weight, int64_t first, int64_t num_rows, int64_t stride, const void* codes,
    const float* scales, const int64_t* order);

// Writes rows of the weight to `numbers`, float32 [num_ids, in]. Returns num_ids, or the index of the
// first id that is not a row of the weight; then nothing was written.
__attribute__((visibility("default"))) int64_t tokend_fp8_rows(
    const TokendFp8Shape* weight, int64_t num_ids, const int64_t* ids, float* numbers);

// output (+)= input @ weight^T + bias; an input of float32 is rounded to bfloat16 first.
__attribute__((visibility("default"))) void tokend_fp8_product(
    const TokendFp8Shape* weight, const TokendProduct* product);

// The same with rows prepared by prepare_bf16_row, or with the input of `product` itself if
// bf16_rows_in_place. May be called by every thread of a team (team.h).
__attribute__((visibility("default"))) void tokend_fp8_prepared_product(
    const TokendFp8Shape* weight, const TokendProduct* product, const void* prepared);
}
