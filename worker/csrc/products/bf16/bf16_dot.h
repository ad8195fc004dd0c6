// Products of some rows with the 32 outputs of a pair of panels of bfloat16, by vectors.
//
// Without an instruction for pairs of bfloat16, rows are float32 already, and a line of the weight
// becomes two vectors of floats: the lower and the upper halves of its words.
#pragma once

#include "common/row_vectors.h"
#include "products/bf16/bf16_format.h"

namespace tokend {

#if defined(__AVX512BF16__)

typedef bfloat16 Bf16Input;  // a number of a row as products read it
constexpr int BF16_ROWS = 8;

struct Bf16Line {
    __m512bh words;
    TOKEND_INLINE explicit Bf16Line(const uint8_t* from) : words((__m512bh)load_bytes<__m512i>(from)) {}
    Bf16Line() = default;
    // sum + the products of two inputs.
    TOKEND_INLINE F<16> add(F<16> sum, const bfloat16* x) const {
        const __m512i both = _mm512_set1_epi32(load_bytes<int32_t>(x));
        return (F<16>)_mm512_dpbf16_ps((__m512)sum, words, (__m512bh)both);
    }
};

#else

typedef float Bf16Input;  // of a bfloat16 number
#if defined(__AVX512F__)
constexpr int BF16_ROWS = 8;
#else
constexpr int BF16_ROWS = 4;
#endif

struct Bf16Line {
    F<ROW_LANES> low, high;
    TOKEND_INLINE explicit Bf16Line(const uint8_t* from) {
        typedef Vec<ROW_LANES>::U U;
        const U words = load_bytes<U>(from);
        low = bit_cast<F<ROW_LANES>>(U(words << 16));
        high = bit_cast<F<ROW_LANES>>(U(words & 0xffff0000u));
    }
    Bf16Line() = default;
    TOKEND_INLINE F<ROW_LANES> add(F<ROW_LANES> sum, const float* x) const {
        sum = multiply_add<ROW_LANES>(low, splat<ROW_LANES>(x[0]), sum);
        return multiply_add<ROW_LANES>(high, splat<ROW_LANES>(x[1]), sum);
    }
};

#endif

// The prefetch distance of a weight's lines in bytes.
constexpr int64_t BF16_FETCH_AHEAD = 8192;
// Lines of a panel after which the next of both panels are asked for.
constexpr int BF16_FETCH_LINES = 4;

// Lines to ask for, `count` of them in each step.
struct LinesAhead {
    const uint8_t* from;
    int64_t count;
};

// The outputs from `first` on, VECTORS vectors of them: sums [ROWS][PAIR_OUTPUTS]. A function of its
// own, because within its caller GCC keeps the sums in memory instead of registers: a third of the
// speed. NEAR: lines ahead, all that a step has, are for this tile, in the L1 cache; else for the next pair, in the
// L2 cache. They are asked for in the order of their addresses: a Zen 4 reads 11 GB/s where requests alternate
// between the panels of a step, as its loads do, and 30 so.
template <int ROWS, int VECTORS, bool NEAR>
TOKEND_FLATTEN __attribute__((noinline)) void bf16_dot_tile(const uint8_t* pair, int64_t num_steps, int first,
                                                            const Bf16Input* x, int64_t stride, LinesAhead ahead,
                                                            float* sums) {
    constexpr int N = ROW_LANES;
    F<N> total[ROWS][VECTORS] = {};
    for (int64_t step = 0; step < num_steps; step++, pair += PAIR_STEP_BYTES) {
        if constexpr (!NEAR)
            for (int64_t i = 0; i < ahead.count; i++, ahead.from += 64) __builtin_prefetch(ahead.from, 0, 2);
        for (int64_t line = 0; line < STEP_LINES; line++, x += 2) {
            if (NEAR && line % BF16_FETCH_LINES == 0)
                for (int i = 0; i < 2 * BF16_FETCH_LINES; i++, ahead.from += 64) __builtin_prefetch(ahead.from);
            const uint8_t* from = pair + line * LINE_BYTES;
            Bf16Line weight[VECTORS];
            each<VECTORS>([&](auto i) {
                const int output = first + i * N;
                weight[i] = Bf16Line(from + output / PANEL_OUTPUTS * PANEL_STEP_BYTES + output % PANEL_OUTPUTS * 4);
            });
            each<ROWS>([&](auto row) {
                each<VECTORS>([&](auto i) { total[row][i] = weight[i].add(total[row][i], x + row * stride); });
            });
        }
    }
    each<ROWS>([&](auto row) {
        each<VECTORS>([&](auto i) { store<N>(sums + row * PAIR_OUTPUTS + first + i * N, total[row][i]); });
    });
}

// All 32 outputs of ROWS rows; a single row uses more parallel chains of sums.
template <int ROWS, bool NEAR>
inline void bf16_dot_rows(const uint8_t* pair, int64_t num_steps, const Bf16Input* x, int64_t stride, LinesAhead ahead,
                          float* sums) {
    constexpr int ALL = int(PAIR_OUTPUTS) / ROW_LANES, VECTORS = ROWS > 1 ? 2 : ALL > 4 ? 4 : ALL;
    bf16_dot_tile<ROWS, VECTORS, NEAR>(pair, num_steps, 0, x, stride, ahead, sums);
    for (int first = VECTORS * ROW_LANES; first < PAIR_OUTPUTS; first += VECTORS * ROW_LANES)
        bf16_dot_tile<ROWS, VECTORS, false>(pair, num_steps, first, x, stride, {}, sums);
}

// sums: [num_rows][PAIR_OUTPUTS]. FETCH: the first tile asks for lines of this pair. fetch_next: the
// tiles after it, which find the pair in a cache, ask for the next one, each for its part.
template <bool FETCH>
inline void bf16_dot_pair(const uint8_t* pair, int64_t num_steps, const Bf16Input* x, int64_t stride,
                          int64_t num_rows, float* sums, bool fetch_next) {
    int64_t row = 0;
    const auto some = [&](auto rows, auto near, LinesAhead ahead) {
        bf16_dot_rows<rows, near>(pair, num_steps, x + row * stride, stride, ahead, sums + row * PAIR_OUTPUTS);
        row += rows;
    };
    const auto most = [&](auto near, LinesAhead ahead) {
        const int64_t left = num_rows - row;
        if (left >= BF16_ROWS)
            some(std::integral_constant<int, BF16_ROWS>(), near, ahead);
        else if (BF16_ROWS > 4 && left >= 4)
            some(std::integral_constant<int, 4>(), near, ahead);
        else if (left >= 2)
            some(std::integral_constant<int, 2>(), near, ahead);
        else
            some(std::integral_constant<int, 1>(), near, ahead);
    };
    most(std::bool_constant<FETCH>(), {pair + BF16_FETCH_AHEAD, 0});
    const int64_t tiles = fetch_next ? (num_rows - 1) / BF16_ROWS : 0;
    LinesAhead next = {pair + num_steps * PAIR_STEP_BYTES, tiles ? (PAIR_STEP_BYTES / 64 + tiles - 1) / tiles : 0};
    for (; row < num_rows; next.from += next.count * num_steps * 64) most(std::false_type(), next);
}

}  // namespace tokend
