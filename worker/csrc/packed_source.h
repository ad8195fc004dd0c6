// Where a product takes the weights of a block from: the packed bytes themselves, or bytes
// and floats that were unpacked for many rows. Both give the same numbers.
#pragma once

#include "packed_dot.h"
#include "packed_format.h"

namespace tokend {

// A vector is DOT_LANES outputs of the panel; `vector` is the first of those in use.

template <class Format_>
struct Packed {
    using Format = Format_;
    static constexpr int HALVES = Format::HALVES;
    static constexpr bool HAS_LOW = Format::HAS_LOW;
    static constexpr int BITS = Format::BITS;
    static constexpr int zero = Format::ZERO;

    const uint8_t* panel;

    struct Block {
        const uint8_t* head;
        const uint8_t* codes_at;
        const uint8_t* scales;
        int vector;

        template <int J>
        TOKEND_INLINE DotU codes(int index) const {
            const uint8_t* column = codes_at + (vector + index) * DOT_LANES * 4;
            if constexpr (BITS == 8) return load_bytes<DotU>(column + J * ROW);
            const DotU both = load_bytes<DotU>(column + J / 2 * ROW);
            const DotU low = (J % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
            if constexpr (BITS == 5) {
                const DotU high = load_bytes<DotU>(column + 4 * ROW);
                return low | ((J < 4 ? high << (J < 4 ? 4 - J : 0) : high >> (J < 4 ? 0 : J - 4)) & 0x10101010u);
            } else if constexpr (BITS == 6) {
                const DotU high = load_bytes<DotU>(column + (4 + J / 4) * ROW);
                constexpr int AT = J % 4 * 2;
                return low | ((AT < 4 ? high << (AT < 4 ? 4 - AT : 0) : high >> (AT < 4 ? 0 : AT - 4)) & 0x30303030u);
            }
            return low;
        }

        TOKEND_INLINE DotF scale(int half, int index) const {
            const int output = (vector + index) * DOT_LANES;
            if constexpr (!Format::HAS_HEAD) return load<DOT_LANES>(halves(scales) + output);
            const DotF factor = load<DOT_LANES>(halves(head) + output);
            if constexpr (HAS_LOW) return factor * load_bytes_as_floats(scales + output);
            return factor * load_bytes_as_floats(reinterpret_cast<const int8_t*>(scales) + half * PANEL + output);
        }

        TOKEND_INLINE DotF low(int index) const {
            const int output = (vector + index) * DOT_LANES;
            if constexpr (!Format::HAS_HEAD) return load<DOT_LANES>(halves(scales) + PANEL + output);
            return load<DOT_LANES>(halves(head) + PANEL + output) * -load_bytes_as_floats(scales + PANEL + output);
        }

        static TOKEND_INLINE const float16* halves(const uint8_t* from) {
            return reinterpret_cast<const float16*>(from);
        }
    };

    TOKEND_INLINE Block block(int64_t index, int vector) const {
        const uint8_t* at = panel + Format::place(index);
        return {panel + Format::head(index), at, at + Format::CODE_BYTES, vector};
    }

    // As many lines as a block has, so much further on, into the next panel too: the processor
    // looks ahead by itself, but not beyond a page, and not far enough while it multiplies.
    TOKEND_INLINE void fetch_ahead(int64_t index) const {
        constexpr int64_t DISTANCE = 2048;
        const uint8_t* at = panel + Format::place(index) + DISTANCE;
        for (int64_t line = 0; line < Format::BLOCK_BYTES; line += 64) __builtin_prefetch(at + line, 0, 2);
    }
};

// | 8 rows of codes, a byte each | scales, float, of each half | minima, float |
template <int HALVES_, bool HAS_LOW_, int BITS_>
struct Unpacked {
    static constexpr int HALVES = HALVES_;
    static constexpr bool HAS_LOW = HAS_LOW_;
    static constexpr int BITS = BITS_;
    static constexpr int BYTES = ROW * (8 + HALVES + (HAS_LOW ? 1 : 0));

    const uint8_t* blocks;
    int zero;

    struct Block {
        const uint8_t* at;

        template <int J>
        TOKEND_INLINE DotU codes(int index) const {
            return load_bytes<DotU>(at + J * ROW + index * DOT_LANES * 4);
        }
        TOKEND_INLINE DotF scale(int half, int index) const {
            return load_bytes<DotF>(at + (8 + half) * ROW + index * DOT_LANES * 4);
        }
        TOKEND_INLINE DotF low(int index) const {
            return load_bytes<DotF>(at + (8 + HALVES) * ROW + index * DOT_LANES * 4);
        }
    };

    TOKEND_INLINE void fetch_ahead(int64_t) const {}

    TOKEND_INLINE Block block(int64_t index, int vector) const {
        return {blocks + index * BYTES + vector * DOT_LANES * 4};
    }
};

// Only where bytes are added as 16-bit words do the bits of a code play a part.
template <class Format>
using UnpackedOf = Unpacked<Format::HALVES, Format::HAS_LOW, WORDS_FIRST ? Format::BITS : 8>;

template <class Format>
TOKEND_FLATTEN void unpack_blocks(const Packed<Format>& source, int64_t begin, int64_t end, uint8_t* to) {
    for (int64_t index = begin; index < end; index++, to += UnpackedOf<Format>::BYTES)
        for (int vector = 0; vector < PANEL / DOT_LANES; vector++) {
            if (vector == 0) source.fetch_ahead(index);
            const auto block = source.block(index, vector);
            uint8_t* column = to + vector * DOT_LANES * 4;
            const auto put = [&](int row, auto value) { __builtin_memcpy(column + row * ROW, &value, sizeof(value)); };
            each<8>([&](auto j) { put(j, block.template codes<j>(0)); });
            each<Format::HALVES>([&](auto half) { put(8 + half, block.scale(half, 0)); });
            if constexpr (Format::HAS_LOW) put(8 + Format::HALVES, block.low(0));
        }
}

}  // namespace tokend
