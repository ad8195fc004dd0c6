// Norm, activation and multiples and sums of a single row, for callers that share rows among threads themselves.
//
// Rows are contiguous; dtype is a TokendDType of attention.h. The bits are those of the functions
// of rows.h.
#pragma once

#include <cstdint>

#include "layers/rows.h"

namespace tokend {

// As tokend_norm; out may be x.
void norm_row(int64_t dtype, int64_t size, const TokendRowNorm& norm, const void* x, void* out);

// As tokend_add_norm.
void add_norm_row(int64_t dtype, int64_t size, const TokendRowNorm& norm, const void* x, void* out);

// As tokend_gate: x [2 * size], or [size] if it is not gated; out [size].
void gate_row(int64_t kind, int64_t is_gated, int64_t dtype, int64_t size, const void* x, void* out);

// out = factor * x; out may be x.
void scale_row(int64_t dtype, int64_t size, double factor, const void* x, void* out);

// out += x. Of a multiple that is rounded before: no fused multiply-add, since another function multiplies.
void accumulate_row(int64_t dtype, int64_t size, const void* x, void* out);

}  // namespace tokend
