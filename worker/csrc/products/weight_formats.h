// Products by the format of their weight, for kernels that call them from a team of threads: input
// rows become codes once, and then any weights of that format are multiplied with the codes.
#pragma once

#include "layers/stack.h"

namespace tokend {

// Returns the bytes of the codes of num_rows rows, in the format that needs most.
int64_t most_code_bytes(int64_t num_rows, int64_t in_features);

// Returns whether the format needs codes of such rows; if not, it reads the rows in place.
bool has_codes(int64_t format, int64_t dtype, int64_t in_features);

// Writes the codes of row `row` of a product's input (at x, one of num_rows) to `codes`.
void code_row(int64_t format, int64_t dtype, int64_t in_features, int64_t num_rows, int64_t row, const void* x,
              void* codes);

// Rows of dtype, `stride` elements apart.
struct RowsOf {
    int64_t stride;
    void* memory;
};

// output (+)= input @ weight^T + bias, for columns [0, out_features) of the output. Of an input that
// needs codes these are read. Each thread of a team must call this.
void multiply_codes(const TokendLinearPart& part, int64_t dtype, int64_t num_rows, const RowsOf& input, const void* codes,
                    const RowsOf& output, bool adds);

}  // namespace tokend
