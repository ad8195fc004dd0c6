// The C interface of the sampling filters.
#pragma once

#include <cstdint>

#include "row_params.h"

extern "C" {

// Writes -infinity into rows of logits where min-p, then top-k, then top-p drop a token.
//   rows: which rows of logits, of row_stride floats, are filtered
//   params: one entry for each of them
__attribute__((visibility("default"))) void tokend_filter(
    float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows, const int64_t* rows,
    const tokend::RowParams* params);
}
