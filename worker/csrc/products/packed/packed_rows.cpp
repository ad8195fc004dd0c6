// Rounds rows to 8 bits: code = x * (127 / largest), to the nearest, ties to even.
#include "products/packed/packed_dot.h"
#include "products/packed/packed_format.h"

#include <cmath>
#include <limits>


namespace tokend {
namespace {

constexpr int L = DOT_LANES;
constexpr int VECTORS = 32 / L;

// Reduces all lanes with `join`; the result is in every lane.
template <class Join>
TOKEND_INLINE int32_t across(DotI value, Join join) {
    each<L == 16 ? 4 : L == 8 ? 3 : 2>([&](auto step) {
        DotI other = [&]<int... LANE>(std::integer_sequence<int, LANE...>) {
            return __builtin_shuffle(value, DotI{(LANE ^ 1 << step)...});
        }(std::make_integer_sequence<int, L>());
        value = join(value, other);
    });
    return value[0];
}

TOKEND_INLINE DotI to_nearest(DotF value) {
#if defined(__AVX512F__)
    return (DotI)_mm512_cvtps_epi32((__m512)value);
#elif defined(__AVX2__)
    return (DotI)_mm256_cvtps_epi32((__m256)value);
#elif defined(__SSE2__)
    return (DotI)_mm_cvtps_epi32((__m128)value);
#else
    DotI result;
    for (int lane = 0; lane < L; lane++) result[lane] = int32_t(std::nearbyint(value[lane]));
    return result;
#endif
}

constexpr float SMALLEST = 0x1p-100f;  // below, a block counts as zeros: 127 / largest is finite

TOKEND_INLINE void quantise(const DotF (&x)[VECTORS], TokendQuantised& to) {
    DotI magnitude{};
    each<VECTORS>([&](auto i) {
        const DotI bits = bit_cast<DotI>(x[i]) & 0x7fffffff;
        magnitude = bits > magnitude ? bits : magnitude;
    });
    const int32_t bits = across(magnitude, [](DotI a, DotI b) { return a > b ? a : b; });
    const float largest = bit_cast<float>(bits);
    if (bits >= 0x7f800000 || largest < SMALLEST) {
        to = TokendQuantised{};
        if (bits >= 0x7f800000) to.scale = to.total = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    const float factor = 127.0f / largest;
    DotI sums[2] = {};
    each<VECTORS>([&](auto i) {
        typedef int8_t Bytes __attribute__((vector_size(L)));
        const DotI codes = to_nearest(x[i] * factor);
        const Bytes bytes = __builtin_convertvector(codes, Bytes);
        __builtin_memcpy(to.codes + i * L, &bytes, L);
        sums[i / (VECTORS / 2)] -= codes;
    });
    const auto add = [](DotI a, DotI b) { return a + b; };
    to.scale = largest / 127.0f;
    to.minus[0] = across(sums[0], add);
    to.minus[1] = across(sums[1], add);
    to.total = to.scale * float(-(to.minus[0] + to.minus[1]));
}

template <class T>
TOKEND_FLATTEN void quantise_numbers(const T* from, int64_t num_blocks, TokendQuantised* to) {
    for (int64_t block = 0; block < num_blocks; block++, from += 32) {
        DotF x[VECTORS];
        each<VECTORS>([&](auto i) { x[i] = load<L>(from + i * L); });
        quantise(x, to[block]);
    }
}

}  // namespace

void quantise_row(const TokendProduct& product, int64_t in_features, int64_t row, TokendQuantised* to) {
    const int64_t at = row * product.input_stride;
    if (product.input_dtype == 0)
        quantise_numbers(static_cast<const float*>(product.input) + at, in_features / 32, to);
    else
        quantise_numbers(static_cast<const bfloat16*>(product.input) + at, in_features / 32, to);
}

}  // namespace tokend

extern "C" void tokend_quantise_rows(const TokendProduct* product, int64_t in_features, TokendQuantised* rows) {
#pragma omp parallel for schedule(static) if (product->num_rows * in_features > 16384)
    for (int64_t row = 0; row < product->num_rows; row++)
        tokend::quantise_row(*product, in_features, row, rows + row * (in_features / 32));
}
