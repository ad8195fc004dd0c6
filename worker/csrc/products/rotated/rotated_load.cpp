// Rotates and rounds the rows of a dense weight. Single-threaded: the caller uses several threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/simd.h"
#include "products/rotated/rotated_format.h"

namespace tokend {
namespace {

template <class T>
void rotate_dense(const TokendRotatedShape& weight, int64_t stride, const T* dense) {
    const RotatedLayout layout(weight);
    const int64_t in_features = weight.in_features;
    float* scales = layout.scales(weight);
    std::memset(weight.packed, WEIGHT_ZERO, size_t(layout.code_bytes()));
    std::fill_n(scales, layout.outputs, 0.0f);
    std::vector<float> numbers(size_t(in_features), 0.0f);
    std::vector<int8_t> codes(size_t(layout.inputs), 0);
    for (int64_t output = 0; output < weight.out_features; output++) {
        const T* from = dense + output * stride;
        for (int64_t at = 0; at < in_features; at += 8) store<8>(numbers.data() + at, load<8>(from + at));
        const RowFacts facts = code_row(numbers.data(), in_features, codes.data());
        scales[output] = facts.scale / float(rotated_block(in_features));
        uint8_t* to = layout.panel(weight, output / PANEL_OUTPUTS) + output % PANEL_OUTPUTS * GROUP;
        for (int64_t at = 0; at < in_features; at += GROUP, to += GROUP_BYTES) {
            const uint32_t word = load_bytes<uint32_t>(codes.data() + at) ^ 0x80808080u;
            std::memcpy(to, &word, sizeof(word));
        }
    }
}

}  // namespace
}  // namespace tokend

using namespace tokend;

extern "C" int64_t tokend_rotated_bytes(const TokendRotatedShape* weight) { return RotatedLayout(*weight).bytes(); }

extern "C" void tokend_rotate_dense(const TokendRotatedShape* weight, int64_t dtype, int64_t stride, const void* dense) {
    switch (dtype) {
        case 0: return rotate_dense(*weight, stride, static_cast<const float*>(dense));
        case 1: return rotate_dense(*weight, stride, static_cast<const bfloat16*>(dense));
        case 2: return rotate_dense(*weight, stride, static_cast<const float16*>(dense));
    }
}
