// The products of a few rows with some vectors of a panel, sums in registers.
//
// For each output and row:  sum += scale_of_block * (codes · x codes) * scale_of_x
//                                + minimum_of_block * (scale_of_x * sum of x codes)
// block after block. The sums of codes are integers and exact, so that all tiles, however
// many rows they have and wherever their weights come from, give the same bits.
#pragma once

#include "packed_source.h"

namespace tokend {

#if defined(__AVX512F__)
constexpr int TILE_VECTORS = 2, TILE_ROWS = 6, TILE_MIDDLE = 4;
#else
constexpr int TILE_VECTORS = 1, TILE_ROWS = 4, TILE_MIDDLE = 2;
#endif

// Adds to dots[row][vector] the products of block inputs of one half.
template <class Source, int HALF, int ROWS, class Block>
TOKEND_INLINE void add_products(const Block& block, const TokendQuantised* x, int64_t stride,
                                DotI (&dots)[ROWS][TILE_VECTORS]) {
    constexpr int STEPS = 8 / Source::HALVES;
    const auto codes_of_x = [&](auto row, auto j) {
        return splat_int(load_bytes<int32_t>(x[row * stride].codes + j * 4));
    };
#if defined(__SSSE3__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
    if constexpr (Source::BITS == 8) {
        // 255 * 127 * 2 is no 16-bit word: the highest bit goes on its own.
        each<STEPS>([&](auto step) {
            constexpr int J = HALF * STEPS + step;
            each<TILE_VECTORS>([&](auto vector) {
                const DotU all = block.template codes<J>(vector);
                const DotU low = all & 0x7f7f7f7fu, high = all & 0x80808080u;
                each<ROWS>([&](auto row) {
                    const DotI from = codes_of_x(row, std::integral_constant<int, J>());
                    dots[row][vector] = add_fours(add_fours(dots[row][vector], pairs(low, from)), pairs(high, from));
                });
            });
        });
    } else {
        constexpr int MOST = Source::BITS == 4 ? 8 : Source::BITS == 5 ? 4 : 2;  // sums that fit in a word
        constexpr int RUN = MOST < STEPS ? MOST : STEPS;
        each<STEPS / RUN>([&](auto run) {
            DotI words[ROWS][TILE_VECTORS];
            each<RUN>([&](auto step) {
                constexpr int J = HALF * STEPS + run * RUN + step;
                each<TILE_VECTORS>([&](auto vector) {
                    const DotU codes = block.template codes<J>(vector);
                    each<ROWS>([&](auto row) {
                        const DotI both = pairs(codes, codes_of_x(row, std::integral_constant<int, J>()));
                        words[row][vector] = step == 0 ? both : add_words(words[row][vector], both);
                    });
                });
            });
            each<ROWS>([&](auto row) {
                each<TILE_VECTORS>(
                    [&](auto vector) { dots[row][vector] = add_fours(dots[row][vector], words[row][vector]); });
            });
        });
    }
#else
    each<STEPS>([&](auto step) {
        constexpr int J = HALF * STEPS + step;
        DotU codes[TILE_VECTORS];
        each<TILE_VECTORS>([&](auto vector) { codes[vector] = block.template codes<J>(vector); });
        each<ROWS>([&](auto row) {
            const DotI from = codes_of_x(row, std::integral_constant<int, J>());
            each<TILE_VECTORS>([&](auto vector) { dots[row][vector] = dot(dots[row][vector], codes[vector], from); });
        });
    });
#endif
}

// Adds to result[row][output] for TILE_VECTORS vectors from `vector` on; x: the first row's
// blocks, stride blocks from row to row.
template <int ROWS, class Source>
TOKEND_FLATTEN __attribute__((noinline)) void tile(const Source& from, int64_t num_blocks, int vector,
                                                   const TokendQuantised* x, int64_t stride, float* result) {
    const Source source = from;
    DotF sums[ROWS][TILE_VECTORS];
    each<ROWS>([&](auto row) {
        each<TILE_VECTORS>(
            [&](auto i) { sums[row][i] = load<DOT_LANES>(result + row * PANEL + (vector + i) * DOT_LANES); });
    });
    for (int64_t index = 0; index < num_blocks; index++, x++) {
        const auto block = source.block(index, vector);
        if (vector == 0) source.fetch_ahead(index);
        each<Source::HALVES>([&](auto half) {
            DotI dots[ROWS][TILE_VECTORS];
            each<ROWS>([&](auto row) {
                const int32_t* minus = x[row * stride].minus;
                const int32_t sum = Source::HALVES == 2 ? minus[half] : minus[0] + minus[1];
                const DotI start = splat_int(Source::HAS_LOW ? DOTS_START : DOTS_START + sum * source.zero);
                each<TILE_VECTORS>([&](auto i) { dots[row][i] = start; });
            });
            add_products<Source, half>(block, x, stride, dots);
            each<TILE_VECTORS>([&](auto i) {
                const ScaledDots scaled(block.scale(half, i));
                each<ROWS>([&](auto row) {
                    const DotF scale_of_x = splat<DOT_LANES>(x[row * stride].scale);
                    sums[row][i] = fused(scaled(dots[row][i]), scale_of_x, sums[row][i]);
                });
            });
        });
        if constexpr (Source::HAS_LOW)
            each<TILE_VECTORS>([&](auto i) {
                const DotF low = block.low(i);
                each<ROWS>([&](auto row) {
                    sums[row][i] = fused(low, splat<DOT_LANES>(x[row * stride].total), sums[row][i]);
                });
            });
    }
    each<ROWS>([&](auto row) {
        each<TILE_VECTORS>(
            [&](auto i) { store<DOT_LANES>(result + row * PANEL + (vector + i) * DOT_LANES, sums[row][i]); });
    });
}

// The same for any number of rows; `result` has PANEL floats for each. Tiles have
// LARGEST rows, MIDDLE or 1: few kinds, because every kind of every source is compiled.
template <int LARGEST, int MIDDLE, class Source>
void tiles(const Source& source, int64_t num_blocks, const TokendQuantised* x, int64_t stride, int64_t num_rows,
           float* result) {
    for (int64_t row = 0; row < num_rows;) {
        const int64_t left = num_rows - row;
        const auto all_vectors = [&](auto rows) {
            for (int vector = 0; vector < PANEL / DOT_LANES; vector += TILE_VECTORS)
                tile<rows>(source, num_blocks, vector, x + row * stride, stride, result + row * PANEL);
            row += rows;
        };
        // 8 = 4 + 4, rather than 6 + 1 + 1
        const bool two_halves = LARGEST < 2 * MIDDLE && left >= 2 * MIDDLE && left < LARGEST + MIDDLE;
        if (left >= LARGEST && !two_halves)
            all_vectors(std::integral_constant<int, LARGEST>());
        else if (left >= MIDDLE)
            all_vectors(std::integral_constant<int, MIDDLE>());
        else
            all_vectors(std::integral_constant<int, 1>());
    }
}

}  // namespace tokend
