// The C interface of the keyed draw.
#pragma once

#include <cstdint>

#include "row_params.h"

extern "C" {

// Gumbel-max over `num_rows` rows of float32 logits: see worker/sampling/cpu_kernels.py.
//   rows: which rows of logits, of row_stride floats, are drawn
//   params, token_ids: one entry for each of them
__attribute__((visibility("default"))) void tokend_draw(
    const float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows, const int64_t* rows,
    const tokend::RowParams* params, int64_t* token_ids);
}
