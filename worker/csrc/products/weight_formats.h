// Products by the format of their weight, for kernels that call them from a team of threads: input
// rows become codes once, and then any weights of that format are multiplied with the codes.
#pragma once

#include "layers/stack.h"

namespace tokend {

// Rows of dtype, `stride` elements apart.
struct RowsOf {
    int64_t stride;
    void* memory;
};

constexpr int64_t SHARE_OUTPUTS = 32;  // outputs of a panel, or of a pair of panels, in any format

// A part of a product that one thread computes: some rows of the input, some outputs.
struct ProductShare {
    int64_t input_dtype;
    int64_t total_rows;  // of input, codes and output
    int64_t first_row;
    int64_t num_rows;
    RowsOf input;
    const void* codes;
    int64_t output_dtype;
    RowsOf output;        // begins with the first output of the weight
    int64_t first_panel;  // of SHARE_OUTPUTS outputs each
    int64_t end_panel;
};

}  // namespace tokend

// The products of one library. Weights have the same layout in all libraries, so those of several
// instruction sets can compute the products of one model; each reads only codes of its own, except
// for packed weights, whose codes are the same in all.
struct TokendProductKernels {
    // Returns the bytes of the codes of num_rows rows, in the format that needs most.
    int64_t (*most_code_bytes)(int64_t num_rows, int64_t in_features);

    // Returns whether the format needs codes of such rows; if not, it reads the rows in place.
    bool (*has_codes)(int64_t format, int64_t dtype, int64_t in_features);

    // Writes the codes of row `row` of a product's input (at x, one of num_rows) to `codes`.
    void (*code_row)(int64_t format, int64_t dtype, int64_t in_features, int64_t num_rows, int64_t row, const void* x,
                     void* codes);

    // output (+)= input @ weight^T + bias, for columns [0, out_features) of the output. Of an input
    // that needs codes these are read. Each thread of a team must call this.
    void (*multiply_codes)(const TokendLinearPart& part, int64_t dtype, int64_t num_rows, const tokend::RowsOf& input,
                           const void* codes, const tokend::RowsOf& output, bool adds);

    // output = input @ weight^T + bias for a part of them, by the calling thread alone.
    void (*multiply_share)(const TokendLinearPart& part, const tokend::ProductShare& share);
};

extern "C" {

// Returns the products of this library.
__attribute__((visibility("default"))) const TokendProductKernels* tokend_product_kernels();
}
