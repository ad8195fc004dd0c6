// Products by the format of their weight, for kernels that call them from a team of threads: rows
// become codes once, then any weights of the same format are multiplied by these.
#pragma once

#include "layers/stack.h"

namespace tokend {

// Bytes of the codes of so many rows in the format that needs the most.
int64_t most_code_bytes(int64_t num_rows, int64_t in_features);

// Whether a product of the format has codes at all; if not, it reads such rows where they are.
bool has_codes(int64_t format, int64_t dtype, int64_t in_features);

// Row `row` of the num_rows of a product's input, at x, to its place among the codes.
void code_row(int64_t format, int64_t dtype, int64_t in_features, int64_t num_rows, int64_t row, const void* x,
              void* codes);

// Rows of dtype, `stride` elements apart.
struct RowsOf {
    int64_t stride;
    void* memory;
};

// output (+)= input @ weight^T + bias, for columns [0, out_features) of the output. Of an input that
// has codes these are read. Each thread of a team comes here.
void multiply_codes(const TokendLinearPart& part, int64_t dtype, int64_t num_rows, const RowsOf& input, const void* codes,
                    const RowsOf& output, bool adds);

}  // namespace tokend
