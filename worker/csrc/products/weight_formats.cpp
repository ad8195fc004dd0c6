// How the products of each weight format read their input, and which kernel multiplies.
#include "products/bf16/bf16_format.h"
#include "products/fp8/fp8_format.h"
#include "products/packed/packed.h"
#include "products/packed/packed_format.h"
#include "products/rotated/rotated_format.h"
#include "products/weight_formats.h"

#include <algorithm>

namespace tokend {
namespace {

int64_t max_prepared_bytes(int64_t num_rows, int64_t in_features) {
    const int64_t of_blocks = num_rows * (in_features / 32) * int64_t(sizeof(TokendQuantised));
    return std::max(
        {of_blocks, tokend_code_bytes(num_rows, in_features), tokend_bf16_prepared_bytes(num_rows, in_features)});
}

bool reads_bf16(int64_t format) { return format == TOKEND_BF16 || format == TOKEND_FP8; }

bool needs_prepared_input(int64_t format, int64_t dtype, int64_t in_features) {
    return !reads_bf16(format) || !bf16_rows_in_place(dtype, in_features);
}

void prepare_input_row(int64_t format, int64_t dtype, int64_t in_features, int64_t num_rows, int64_t row, const void* x,
                       void* prepared) {
    if (reads_bf16(format)) return prepare_bf16_row(dtype, in_features, row, x, prepared);
    TokendProduct product = {};
    product.input_dtype = dtype;
    product.input = x;
    if (format == TOKEND_ROTATED) {
        const CodesLayout layout(num_rows, in_features);
        layout.facts(prepared)[row] =
            code_input(product, in_features, 0, row_scratch(in_features), layout.codes(prepared, row));
    } else {
        quantise_row(product, in_features, 0, static_cast<TokendQuantised*>(prepared) + row * (in_features / 32));
    }
}

void multiply_prepared_input(const TokendLinearPart& part, int64_t dtype, int64_t num_rows, const RowsOf& input,
                             const void* prepared, const RowsOf& output, bool adds) {
    TokendProduct product = {};
    product.num_rows = num_rows;
    product.input_dtype = dtype;
    product.input_stride = input.stride;
    product.input = input.memory;
    product.bias_dtype = part.bias_dtype;
    product.bias = part.bias;
    product.output_dtype = dtype;
    product.output_stride = output.stride;
    product.output = output.memory;
    product.adds = adds;
    switch (part.format) {
        case TOKEND_PACKED:
            return tokend_quantised_product(static_cast<const TokendPackedShape*>(part.weight), &product,
                                            static_cast<const TokendQuantised*>(prepared));
        case TOKEND_ROTATED:
            return tokend_coded_product(static_cast<const TokendRotatedShape*>(part.weight), &product, prepared);
        case TOKEND_BF16:
            return tokend_bf16_prepared_product(static_cast<const TokendBf16Shape*>(part.weight), &product, prepared);
        case TOKEND_FP8:
            return tokend_fp8_prepared_product(static_cast<const TokendFp8Shape*>(part.weight), &product, prepared);
    }
}

void multiply_share(const TokendLinearPart& part, const ProductShare& share) {
    TokendProduct product = {};
    product.num_rows = share.total_rows;
    product.input_dtype = share.input_dtype;
    product.input_stride = share.input.stride;
    product.input = share.input.memory;
    product.bias_dtype = part.bias_dtype;
    product.bias = part.bias;
    product.output_dtype = share.output_dtype;
    product.output_stride = share.output.stride;
    product.output = share.output.memory;
    const ProductPart of = {share.first_panel, share.end_panel, share.first_row, share.first_row + share.num_rows};
    switch (part.format) {
        case TOKEND_PACKED:
            return multiply_packed_part(*static_cast<const TokendPackedShape*>(part.weight), product,
                                        static_cast<const TokendQuantised*>(share.prepared), of);
        case TOKEND_ROTATED:
            return multiply_rotated_part(*static_cast<const TokendRotatedShape*>(part.weight), product, share.prepared,
                                         of);
        case TOKEND_BF16:
            return multiply_bf16_part(*static_cast<const TokendBf16Shape*>(part.weight), product, share.prepared, of);
        case TOKEND_FP8:
            return multiply_fp8_part(*static_cast<const TokendFp8Shape*>(part.weight), product, share.prepared, of);
    }
}

}  // namespace
}  // namespace tokend

extern "C" const TokendProductKernels* tokend_product_kernels() {
    static const TokendProductKernels kernels = {tokend::max_prepared_bytes, tokend::needs_prepared_input,
                                                 tokend::prepare_input_row, tokend::multiply_prepared_input,
                                                 tokend::multiply_share};
    return &kernels;
}
