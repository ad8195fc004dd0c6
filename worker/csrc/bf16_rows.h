// Rows as a product with weights of bfloat16 reads them.
#pragma once

#include "bf16.h"

namespace tokend {

// Whether a product reads such rows where they are, so that nothing has to be done before.
bool bf16_rows_in_place(int64_t dtype, int64_t in_features);

// Row `row` of num_rows, in_features numbers at x (0 float32, 1 bfloat16), to its place in memory
// of tokend_bf16_code_bytes.
void code_bf16_row(int64_t dtype, int64_t in_features, int64_t row, const void* x, void* codes);

}  // namespace tokend
