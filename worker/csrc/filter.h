// The C interface of the sampling filters.
#pragma once

#include <cstdint>

extern "C" {

// Writes -infinity into `num_rows` rows of logits where min-p, then top-k, then top-p
// drop a token: see worker/sampling/draw.py. Neutral values: top_k 0, top_p 1, min_p 0.
__attribute__((visibility("default"))) void tokend_filter(
    float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows, const int64_t* rows,
    const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p);
}
