// Products by the form of their weight, for kernels that call them from a team of threads: rows
// become codes once, then any weights of the same form are multiplied by these.
#pragma once

#include "stack.h"

namespace tokend {

// Bytes of the codes of so many rows in the form that needs the most.
int64_t most_code_bytes(int64_t num_rows, int64_t in_features);

// Row `row` of the num_rows of a product's input, at x, to its place among the codes.
void code_row(int64_t form, int64_t dtype, int64_t in_features, int64_t num_rows, int64_t row, const void* x,
              void* codes);

// output (+)= rows @ weight^T + bias, for columns [0, out_features) of an output whose rows are
// output_stride elements of dtype apart. Each thread of a team comes here.
void multiply_codes(const TokendPart& part, int64_t num_rows, const void* codes, int64_t dtype,
                    int64_t output_stride, void* output, bool adds);

}  // namespace tokend
