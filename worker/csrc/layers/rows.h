// The C interface of row operations between two products: RMSNorm and the MLP's gate.
//
// Rows are contiguous and come in groups:
//
//   x   | row row row | gap | row row row | gap | …     group_size = 3
//
// so that the heads of a token, a slice of a wider row, need not be copied first. dtype is
// a TokendDType of attention.h; weights are float32 whatever it is; sums are in float32.
#pragma once

#include <cstdint>

#include "common/dtype.h"

extern "C" {

struct TokendNormCall {
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
__attribute__((visibility("default"))) void tokend_rms_norm(const TokendNormCall* norm);

// out += the norm of x; out is read and written once.
__attribute__((visibility("default"))) void tokend_add_rms_norm(const TokendNormCall* norm);

enum TokendGateKind : int64_t { TOKEND_SILU = 0, TOKEND_GELU_TANH = 1 };

struct TokendGateCall {
    int64_t kind;
    int64_t dtype;  // of x and out
    int64_t num_rows;
    int64_t size;   // elements of a row of out
    const void* x;  // [num_rows, 2 * size]
    void* out;      // [num_rows, size]
};

// out[row, i] = f(x[row, i]) * x[row, size + i].
__attribute__((visibility("default"))) void tokend_gate(const TokendGateCall* gate);
}
