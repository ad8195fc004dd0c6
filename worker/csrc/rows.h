// The C interface of what is done to rows between two products.
//
// Rows are contiguous and come in groups:
//
//   x   | row row row | gap | row row row | gap | …     group_size = 3
//
// so that the heads of a token, a slice of a wider row, need not be copied first. dtype is
// a TokendDType of attention.h; weights are float32 whatever it is; sums are in float32.
#pragma once

#include <cstdint>

#include "edits.h"

extern "C" {

struct TokendNorm {
    int64_t size;         // elements of a row
    const float* weight;  // [size]
    double eps;
    int64_t dtype;  // of x and out
    int64_t num_groups;
    int64_t group_size;    // rows of a group
    int64_t group_stride;  // elements from one group of x to the next
    const void* x;
    void* out;  // [num_groups * group_size, size], contiguous
};

// out = x / sqrt(mean(x^2) + eps) * weight (RMSNorm; Zhang and Sennrich, 2019).
__attribute__((visibility("default"))) void tokend_rms_norm(const TokendNorm* norm);

// out += the same; out is read and written once.
__attribute__((visibility("default"))) void tokend_add_rms_norm(const TokendNorm* norm);

enum TokendGateKind : int64_t { TOKEND_SILU = 0, TOKEND_GELU_TANH = 1 };

struct TokendGate {
    int64_t kind;
    int64_t dtype;  // of x and out
    int64_t num_rows;
    int64_t size;   // elements of a row of out
    const void* x;  // [num_rows, 2 * size]
    void* out;      // [num_rows, size]
};

// out[row, i] = f(x[row, i]) * x[row, size + i].
__attribute__((visibility("default"))) void tokend_gate(const TokendGate* gate);

// broken[s] = 1 where rows [start[s], start[s + 1]) of x [.., size] have a NaN or an infinity, else 0.
__attribute__((visibility("default"))) void tokend_find_broken(
    int64_t dtype, int64_t num_groups, const int32_t* start, int64_t size, const void* x, uint8_t* broken);

// The largest element of each row of x [num_rows, size], as float32, and its place: the first
// of equals. A row with a NaN has the largest element NaN, and then the place says nothing.
// edits: nothing, or for each row nothing or changes: then the place is that of the largest
// element once they are made, and `best` still that of the row as it is.
__attribute__((visibility("default"))) void tokend_find_best(
    int64_t dtype, int64_t num_rows, int64_t size, const void* x, float* best, int64_t* place,
    const TokendEdits* const* edits);
}
