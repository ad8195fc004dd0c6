// The C interface of row operations between two products: norms and the MLP's activation.
//
// Rows are contiguous and come in groups:
//
//   x   | row row row | gap | row row row | gap | …     group_size = 3
//
// so that the heads of a token, a slice of a wider row, need not be copied first. dtype is
// a TokendDType of attention.h; weights are always float32; sums are in float32.
#pragma once

#include <cstdint>

#include "common/dtype.h"

extern "C" {

// RMSNorm or LayerNorm.
struct TokendRowNorm {
    const float* weight;  // [size]; null in TokendStackLayer for a norm that the model does not have
    const float* bias;    // [size] or null; only of a LayerNorm
    double eps;
    int64_t is_centered;  // 1: LayerNorm
};

struct TokendNormCall {
    int64_t size;  // elements of a row
    TokendRowNorm norm;
    int64_t dtype;  // of x and out
    int64_t num_groups;
    int64_t group_size;    // rows of a group
    int64_t group_stride;  // elements from one group of x to the next
    const void* x;
    void* out;  // [num_groups * group_size, size], contiguous
};

// RMSNorm (Zhang and Sennrich, 2019): out = x / sqrt(mean(x^2) + eps) * weight. LayerNorm (Ba et al.,
// 2016): the same of x - mean(x), plus the bias.
__attribute__((visibility("default"))) void tokend_norm(const TokendNormCall* norm);

// out += the norm of x; out is read and written once.
__attribute__((visibility("default"))) void tokend_add_norm(const TokendNormCall* norm);

enum TokendGateKind : int64_t {
    TOKEND_SILU = 0,
    TOKEND_GELU_TANH = 1,
    TOKEND_SWIGLU_OAI = 2,
    TOKEND_GELU = 3,
    TOKEND_SIGMOID_GATE = 4,
    TOKEND_RELU_SQUARED = 5
};

struct TokendGateCall {
    int64_t kind;
    int64_t is_gated;
    int64_t dtype;  // of x and out
    int64_t num_rows;
    int64_t size;   // elements of a row of out
    const void* x;  // [num_rows, 2 * size], or [num_rows, size] if it is not gated
    void* out;      // [num_rows, size]
};

// out[row, i] = f(x[row, i]) * x[row, size + i], or f(x[row, i]) if it is not gated. TOKEND_SWIGLU_OAI
// is always gated, and multiplies by the clamped x[row, size + i] plus 1.
__attribute__((visibility("default"))) void tokend_gate(const TokendGateCall* gate);
}
