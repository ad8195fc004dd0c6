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

// A vector of a weight's codes for a product.
struct DotWeight {
#if defined(TOKEND_WORDS_FIRST)
    static constexpr bool OFFSET = false;  // of the codes, which `start` of a row would remove
    SignedCodes codes;
    TOKEND_INLINE explicit DotWeight(const uint8_t* from) : codes(load_bytes<DotU>(from)) {}
    TOKEND_INLINE DotI add(DotI sum, DotI x) const { return add_fours(sum, codes.pairs_with(x)); }
#else
    static constexpr bool OFFSET = true;
    DotU codes;
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
