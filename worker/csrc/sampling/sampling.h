// The C interface of sampling: changes of logits, filters, the keyed draw, the best token of a row.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace tokend {

// The sampling parameters of one row of a batch: an element of ROW_PARAMS of
// worker/sampling/row_params.py, with the same fields in the same order.
struct RowParams {
    uint64_t seed;
    uint32_t choice;
    uint32_t position;
    float temperature;  // above 0
    int32_t top_k;      // 0 keeps all
    float top_p;        // 1 keeps all
    float min_p;        // 0 keeps all
};

}  // namespace tokend

extern "C" {

// What one row's scores are changed by. No list of token ids names one twice, but `forbidden`.
struct TokendEdits {
    int64_t num_allowed;  // -1: every token
    const int64_t* allowed;
    int64_t num_forbidden;
    const int64_t* forbidden;
    int64_t num_biases;
    const int64_t* bias_ids;
    const float* bias_values;
    int64_t num_counts;
    const int64_t* count_ids;
    const float* counts;
    float repetition;
    float frequency;
    float presence;
};

// Changes rows of float32 logits in place; one of `rows` and of `edits` each.
__attribute__((visibility("default"))) void tokend_edit(
    float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows, const int64_t* rows,
    const TokendEdits* const* edits);

// Writes -infinity into rows of logits where min-p, then top-k, then top-p drop a token.
//   rows: which rows of logits, of row_stride floats, are filtered
//   params: one entry for each of them
__attribute__((visibility("default"))) void tokend_filter(
    float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows, const int64_t* rows,
    const tokend::RowParams* params);

// Gumbel-max over `num_rows` rows of float32 logits: see worker/sampling/cpu_kernels.py.
//   rows: which rows of logits, of row_stride floats, are drawn
//   params, token_ids: one entry for each of them
__attribute__((visibility("default"))) void tokend_draw(
    const float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows, const int64_t* rows,
    const tokend::RowParams* params, int64_t* token_ids);

// broken[s] = 1 where rows [start[s], start[s + 1]) of x [.., size] have a NaN or an infinity, else 0.
__attribute__((visibility("default"))) void tokend_find_nonfinite(
    int64_t dtype, int64_t num_groups, const int32_t* start, int64_t size, const void* x, uint8_t* broken);

// The largest element of each row of x [num_rows, size], as float32, and its place: the first
// of equals. A row with a NaN has the largest element NaN, and then the place says nothing.
// edits: nothing, or for each row nothing or changes: then the place is that of the largest
// element once they are made, and `best` still that of the row as it is.
__attribute__((visibility("default"))) void tokend_find_best(
    int64_t dtype, int64_t num_rows, int64_t size, const void* x, float* best, int64_t* place,
    const TokendEdits* const* edits);
}
