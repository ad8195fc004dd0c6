// What each form of weights calls codes, and which kernel multiplies them.
#include "linear_forms.h"

#include <algorithm>

#include "bf16_rows.h"
#include "packed.h"
#include "packed_rows.h"
#include "rotated_rows.h"

namespace tokend {

int64_t most_code_bytes(int64_t num_rows, int64_t in_features) {
    const int64_t of_blocks = num_rows * (in_features / 32) * int64_t(sizeof(TokendQuantised));
    return std::max(
        {of_blocks, tokend_code_bytes(num_rows, in_features), tokend_bf16_code_bytes(num_rows, in_features)});
}

bool has_codes(int64_t form, int64_t dtype, int64_t in_features) {
    return form != TOKEND_BF16 || !bf16_rows_in_place(dtype, in_features);
}

void code_row(int64_t form, int64_t dtype, int64_t in_features, int64_t num_rows, int64_t row, const void* x,
              void* codes) {
    if (form == TOKEND_BF16) return code_bf16_row(dtype, in_features, row, x, codes);
    TokendProduct product = {};
    product.input_dtype = dtype;
    product.input = x;
    if (form == TOKEND_ROTATED) {
        const CodesLayout layout(num_rows, in_features);
        layout.facts(codes)[row] =
            code_input(product, in_features, 0, row_scratch(in_features), layout.codes(codes, row));
    } else {
        quantise_row(product, in_features, 0, static_cast<TokendQuantised*>(codes) + row * (in_features / 32));
    }
}

void multiply_codes(const TokendPart& part, int64_t dtype, int64_t num_rows, const RowsOf& input, const void* codes,
                    const RowsOf& output, bool adds) {
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
    switch (part.form) {
        case TOKEND_BLOCKS:
            return tokend_quantised_product(static_cast<const TokendWeight*>(part.weight), &product,
                                            static_cast<const TokendQuantised*>(codes));
        case TOKEND_ROTATED:
            return tokend_coded_product(static_cast<const TokendRotated*>(part.weight), &product, codes);
        case TOKEND_BF16:
            return tokend_bf16_coded_product(static_cast<const TokendBf16*>(part.weight), &product, codes);
    }
}

}  // namespace tokend
