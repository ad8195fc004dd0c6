// The products of a few rows with some vectors of a panel, sums in registers.
//
// For each output and row:  sum += scale_of_block * (codes · x codes) * scale_of_x
//                                + minimum_of_block * (scale_of_x * sum of x codes)
// block after block. The sums of codes are integers and exact, so that all tiles, however
// many rows they have and wherever their weights come from, give the same bits.
#pragma once

#include "common/amx.h"
#include "products/packed/packed_dot.h"
#include "products/packed/packed_format.h"

namespace tokend {

// The source of a block's weights: the packed bytes, or bytes and floats that were unpacked for
// many rows. Both give the same numbers.

// A vector is DOT_LANES outputs of the panel; `vector` is the first of those in use.

template <class Format_>
struct Packed {
    using Format = Format_;
    static constexpr int HALVES = Format::HALVES;
    static constexpr bool HAS_LOW = Format::HAS_LOW;
    static constexpr int BITS = Format::CODE_BITS;
    static constexpr int zero = Format::ZERO;

    const uint8_t* panel;

    struct Block {
        const uint8_t* head;
        const uint8_t* codes_at;
        const uint8_t* scales;
        int vector;

        // The rows of codes, of a source whose codes are bytes.
        TOKEND_INLINE const uint8_t* rows() const { return codes_at; }

        template <int J>
        TOKEND_INLINE DotU codes(int index) const {
            const uint8_t* column = codes_at + (vector + index) * DOT_LANES * 4;
            if constexpr (Format::BITS == 8) return load_bytes<DotU>(column + J * ROW);
            if constexpr (Format::BITS <= 3) {
                const DotU low = (load_bytes<DotU>(column + J / 4 * ROW) >> J % 4 * 2) & 0x03030303u;
                if constexpr (Format::BITS == 2) return low;
                const DotU third = load_bytes<DotU>(column + 2 * ROW);
                return low | ((J < 2 ? third << (J < 2 ? 2 - J : 0) : third >> (J < 2 ? 0 : J - 2)) & 0x04040404u);
            }
            const DotU both = load_bytes<DotU>(column + J / 2 * ROW);
            const DotU low = (J % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
            if constexpr (Format::HAS_TABLE) {
                return look_up(TABLE_OF<Format>, low);
            } else if constexpr (Format::BITS == 5) {
                const DotU high = load_bytes<DotU>(column + 4 * ROW);
                return low | ((J < 4 ? high << (J < 4 ? 4 - J : 0) : high >> (J < 4 ? 0 : J - 4)) & 0x10101010u);
            } else if constexpr (Format::BITS == 6) {
                const DotU high = load_bytes<DotU>(column + (4 + J / 4) * ROW);
                constexpr int AT = J % 4 * 2;
                return low | ((AT < 4 ? high << (AT < 4 ? 4 - AT : 0) : high >> (AT < 4 ? 0 : AT - 4)) & 0x30303030u);
            }
            return low;
        }

        TOKEND_INLINE DotF scale(int half, int index) const {
            const int output = (vector + index) * DOT_LANES;
            if constexpr (Format::SCALES == Scales::power) return half_powers(scales + output);
            if constexpr (Format::SCALES == Scales::micro)
                return load_bytes_as_halves(scales + half * PANEL + output) * HALF_OF_E4M3;
            if constexpr (!Format::HAS_HEAD) return load<DOT_LANES>(halves(scales) + output);
            const DotF factor = load<DOT_LANES>(halves(head) + output);
            if constexpr (Format::SCALES == Scales::group || Format::SCALES == Scales::shared) return factor;
            if constexpr (Format::SCALES == Scales::super_low) return factor * load_bytes_as_floats(scales + output);
            if constexpr (Format::SCALES == Scales::super_pair)
                return factor * to_floats(load_bytes_as_ints(scales + half * PANEL + output) & 15);
            return factor * load_bytes_as_floats(reinterpret_cast<const int8_t*>(scales) + half * PANEL + output);
        }

        TOKEND_INLINE DotF low(int half, int index) const {
            const int output = (vector + index) * DOT_LANES;
            if constexpr (!Format::HAS_HEAD) return load<DOT_LANES>(halves(scales) + PANEL + output);
            if constexpr (Format::SCALES == Scales::group)
                return load<DOT_LANES>(halves(head) + output) * -load_bytes_as_floats(head + PANEL * 2 + output);
            const DotF factor = load<DOT_LANES>(halves(head) + PANEL + output);
            if constexpr (Format::SCALES == Scales::super_pair)
                return factor * -to_floats(load_bytes_as_ints(scales + half * PANEL + output) >> 4);
            return factor * -load_bytes_as_floats(scales + PANEL + output);
        }

        // 2^(exponent - 128) of each byte; infinity for 255, which stands for NaN.
        static TOKEND_INLINE DotF half_powers(const uint8_t* exponents) {
            const DotI bits = load_bytes_as_ints(exponents) << 23;
            return bit_cast<DotF>(DotI(bits > LEAST_POWER ? bits : splat_int(LEAST_POWER))) * 0.5f;
        }

        static TOKEND_INLINE const float16* halves(const uint8_t* from) {
            return reinterpret_cast<const float16*>(from);
        }
    };

    TOKEND_INLINE Block block(int64_t index, int vector) const {
        const uint8_t* at = panel + Format::place(index);
        return {panel + Format::head(index), at, at + Format::CODE_BYTES, vector};
    }

    // Prefetches as many lines as a block has, also of the next panel: the hardware prefetcher does
    // not cross pages and is not far enough ahead during multiplications. NEAR: into the L1 cache, not the L2 cache,
    // if codes have less than 8 bits; codes of 8 bits keep the bus busy all the time.
    template <bool NEAR>
    TOKEND_INLINE void fetch_ahead(int64_t index) const {
        constexpr int64_t DISTANCE = 2048;
        constexpr int LOCALITY = NEAR && Format::BITS < 8 ? 3 : 2;
        const uint8_t* at = panel + Format::place(index) + DISTANCE;
        for (int64_t line = 0; line < Format::BLOCK_BYTES + Format::HEAD_BYTES / Format::SUPER; line += 64) __builtin_prefetch(at + line, 0, LOCALITY);
    }
};

// | 8 rows of codes, a byte each | scales, float, of each half | minima, float, of each half |
template <int HALVES_, bool HAS_LOW_, int BITS_>
struct Unpacked {
    static constexpr int HALVES = HALVES_;
    static constexpr bool HAS_LOW = HAS_LOW_;
    static constexpr int BITS = BITS_;
    static constexpr int BYTES = ROW * (8 + HALVES * (HAS_LOW ? 2 : 1));

    const uint8_t* blocks;
    int zero;

    struct Block {
        const uint8_t* at;

        TOKEND_INLINE const uint8_t* rows() const { return at; }

        template <int J>
        TOKEND_INLINE DotU codes(int index) const {
            return load_bytes<DotU>(at + J * ROW + index * DOT_LANES * 4);
        }
        TOKEND_INLINE DotF scale(int half, int index) const {
            return load_bytes<DotF>(at + (8 + half) * ROW + index * DOT_LANES * 4);
        }
        TOKEND_INLINE DotF low(int half, int index) const {
            return load_bytes<DotF>(at + (8 + HALVES + half) * ROW + index * DOT_LANES * 4);
        }
    };

    template <bool>
    TOKEND_INLINE void fetch_ahead(int64_t) const {}

    TOKEND_INLINE Block block(int64_t index, int vector) const {
        return {blocks + index * BYTES + vector * DOT_LANES * 4};
    }
};

// The bits of a code matter only if bytes are added as 16-bit words.
template <class Format>
using UnpackedOf = Unpacked<Format::HALVES, Format::HAS_LOW, WORDS_FIRST ? Format::CODE_BITS : 8>;

// A panel in blocks of the file; only to unpack it.
template <class Format_>
struct PanelInFileBlocks {
    using Format = Format_;

    const uint8_t* panel;

    struct Block {
        Fields fields;
        int sub;

        // The codes of 8 inputs in two words.
        template <int GROUP>
        TOKEND_INLINE void codes(DotU (&words)[2]) const {
            Format::template codes<GROUP>(fields, sub, words);
        }
        TOKEND_INLINE DotF scale(int half, int) const { return Format::scale(fields, sub, half); }
    };

    TOKEND_INLINE Block block(int64_t index, int vector) const {
        return {{panel + Format::place(index) + vector * DOT_LANES}, int(index % Format::SUPER)};
    }

    // As many lines as the block has, of the next one.
    template <bool>
    TOKEND_INLINE void fetch_ahead(int64_t index) const {
        constexpr int64_t BYTES = Format::RAW_BYTES * PANEL, SHARE = BYTES / Format::SUPER;
        const uint8_t* at = panel + Format::place(index) + BYTES + index % Format::SUPER * SHARE;
        for (int64_t line = 0; line < SHARE; line += 64) __builtin_prefetch(at + line, 0, 2);
    }
};

template <class Source>
TOKEND_FLATTEN void unpack_blocks(const Source& source, int64_t begin, int64_t end, uint8_t* to) {
    using Format = typename Source::Format;
    for (int64_t index = begin; index < end; index++, to += UnpackedOf<Format>::BYTES)
        for (int vector = 0; vector < PANEL / DOT_LANES; vector++) {
            if (vector == 0) source.template fetch_ahead<false>(index);
            const auto block = source.block(index, vector);
            uint8_t* column = to + vector * DOT_LANES * 4;
            const auto put = [&](int row, auto value) { __builtin_memcpy(column + row * ROW, &value, sizeof(value)); };
            if constexpr (Format::IN_FILE_BLOCKS)
                each<4>([&](auto group) {
                    DotU words[2];
                    block.template codes<group>(words);
                    put(2 * group, words[0]), put(2 * group + 1, words[1]);
                });
            else
                each<8>([&](auto j) { put(j, block.template codes<j>(0)); });
            each<Format::HALVES>([&](auto half) { put(8 + half, block.scale(half, 0)); });
            if constexpr (Format::HAS_LOW)
                each<Format::HALVES>([&](auto half) { put(8 + Format::HALVES + half, block.low(half, 0)); });
        }
}

// A tile passes through all blocks of a panel. Few rows leave registers for more vectors of it, and
// then fewer passes read it from memory.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_MIDDLE = 4;
template <int ROWS>
constexpr int VECTORS_OF = 2;
#else
constexpr int TILE_ROWS = 4, TILE_MIDDLE = 2;
template <int ROWS>
constexpr int VECTORS_OF = ROWS > 1 ? 2 : 4;
#endif

// Whether codes become whole numbers with a sign before they are multiplied: 255 * 127 * 2 exceeds
// the 16 bits of a pair's sum.
template <class Source>
constexpr bool IS_SIGNED = WORDS_FIRST && Source::BITS == 8;

// Adds to dots[row][vector] the products of block inputs of one half.
template <class Source, int HALF, int ROWS, int VECTORS, class Block>
TOKEND_INLINE void add_products(const Block& block, const TokendQuantised* x, int64_t stride,
                                DotI (&dots)[ROWS][VECTORS]) {
    constexpr int STEPS = 8 / Source::HALVES;
    const auto codes_of_x = [&](auto row, auto j) {
        return splat_int(load_bytes<int32_t>(x[row * stride].codes + j * 4));
    };
#if defined(TOKEND_WORDS_FIRST)
    if constexpr (IS_SIGNED<Source>) {
        each<STEPS>([&](auto step) {
            constexpr int J = HALF * STEPS + step;
            each<VECTORS>([&](auto vector) {
                const SignedCodes codes(block.template codes<J>(vector));
                each<ROWS>([&](auto row) {
                    const DotI from = codes_of_x(row, std::integral_constant<int, J>());
                    dots[row][vector] = add_fours(dots[row][vector], codes.pairs_with(from));
                });
            });
        });
    } else {
        constexpr int MOST = Source::BITS <= 4 ? 8 : Source::BITS == 5 ? 4 : 2;  // sums that fit in a word
        constexpr int RUN = MOST < STEPS ? MOST : STEPS;
        each<STEPS / RUN>([&](auto run) {
            DotI words[ROWS][VECTORS];
            each<RUN>([&](auto step) {
                constexpr int J = HALF * STEPS + run * RUN + step;
                each<VECTORS>([&](auto vector) {
                    const DotU codes = block.template codes<J>(vector);
                    each<ROWS>([&](auto row) {
                        const DotI both = pairs(codes, codes_of_x(row, std::integral_constant<int, J>()));
                        words[row][vector] = step == 0 ? both : add_words(words[row][vector], both);
                    });
                });
            });
            each<ROWS>([&](auto row) {
                each<VECTORS>(
                    [&](auto vector) { dots[row][vector] = add_fours(dots[row][vector], words[row][vector]); });
            });
        });
    }
#else
    each<STEPS>([&](auto step) {
        constexpr int J = HALF * STEPS + step;
        DotU codes[VECTORS];
        each<VECTORS>([&](auto vector) { codes[vector] = block.template codes<J>(vector); });
        each<ROWS>([&](auto row) {
            const DotI from = codes_of_x(row, std::integral_constant<int, J>());
            each<VECTORS>([&](auto vector) { dots[row][vector] = dot(dots[row][vector], codes[vector], from); });
        });
    });
#endif
}

// What the sum of a half's products begins with.
template <class Source>
TOKEND_INLINE int32_t start_of_dots(const TokendQuantised& x, int zero, int half) {
    const int left = zero - (IS_SIGNED<Source> ? 128 : 0);  // to subtract from codes; 0 in a type with minima
    if (left == 0) return DOTS_START;
    return DOTS_START + (Source::HALVES == 2 ? x.minus[half] : x.minus[0] + x.minus[1]) * left;
}

// The sum of the numbers of x to which a minimum applies: of the block, or of a half of it.
template <class Source>
TOKEND_INLINE float total_of(const TokendQuantised& x, int half) {
    return Source::HALVES == 2 ? x.scale * float(-x.minus[half]) : x.total;
}

// Adds to result[row][output] for VECTORS_OF<ROWS> vectors from `vector` on; x: the first row's
// blocks, stride blocks from row to row.
template <int ROWS, class Source>
TOKEND_FLATTEN __attribute__((noinline)) void tile(const Source& from, int64_t num_blocks, int vector,
                                                   const TokendQuantised* x, int64_t stride, float* result) {
    constexpr int VECTORS = VECTORS_OF<ROWS>;
    const Source source = from;
    DotF sums[ROWS][VECTORS];
    each<ROWS>([&](auto row) {
        each<VECTORS>(
            [&](auto i) { sums[row][i] = load<DOT_LANES>(result + row * PANEL + (vector + i) * DOT_LANES); });
    });
    for (int64_t index = 0; index < num_blocks; index++, x++) {
        const auto block = source.block(index, vector);
        if (vector == 0) source.template fetch_ahead<true>(index);
        each<Source::HALVES>([&](auto half) __attribute__((always_inline)) {
            DotI dots[ROWS][VECTORS];
            each<ROWS>([&](auto row) {
                const DotI start = splat_int(start_of_dots<Source>(x[row * stride], source.zero, half));
                each<VECTORS>([&](auto i) { dots[row][i] = start; });
            });
            add_products<Source, half>(block, x, stride, dots);
            each<VECTORS>([&](auto i) {
                const ScaledDots scaled(block.scale(half, i));
                each<ROWS>([&](auto row) {
                    const DotF scale_of_x = splat<DOT_LANES>(x[row * stride].scale);
                    sums[row][i] = fused(scaled(dots[row][i]), scale_of_x, sums[row][i]);
                });
            });
            if constexpr (Source::HAS_LOW)
                each<VECTORS>([&](auto i) {
                    const DotF low = block.low(half, i);
                    each<ROWS>([&](auto row) {
                        const DotF total = splat<DOT_LANES>(total_of<Source>(x[row * stride], half));
                        sums[row][i] = fused(low, total, sums[row][i]);
                    });
                });
        });
    }
    each<ROWS>([&](auto row) {
        each<VECTORS>(
            [&](auto i) { store<DOT_LANES>(result + row * PANEL + (vector + i) * DOT_LANES, sums[row][i]); });
    });
}

// The same for all outputs of the panel.
template <int ROWS, class Source>
inline void tile_of_panel(const Source& source, int64_t num_blocks, const TokendQuantised* x, int64_t stride,
                          float* result) {
    for (int vector = 0; vector < PANEL / DOT_LANES; vector += VECTORS_OF<ROWS>)
        tile<ROWS>(source, num_blocks, vector, x, stride, result);
}

// The same for any number of rows; `result` has PANEL floats for each. Tiles have TILE_ROWS,
// TILE_MIDDLE, 2 or 1 rows: few kinds, because every kind of every source is compiled.
template <class Source>
void tiles(const Source& source, int64_t num_blocks, const TokendQuantised* x, int64_t stride, int64_t num_rows,
           float* result) {
    for (int64_t row = 0; row < num_rows;) {
        const int64_t left = num_rows - row;
        const auto some = [&](auto rows) {
            tile_of_panel<rows>(source, num_blocks, x + row * stride, stride, result + row * PANEL);
            row += rows;
        };
        // 8 = 4 + 4, rather than 6 + 2
        const bool two_halves = TILE_ROWS < 2 * TILE_MIDDLE && left >= 2 * TILE_MIDDLE && left < TILE_ROWS + TILE_MIDDLE;
        if (left >= TILE_ROWS && !two_halves)
            some(std::integral_constant<int, TILE_ROWS>());
        else if (left >= TILE_MIDDLE)
            some(std::integral_constant<int, TILE_MIDDLE>());
        else if (left >= 2)
            some(std::integral_constant<int, 2>());
        else
            some(std::integral_constant<int, 1>());
    }
}

#if defined(TOKEND_AMX) && defined(__AMX_INT8__)

// Sums of 16 rows with a panel by the tile unit (amx.h), whose integers vectors then scale and add in
// the order of `tile`. A tile holds the integers of one half of a block:
//
//               B 6, 7   8 rows of codes, 16 outputs x 4 inputs (4 rows for half a block)
//   A 4         C 0, 1   16 rows x 16 outputs
//   16 rows x 32 inputs
//
// The tiles of the next half are multiplied while vectors add those of the last one.
template <class Source>
class AmxTiles {
  public:
    static constexpr int ROWS = 16;

    AmxTiles() {
        TileShapes shapes;
        for (const int sums : {0, 1, 2, 3}) shapes.set(sums, ROWS);
        shapes.set(4, ROWS, DEPTH);
        for (const int codes : {6, 7}) shapes.set(codes, DEPTH / 4);
        shapes.load();
    }
    ~AmxTiles() { _tile_release(); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;

    // Adds to result[row][output] of ROWS rows; the arguments are those of `tile`.
    TOKEND_FLATTEN __attribute__((noinline)) void operator()(const Source& from, int64_t num_blocks,
                                                             const TokendQuantised* x, int64_t stride, float* result) {
        const Source source = from;
        multiply<0>(source, x, stride, 0);
        for (int64_t index = 0; index < num_blocks; index++) {
            each<Source::HALVES>([&](auto half) __attribute__((always_inline)) {
                const int64_t next = index * Source::HALVES + half + 1;
                if (next < num_blocks * Source::HALVES) {
                    if (next % 2) multiply<1>(source, x, stride, next);
                    else multiply<0>(source, x, stride, next);
                }
                add<half>(source, index, x + index, stride, dots_[(next - 1) % 2], result);
            });
        }
    }

  private:
    static constexpr int DEPTH = BLOCK / Source::HALVES;  // inputs
    static constexpr int LINE = PANEL * 4;                // bytes of a row of sums

    // The sums of half a block to dots_[BUFFER].
    template <int BUFFER>
    TOKEND_INLINE void multiply(const Source& source, const TokendQuantised* x, int64_t stride, int64_t number) {
        const int64_t index = number / Source::HALVES, half = number % Source::HALVES;
        const uint8_t* codes = source.block(index, 0).rows() + half * (DEPTH / 4) * ROW;
        _tile_loadd(4, x[index].codes + half * DEPTH, stride * sizeof(TokendQuantised));
        _tile_loadd(6, codes, ROW);
        _tile_loadd(7, codes + ROW / 2, ROW);
        if constexpr (BUFFER == 0) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            _tile_stored(0, dots_[0], LINE);
            _tile_stored(1, dots_[0] + PANEL / 2, LINE);
        } else {
            _tile_zero(2);
            _tile_zero(3);
            _tile_dpbsud(2, 4, 6);
            _tile_dpbsud(3, 4, 7);
            _tile_stored(2, dots_[1], LINE);
            _tile_stored(3, dots_[1] + PANEL / 2, LINE);
        }
    }

    template <int HALF>
    TOKEND_INLINE static void add(const Source& source, int64_t index, const TokendQuantised* x, int64_t stride,
                                  const int32_t* dots, float* result) {
        const auto block = source.block(index, 0);
        if (HALF == 0) source.template fetch_ahead<false>(index);
        for (int i = 0; i < PANEL / DOT_LANES; i++) {
            const ScaledDots scaled(block.scale(HALF, i));
            DotF low{};
            if constexpr (Source::HAS_LOW) low = block.low(HALF, i);
            for (int row = 0; row < ROWS; row++) {
                const TokendQuantised& of = x[row * stride];
                const DotI sum = load_bytes<DotI>(dots + row * PANEL + i * DOT_LANES) +
                                 splat_int(start_of_dots<Source>(of, source.zero, HALF));
                float* to = result + row * PANEL + i * DOT_LANES;
                DotF total = fused(scaled(sum), splat<DOT_LANES>(of.scale), load<DOT_LANES>(to));
                if constexpr (Source::HAS_LOW)
                    total = fused(low, splat<DOT_LANES>(total_of<Source>(of, HALF)), total);
                store<DOT_LANES>(to, total);
            }
        }
    }

    alignas(64) int32_t dots_[2][ROWS * PANEL];
};

#endif

}  // namespace tokend
