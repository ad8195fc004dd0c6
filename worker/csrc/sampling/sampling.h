// The C interface of sampling: logits edits, filters, the keyed draw, the best token of a row.
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

// Edits of one row of logits. Only `forbidden` may name a token id twice.
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

// Edits rows of float32 logits in place: edits[i] applies to row rows[i].
__attribute__((visibility("default"))) void tokend_edit(
    float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows, const int64_t* rows,
    const TokendEdits* const* edits);

// Sets logits that the filters of a row drop to -infinity (FILTERS of worker/sampling/row_params.py).
//   rows: which rows of logits, of row_stride floats, are filtered
//   params: one entry for each of them
__attribute__((visibility("default"))) void tokend_filter(
    float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows, const int64_t* rows,
    const tokend::RowParams* params);

// Gumbel-max over `num_rows` rows of float32 logits: see worker/cpu/sampling.py.
//   rows: which rows of logits, of row_stride floats, are drawn
//   params, token_ids: one entry for each of them
__attribute__((visibility("default"))) void tokend_draw(
    const float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows, const int64_t* rows,
    const tokend::RowParams* params, int64_t* token_ids);

// nonfinite[s] = 1 if rows [start[s], start[s + 1]) of x [.., size] have a NaN or an infinity, else 0.
__attribute__((visibility("default"))) void tokend_find_nonfinite(
    int64_t dtype, int64_t num_groups, const int32_t* start, int64_t size, const void* x, uint8_t* nonfinite);

// Finds the largest element of each row of x [num_rows, size], as float32, and its index: the first
// of equals. A row with a NaN gets NaN, and its index is meaningless.
// edits: null, or one pointer for each row, which may be null. With edits the index is that of the
// largest element after the edits, while `best` is still that of the unedited row.
__attribute__((visibility("default"))) void tokend_find_best(
    int64_t dtype, int64_t num_rows, int64_t size, const void* x, float* best, int64_t* place,
    const TokendEdits* const* edits);
}
