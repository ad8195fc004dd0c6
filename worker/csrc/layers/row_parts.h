// Norm and gate of a single row, for callers that share rows among threads themselves.
//
// Rows are contiguous; dtype is a TokendDType of attention.h. The bits are those of the functions
// of rows.h.
#pragma once

#include <cstdint>

namespace tokend {

struct RowNorm {
    const float* weight;
    double eps;
};

// As tokend_rms_norm; out may be x.
void norm_row(int64_t dtype, int64_t size, const RowNorm& norm, const void* x, void* out);

// As tokend_add_rms_norm.
void add_norm_row(int64_t dtype, int64_t size, const RowNorm& norm, const void* x, void* out);

// As tokend_gate: x [2 * size], out [size].
void gate_row(int64_t kind, int64_t dtype, int64_t size, const void* x, void* out);

}  // namespace tokend
