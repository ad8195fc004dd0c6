// Weights of bfloat16, and products with them: what Python and other kernels pass, and how such a
// weight lies in memory.
//
// Nothing is rounded but the result: a weight's and a row's numbers are bfloat16, products and sums
// are float32. A sum is one chain over the inputs, in an order that the variant has:
//
//   weight   [ pair 0 | pair 1 | … ]           32 outputs each
//   pair     [ step 0 | step 1 | … ]           32 inputs each, one after the other as they are read
//   step     [ panel 0 | panel 1 ]             16 outputs each: a tile, 1,024 bytes
//   panel    [ line 0 | … | line 15 ]          2 inputs each
//   line     64 bytes = 16 outputs x 2 inputs  one row of a tile, one vector of pairs
//
// What is filled up is zero. A row comes out the same, bit by bit, whatever rows are beside it and
// however many threads there are; variants differ in the order of their sums. In a variant that
// multiplies bfloat16, numbers below the least normal one of float32 count as zero.
//
// Use:    memory = tokend_bf16_code_bytes(num_rows, in_features), aligned to 64
//         rows by code_bf16_row unless bf16_rows_in_place (bf16_format.h), then
//         tokend_bf16_coded_product, any number of times
#pragma once

#include <cstdint>

#include "products/packed/packed.h"

extern "C" {

struct TokendBf16Shape {
    int64_t out_features;
    int64_t in_features;
    void* packed;  // tokend_bf16_bytes, aligned to 64
};

// Bytes of a weight; `packed` of the argument is not read.
__attribute__((visibility("default"))) int64_t tokend_bf16_bytes(const TokendBf16Shape* weight);

// Lays out dense rows [out, in] of bfloat16, which are `stride` numbers apart. Shares its work
// among the threads that the caller has.
__attribute__((visibility("default"))) void tokend_bf16_pack(
    const TokendBf16Shape* weight, int64_t stride, const void* dense);

// Some rows of the weight, [num_ids, in] of bfloat16. Returns the place of the first id that is no
// row, in which case there are none, or num_ids.
__attribute__((visibility("default"))) int64_t tokend_bf16_rows(
    const TokendBf16Shape* weight, int64_t num_ids, const int64_t* ids, void* numbers);

// Bytes that so many rows take as a product reads them.
__attribute__((visibility("default"))) int64_t tokend_bf16_code_bytes(int64_t num_rows, int64_t in_features);

// output (+)= input @ weight^T + bias; an input of float32 is rounded to bfloat16 first.
__attribute__((visibility("default"))) void tokend_bf16_product(
    const TokendBf16Shape* weight, const TokendProduct* product);

// The same of rows that code_bf16_row has put into codes, or, where bf16_rows_in_place says that none
// are needed, of the input of `product`. May be called by each thread of a team (team.h).
__attribute__((visibility("default"))) void tokend_bf16_coded_product(
    const TokendBf16Shape* weight, const TokendProduct* product, const void* codes);
}
