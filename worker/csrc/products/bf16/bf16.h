// The C interface of bfloat16 weights and products with them, and their memory layout.
//
// Only the result is rounded: weights and rows are bfloat16, products and sums
// are float32. A sum is one chain over the inputs, in an order that the variant has:
//
//   weight   [ pair 0 | pair 1 | … ]           32 outputs each
//   pair     [ step 0 | step 1 | … ]           32 inputs each, one after the other as they are read
//   step     [ panel 0 | panel 1 ]             16 outputs each: a tile, 1,024 bytes
//   panel    [ line 0 | … | line 15 ]          2 inputs each
//   line     64 bytes = 16 outputs x 2 inputs  one row of a tile, one vector of pairs
//
// Padding is zero. The result of a row is the same, bit by bit, for any batch and any number of
// threads; variants differ in the order of their sums. In a variant that
// multiplies bfloat16, numbers below the least normal one of float32 count as zero.
//
// Use:    memory = tokend_bf16_prepared_bytes(num_rows, in_features), aligned to 64
//         rows by prepare_bf16_row unless bf16_rows_in_place (bf16_format.h), then
//         tokend_bf16_prepared_product, any number of times
#pragma once

#include <cstdint>

#include "products/packed/packed.h"

extern "C" {

struct TokendBf16Shape {
    int64_t out_features;
    int64_t in_features;
    void* packed;  // tokend_bf16_bytes, aligned to 64
};

// Returns the bytes of a weight; `packed` of the argument is not read.
__attribute__((visibility("default"))) int64_t tokend_bf16_bytes(const TokendBf16Shape* weight);

// Lays out outputs first … first + num_rows - 1 from dense rows of bfloat16, which are `stride`
// numbers apart: of them row order[i] becomes output first + i, or row i if order is null. The
// memory of the weight is zero at first. Shares its work among the threads that the caller has.
__attribute__((visibility("default"))) void tokend_bf16_pack(
    const TokendBf16Shape* weight, int64_t first, int64_t num_rows, int64_t stride, const void* dense,
    const int64_t* order);

// Copies rows of the weight to `numbers`, [num_ids, in] of bfloat16. Returns num_ids, or the index
// of the first id that is not a row of the weight; then nothing was written.
__attribute__((visibility("default"))) int64_t tokend_bf16_rows(
    const TokendBf16Shape* weight, int64_t num_ids, const int64_t* ids, void* numbers);

// Returns the bytes of num_rows prepared rows, as a product reads them.
__attribute__((visibility("default"))) int64_t tokend_bf16_prepared_bytes(int64_t num_rows, int64_t in_features);

// output (+)= input @ weight^T + bias; an input of float32 is rounded to bfloat16 first.
__attribute__((visibility("default"))) void tokend_bf16_product(
    const TokendBf16Shape* weight, const TokendProduct* product);

// The same with rows prepared by prepare_bf16_row, or with the input of `product` itself if
// bf16_rows_in_place. May be called by every thread of a team (team.h).
__attribute__((visibility("default"))) void tokend_bf16_prepared_product(
    const TokendBf16Shape* weight, const TokendProduct* product, const void* prepared);
}
