// What each form of weights calls codes, and which kernel multiplies them.
#include "linear_forms.h"

#include "packed.h"
#include "packed_rows.h"

namespace tokend {

int64_t most_code_bytes(int64_t num_rows, int64_t in_features) {
    return num_rows * (in_features / 32) * int64_t(sizeof(TokendQuantised));
}

void code_row(int64_t, int64_t dtype, int64_t in_features, int64_t row, const void* x, void* codes) {
    TokendProduct product = {};
    product.input_dtype = dtype;
    product.input = x;
    quantise_row(product, in_features, 0, static_cast<TokendQuantised*>(codes) + row * (in_features / 32));
}

void multiply_codes(const TokendPart& part, int64_t num_rows, const void* codes, int64_t dtype,
                    int64_t output_stride, void* output, bool adds) {
    TokendProduct product = {};
    product.num_rows = num_rows;
    product.bias_dtype = part.bias_dtype;
    product.bias = part.bias;
    product.output_dtype = dtype;
    product.output_stride = output_stride;
    product.output = output;
    product.adds = adds;
    tokend_quantised_product(static_cast<const TokendWeight*>(part.weight), &product,
                             static_cast<const TokendQuantised*>(codes));
}

}  // namespace tokend
