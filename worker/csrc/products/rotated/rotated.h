// The C interface of weights of 8 bits with one scale per output, and their memory layout. Their
// products have no scale inside the sum.
//
// A few outliers of a row would, with one scale per row, leave few codes for the other numbers. So
// row and weight are rotated first, 64 inputs at a time (32 if in_features is not a multiple of
// 64), by a Hadamard matrix H, which spreads every number over its block:
//
//   weight . x  =  (weight H) . (x H) / 64,     H symmetric, H H = 64
//
// and then both are rounded: a row of x to -127 … 127 with one scale, an output of the
// weight to -127 … 127 with one scale, kept as code + 128.
//
//   weight   [ panel 0 | panel 1 | … | scales ]     panels of 16 outputs, an even number
//   panel    [ group 0 | group 1 | … ]              4 inputs each, a multiple of 16 groups
//   group    64 bytes = 16 outputs x 4 inputs       one vector of VNNI, one row of a tile
//   scales   float32 an output
//
// Padding is 128, which stands for zero.
//
// Use:    memory = tokend_code_bytes(num_rows, in_features), aligned to 64
//         tokend_code_rows(…)
//         tokend_coded_product(…), any number of times
// The sums are integers: the result of a row is the same, bit by bit, for any batch and any number
// of threads. A row with a NaN or an infinity gives NaN. Every function divides its work among the
// threads of OpenMP if it is large enough.
#pragma once

#include <cstdint>

#include "products/packed/packed.h"

extern "C" {

struct TokendRotatedShape {
    int64_t out_features;
    int64_t in_features;  // a multiple of 32
    void* packed;         // tokend_rotated_bytes, aligned to 64
};

// Returns the bytes of a weight; `packed` of the argument is not read.
__attribute__((visibility("default"))) int64_t tokend_rotated_bytes(const TokendRotatedShape* weight);

// Rotates and rounds dense rows [out, in] (0 float32, 1 bfloat16, 2 float16), which are
// `stride` numbers apart. Runs on the calling thread.
__attribute__((visibility("default"))) void tokend_rotate_dense(
    const TokendRotatedShape* weight, int64_t dtype, int64_t stride, const void* dense);

// Returns the bytes of the codes of num_rows rows.
__attribute__((visibility("default"))) int64_t tokend_code_bytes(int64_t num_rows, int64_t in_features);

// Rotates and rounds the input of `product` to codes.
__attribute__((visibility("default"))) void tokend_code_rows(
    const TokendProduct* product, int64_t in_features, void* codes);

// output (+)= rows @ weight^T + bias; the input of `product` is not read, its num_rows is
// that of the codes. May be called by every thread of a team (team.h).
__attribute__((visibility("default"))) void tokend_coded_product(
    const TokendRotatedShape* weight, const TokendProduct* product, const void* codes);

// The same with the input of `product`, which is rotated and rounded first.
__attribute__((visibility("default"))) void tokend_rotated_product(
    const TokendRotatedShape* weight, const TokendProduct* product);
}
