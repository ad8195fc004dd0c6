// Integer products of some rows with the 32 outputs of a pair of panels, without tiles.
//
// sums[row][output] = the sum of (code of the weight, 0 … 255) * (code of the row, -127 … 127).
#pragma once

#include "products/packed/packed_dot.h"
#include "products/rotated/rotated_format.h"

namespace tokend {

constexpr int PANEL_VECTORS = int(PANEL_OUTPUTS) / DOT_LANES;
#if defined(__AVX512F__)
// Two panels of one vector each.
constexpr int DOT_PANELS = 2, DOT_ROWS = 8;
#else
// One panel of two vectors or of four.
constexpr int DOT_PANELS = 1, DOT_ROWS = 4;
#endif
constexpr int DOT_VECTORS = DOT_PANELS * PANEL_VECTORS;

// 64 bytes of a weight for a product: `start` of a row removes its offset.
struct DotWeight {
    DotU codes;
#if defined(__SSSE3__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
    // 255 * 127 * 2 exceeds 16 bits, but 127 * 127 * 2 does not: magnitudes are multiplied by x
    // with the weight's sign, which also removes the offset.
    static constexpr bool OFFSET = false;
#if defined(__AVX512F__)
    __mmask64 negative;
    TOKEND_INLINE explicit DotWeight(const uint8_t* from) {
        const __m512i plain = _mm512_xor_si512(load_bytes<__m512i>(from), _mm512_set1_epi8(-128));
        negative = _mm512_movepi8_mask(plain);
        codes = (DotU)_mm512_abs_epi8(plain);
    }
    TOKEND_INLINE DotI add(DotI sum, DotI x) const {
        const __m512i turned = _mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
        return add_fours(sum, pairs(codes, (DotI)turned));
    }
#elif defined(__AVX2__)
    __m256i plain;
    TOKEND_INLINE explicit DotWeight(const uint8_t* from) {
        plain = _mm256_xor_si256(load_bytes<__m256i>(from), _mm256_set1_epi8(-128));
        codes = (DotU)_mm256_abs_epi8(plain);
    }
    TOKEND_INLINE DotI add(DotI sum, DotI x) const {
        return add_fours(sum, pairs(codes, (DotI)_mm256_sign_epi8((__m256i)x, plain)));
    }
#else
    __m128i plain;
    TOKEND_INLINE explicit DotWeight(const uint8_t* from) {
        plain = _mm_xor_si128(load_bytes<__m128i>(from), _mm_set1_epi8(-128));
        codes = (DotU)_mm_abs_epi8(plain);
    }
    TOKEND_INLINE DotI add(DotI sum, DotI x) const {
        return add_fours(sum, pairs(codes, (DotI)_mm_sign_epi8((__m128i)x, plain)));
    }
#endif
#else
    static constexpr bool OFFSET = true;
    TOKEND_INLINE explicit DotWeight(const uint8_t* from) : codes(load_bytes<DotU>(from)) {}
    TOKEND_INLINE DotI add(DotI sum, DotI x) const { return dot(sum, codes, x); }
#endif
    DotWeight() = default;
};

// The prefetch distance of a weight's lines in bytes.
constexpr int64_t FETCH_AHEAD = 2048;

template <int ROWS>
TOKEND_FLATTEN void dot_tile(const uint8_t* panel, int64_t panel_bytes, int64_t num_groups, const int8_t* x,
                             int64_t stride, int32_t* sums) {
    DotI total[ROWS][DOT_VECTORS] = {};
    for (int64_t group = 0; group < num_groups; group++, panel += GROUP_BYTES, x += GROUP) {
        DotWeight weight[DOT_VECTORS];
        each<DOT_VECTORS>([&](auto i) {
            const uint8_t* from = panel + i / PANEL_VECTORS * panel_bytes;
            weight[i] = DotWeight(from + i % PANEL_VECTORS * DOT_LANES * GROUP);
            if constexpr (i % PANEL_VECTORS == 0) __builtin_prefetch(from + FETCH_AHEAD);
        });
        each<ROWS>([&](auto row) {
            const DotI codes = splat_int(load_bytes<int32_t>(x + row * stride));
            each<DOT_VECTORS>([&](auto i) { total[row][i] = weight[i].add(total[row][i], codes); });
        });
    }
    each<ROWS>([&](auto row) {
        each<DOT_VECTORS>([&](auto i) {
            __builtin_memcpy(sums + row * PAIR_OUTPUTS + i * DOT_LANES, &total[row][i], sizeof(DotI));
        });
    });
}

// sums: [num_rows][PAIR_OUTPUTS].
inline void dot_pair(const uint8_t* pair, int64_t panel_bytes, int64_t inputs, const int8_t* x, int64_t stride,
                     int64_t num_rows, int32_t* sums) {
    for (int64_t row = 0; row < num_rows;) {
        const auto panels = [&](auto rows) {
            for (int panel = 0; panel < 2; panel += DOT_PANELS)
                dot_tile<rows>(pair + panel * panel_bytes, panel_bytes, inputs / GROUP, x + row * stride, stride,
                               sums + row * PAIR_OUTPUTS + panel * PANEL_OUTPUTS);
            row += rows;
        };
        const int64_t left = num_rows - row;
        if (left >= DOT_ROWS)
            panels(std::integral_constant<int, DOT_ROWS>());
        else if (left >= DOT_ROWS / 2)
            panels(std::integral_constant<int, DOT_ROWS / 2>());
        else if (left >= 2)
            panels(std::integral_constant<int, 2>());
        else
            panels(std::integral_constant<int, 1>());
    }
}

}  // namespace tokend
