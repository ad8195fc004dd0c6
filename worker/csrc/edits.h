// The C interface of changes of scores: see worker/sampling/logit_edits.py.
#pragma once

#include <cstdint>

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
}
