// Products by the format of their weight, for kernels that call them from a team of threads.
//
// Input rows are prepared once, as the products of a format read them, and then multiplied with any
// weights of that format:
//
//   packed           blocks of int8, with a scale for 32 numbers
//   rotated          rotated, then int8 with a scale for a row
//   bfloat16, FP8    bfloat16, padded with zeros; float32 where the CPU has no product of bfloat16.
//                    Rows that need neither padding nor another type are read in place.
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
    int64_t total_rows;  // of input, prepared and output
    int64_t first_row;
    int64_t num_rows;
    RowsOf input;
    const void* prepared;  // input rows; not read where products read them in place
    int64_t output_dtype;
    RowsOf output;        // begins with the first output of the weight
    int64_t first_panel;  // of SHARE_OUTPUTS outputs each
    int64_t end_panel;
};

}  // namespace tokend

// The products of one library. Weights have the same layout in all libraries, so those of several
// instruction sets can compute the products of one model; each reads only input that it prepared
// itself, except for packed weights, whose prepared input is the same in all.
struct TokendProductKernels {
    // Returns the bytes of num_rows prepared rows, in the format that needs most.
    int64_t (*max_prepared_bytes)(int64_t num_rows, int64_t in_features);

    // Returns whether such rows must be prepared; if not, products read them in place.
    bool (*needs_prepared_input)(int64_t format, int64_t dtype, int64_t in_features);

    // Prepares row `row` of a product's input (at x, one of num_rows) and writes it to its place in `prepared`.
    void (*prepare_input_row)(int64_t format, int64_t dtype, int64_t in_features, int64_t num_rows, int64_t row,
                              const void* x, void* prepared);

    // output (+)= input @ weight^T + bias, for columns [0, out_features) of the output. `prepared`
    // is read instead of an input that needs it. Each thread of a team must call this.
    void (*multiply_prepared_input)(const TokendLinearPart& part, int64_t dtype, int64_t num_rows,
                                    const tokend::RowsOf& input, const void* prepared, const tokend::RowsOf& output,
                                    bool adds);

    // output = input @ weight^T + bias for a part of them, by the calling thread alone.
    void (*multiply_share)(const TokendLinearPart& part, const tokend::ProductShare& share);
};

extern "C" {

// Returns the products of this library.
__attribute__((visibility("default"))) const TokendProductKernels* tokend_product_kernels();
}
