// Types that stay in memory in the blocks of the file, and how vectors read them.
//
// Their codes are places in codebooks, or digits in base 3: unpacked, they would be up to four times
// as long. Byte i of the blocks of 32 outputs lie together, so that a vector has the same field of
// several outputs:
//
//   panel   [ byte 0 of 32 outputs | byte 1 | … ]   of the first block, then of the next one
//
// A product unpacks some blocks of a panel at a time to bytes and floats (packed_tile.h).
#pragma once

#include "products/packed/codebooks.h"
#include "products/packed/packed.h"
#include "products/packed/packed_dot.h"

namespace tokend {

// ---- codebooks ------------------------------------------------------------------------------------

constexpr int hex_digit(char digit) { return digit <= '9' ? digit - '0' : digit - 'a' + 10; }

// Points as words of four components; a point has 8 / 4 or 4 / 4 of them.
template <int POINTS, int WORDS>
struct Codebook {
    uint32_t words[POINTS * WORDS];

    // levels: the byte of each level.
    template <int LEVELS, int LENGTH>
    constexpr Codebook(const char (&bitmap)[LENGTH], const uint8_t (&levels)[LEVELS]) : words() {
        int at = 0;
        for (int number = 0; number < (LENGTH - 1) * 4 && at < POINTS * WORDS; number++) {
            const int half = number / 8 * 2 + (number % 8 < 4 ? 1 : 0);  // the low half of a byte comes second
            if (!(hex_digit(bitmap[half]) >> number % 4 & 1)) continue;
            for (int word = 0, left = number; word < WORDS; word++, at++)
                for (int byte = 0; byte < 4; byte++, left /= LEVELS)
                    words[at] |= uint32_t(levels[left % LEVELS]) << byte * 8;
        }
    }
};

// Magnitudes; of IQ1 128 plus eight times the number.
constexpr uint8_t IQ1_LEVELS[3] = {120, 128, 136};
constexpr uint8_t IQ2_LEVELS[3] = {8, 25, 43};
constexpr uint8_t IQ3_XXS_LEVELS[8] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr uint8_t IQ3_S_LEVELS[8] = {1, 3, 5, 7, 9, 11, 13, 15};

inline constexpr Codebook<2048, 2> IQ1_S_BOOK(IQ1_S_POINTS, IQ1_LEVELS);
inline constexpr Codebook<256, 2> IQ2_XXS_BOOK(IQ2_XXS_POINTS, IQ2_LEVELS);
inline constexpr Codebook<512, 2> IQ2_XS_BOOK(IQ2_XS_POINTS, IQ2_LEVELS);
inline constexpr Codebook<1024, 2> IQ2_S_BOOK(IQ2_S_POINTS, IQ2_LEVELS);
inline constexpr Codebook<256, 1> IQ3_XXS_BOOK(IQ3_XXS_POINTS, IQ3_XXS_LEVELS);
inline constexpr Codebook<512, 1> IQ3_S_BOOK(IQ3_S_POINTS, IQ3_S_LEVELS);

// The indices of a vector in memory: with AVX2, loads of each lane that are put together in registers take less
// time than gathers.
struct Lanes {
    alignas(64) uint32_t index[DOT_LANES];

    TOKEND_INLINE explicit Lanes(DotU from) { __builtin_memcpy(index, &from, sizeof(index)); }
};

// Both words of the points with these indices.
template <int POINTS>
TOKEND_INLINE void points(const Codebook<POINTS, 2>& book, DotU index, DotU (&words)[2]) {
#if defined(__AVX512F__)
    const __m512i whole = (__m512i)index;
    const __m512i low = _mm512_i32gather_epi64(_mm512_castsi512_si256(whole), book.words, 8);
    const __m512i high = _mm512_i32gather_epi64(_mm512_extracti64x4_epi64(whole, 1), book.words, 8);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    words[0] = (DotU)_mm512_permutex2var_epi32(low, even, high);
    words[1] = (DotU)_mm512_permutex2var_epi32(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high);
#elif defined(__AVX2__)
    const Lanes at(index);
    const auto point = [&](int lane) { return load_bytes<long long>(book.words + at.index[lane] * 2); };
    // In this order, because words are shuffled within halves of a vector.
    const __m256 first = (__m256)_mm256_setr_epi64x(point(0), point(1), point(4), point(5));
    const __m256 second = (__m256)_mm256_setr_epi64x(point(2), point(3), point(6), point(7));
    words[0] = (DotU)_mm256_shuffle_ps(first, second, 0x88);
    words[1] = (DotU)_mm256_shuffle_ps(first, second, 0xdd);
#else
    for (int lane = 0; lane < DOT_LANES; lane++)
        for (int word = 0; word < 2; word++) words[word][lane] = book.words[index[lane] * 2 + word];
#endif
}

// The words of points of four components.
template <int POINTS>
TOKEND_INLINE DotU points(const Codebook<POINTS, 1>& book, DotU index) {
#if defined(__AVX512F__)
    return (DotU)_mm512_i32gather_epi32((__m512i)index, book.words, 4);
#elif defined(__AVX2__)
    const Lanes at(index);
    const auto point = [&](int lane) { return int(book.words[at.index[lane]]); };
    return (DotU)_mm256_setr_epi32(point(0), point(1), point(2), point(3), point(4), point(5), point(6), point(7));
#else
    DotU result;
    for (int lane = 0; lane < DOT_LANES; lane++) result[lane] = book.words[index[lane]];
    return result;
#endif
}

// ---- fields of blocks -----------------------------------------------------------------------------

constexpr uint32_t EACH_BYTE = 0x01010101u;

// The blocks of some outputs; byte 0 is at `at`.
struct Fields {
    const uint8_t* at;

    TOKEND_INLINE DotU byte(int64_t i) const { return (DotU)load_bytes_as_ints(at + i * PANEL); }
    TOKEND_INLINE DotU word(int64_t i) const { return byte(i) | byte(i + 1) << 8; }
    TOKEND_INLINE DotU double_word(int64_t i) const { return word(i) | word(i + 2) << 16; }
    TOKEND_INLINE DotF half(int64_t i) const { return to_float(word(i)); }

    static TOKEND_INLINE DotF to_float(DotU halves) {
        float16 numbers[DOT_LANES];
        for (int lane = 0; lane < DOT_LANES; lane++) numbers[lane].bits = uint16_t(halves[lane]);
        return load<DOT_LANES>(numbers);
    }
};

TOKEND_INLINE DotF to_floats(DotU small) { return to_floats((DotI)small); }

// Makes 128 + number of each magnitude, negative where the bit of its byte (bits 0 … 7) is set.
TOKEND_INLINE void put_signs(DotU (&words)[2], DotU bits) {
    each<2>([&](auto word) {
        const DotU negative = (bits >> word * 4 & 15) * 0x00204081u & EACH_BYTE;  // one bit to each byte
        words[word] = (words[word] ^ 0x80808080u ^ ((negative << 8) - negative)) + negative;
    });
}

// Seven bits, and an eighth that makes the number of set bits even.
TOKEND_INLINE DotU with_parity(DotU seven) {
    DotU folded = seven ^ seven >> 4;
    folded ^= folded >> 2;
    return seven | ((folded ^ folded >> 1) & 1) << 7;
}

// ---- types ----------------------------------------------------------------------------------------

// A type of blocks of SUPER * 32 numbers and BYTES bytes. A derived Fields_ has, for block `sub` of 32
//   codes<GROUP>(fields, sub, words)   128 + code of inputs 8 GROUP … 8 GROUP + 7, in two words
//   scale(fields, sub, half)           of 16 numbers if there are two halves; number = code * scale
template <int BYTES_, int SUPER_, int HALVES_>
struct FileBlocks {
    static constexpr bool IN_FILE_BLOCKS = true;
    static constexpr int RAW_BYTES = BYTES_;
    static constexpr int SUPER = SUPER_;
    static constexpr int HALVES = HALVES_;
    static constexpr int CODE_BITS = 8;
    static constexpr int ZERO = 128;
    static constexpr bool HAS_LOW = false;
    static constexpr bool HAS_FACTORS = false;

    static constexpr int64_t place(int64_t block) { return block / SUPER * RAW_BYTES * PANEL; }
    static constexpr int64_t panel_bytes(int64_t in_features) { return place(in_features / BLOCK); }
};

// | d | 8 x (4 indices, 4 x 7 bits of signs and 4 bits of scale) |
struct IQ2_XXS : FileBlocks<66, 8, 1> {
    template <int GROUP>
    static TOKEND_INLINE void codes(const Fields& of, int sub, DotU (&words)[2]) {
        const DotU signs = with_parity(of.double_word(6 + 8 * sub) >> 7 * GROUP & 127);
        points(IQ2_XXS_BOOK, of.byte(2 + 8 * sub + GROUP), words);
        put_signs(words, signs);
    }
    static TOKEND_INLINE DotF scale(const Fields& of, int sub, int) {
        return of.half(0) * (to_floats(of.byte(9 + 8 * sub) >> 4) + 0.5f) * 0.25f;
    }
};

// | d | 32 x (9 bits of index, 7 of signs) | 16 x 4 bits of scale |
struct IQ2_XS : FileBlocks<74, 8, 2> {
    template <int GROUP>
    static TOKEND_INLINE void codes(const Fields& of, int sub, DotU (&words)[2]) {
        const DotU both = of.word(2 + 8 * sub + GROUP * 2);
        points(IQ2_XS_BOOK, both & 511, words);
        put_signs(words, with_parity(both >> 9));
    }
    static TOKEND_INLINE DotF scale(const Fields& of, int sub, int half) {
        return of.half(0) * (to_floats(of.byte(66 + sub) >> half * 4 & 15) + 0.5f) * 0.25f;
    }
};

// | d | 32 low bytes of indices | 32 x 8 signs | 32 x 2 high bits | 16 x 4 bits of scale |
struct IQ2_S : FileBlocks<82, 8, 2> {
    template <int GROUP>
    static TOKEND_INLINE void codes(const Fields& of, int sub, DotU (&words)[2]) {
        const DotU index = of.byte(2 + 4 * sub + GROUP) | (of.byte(66 + sub) >> 2 * GROUP & 3) << 8;
        points(IQ2_S_BOOK, index, words);
        put_signs(words, of.byte(34 + 4 * sub + GROUP));
    }
    static TOKEND_INLINE DotF scale(const Fields& of, int sub, int half) {
        return of.half(0) * (to_floats(of.byte(74 + sub) >> half * 4 & 15) + 0.5f) * 0.25f;
    }
};

// | d | 64 indices | 8 x (4 x 7 bits of signs and 4 bits of scale) |
struct IQ3_XXS : FileBlocks<98, 8, 1> {
    template <int GROUP>
    static TOKEND_INLINE void codes(const Fields& of, int sub, DotU (&words)[2]) {
        each<2>([&](auto i) { words[i] = points(IQ3_XXS_BOOK, of.byte(2 + 8 * sub + 2 * GROUP + i)); });
        put_signs(words, with_parity(of.double_word(66 + 4 * sub) >> GROUP * 7 & 127));
    }
    static TOKEND_INLINE DotF scale(const Fields& of, int sub, int) {
        return of.half(0) * (to_floats(of.byte(69 + 4 * sub) >> 4) + 0.5f) * 0.5f;
    }
};

// | d | 64 low bytes of indices | 64 high bits | 32 x 8 signs | 8 x 4 bits of scale |
struct IQ3_S : FileBlocks<110, 8, 1> {
    template <int GROUP>
    static TOKEND_INLINE void codes(const Fields& of, int sub, DotU (&words)[2]) {
        each<2>([&](auto i) {
            constexpr int J = 2 * GROUP + i;
            words[i] = points(IQ3_S_BOOK, of.byte(2 + 8 * sub + J) | (of.byte(66 + sub) >> J & 1) << 8);
        });
        put_signs(words, of.byte(74 + 4 * sub + GROUP));
    }
    static TOKEND_INLINE DotF scale(const Fields& of, int sub, int) {
        return of.half(0) * (to_floats(of.byte(106 + sub / 2) >> sub % 2 * 4 & 15) * 2.0f + 1.0f);
    }
};

// 128 + eight times a point of -1, 0 and 1, plus 1; or minus 1 where `below` is not 0.
TOKEND_INLINE void shifted_points(DotU index, DotU below, DotU (&words)[2]) {
    const DotU shift = EACH_BYTE - ((DotU)(below != 0) & 2 * EACH_BYTE);
    points(IQ1_S_BOOK, index, words);
    each<2>([&](auto word) { words[word] += shift; });
}

// | d | 32 low bytes of indices | 8 x (4 x 3 high bits, 3 bits of scale, the sign of 1/8) |
struct IQ1_S : FileBlocks<50, 8, 1> {
    template <int GROUP>
    static TOKEND_INLINE void codes(const Fields& of, int sub, DotU (&words)[2]) {
        const DotU high = of.word(34 + 2 * sub);
        const DotU index = of.byte(2 + 4 * sub + GROUP) | (high >> 3 * GROUP & 7) << 8;
        shifted_points(index, high & 0x8000u, words);
    }
    static TOKEND_INLINE DotF scale(const Fields& of, int sub, int) {
        return of.half(0) * (to_floats(of.byte(35 + 2 * sub) >> 4 & 7) * 2.0f + 1.0f) * 0.125f;
    }
};

// | 32 low bytes of indices | 32 x (3 high bits, the sign of 1/8) | 4 x (4 x 3 bits of scale, 4 bits of d) |
struct IQ1_M : FileBlocks<56, 8, 2> {
    template <int GROUP>
    static TOKEND_INLINE void codes(const Fields& of, int sub, DotU (&words)[2]) {
        const DotU high = of.byte(32 + 2 * sub + GROUP / 2) >> GROUP % 2 * 4;
        shifted_points(of.byte(4 * sub + GROUP) | (high & 7) << 8, high & 8, words);
    }
    static TOKEND_INLINE DotF scale(const Fields& of, int sub, int half) {
        const DotU d = of.byte(49) >> 4 | of.byte(51) >> 4 << 4 | of.byte(53) >> 4 << 8 | of.byte(55) >> 4 << 12;
        const DotU small = of.word(48 + sub / 2 * 2) >> (sub % 2 * 2 + half) * 3 & 7;
        return of.to_float(d) * (to_floats(small) * 2.0f + 1.0f) * 0.125f;
    }
};

// | 32 x 5 digits | 16 x 5 digits | 4 x 4 digits | d |: digit n of the first bytes, then digit n + 1, …
struct TQ1_0 : FileBlocks<54, 8, 1> {
    template <int GROUP>
    static TOKEND_INLINE void codes(const Fields& of, int sub, DotU (&words)[2]) {
        each<2>([&](auto word) { words[word] = four_codes(of, sub, 2 * GROUP + word); });
    }
    // Of inputs 4 j … 4 j + 3.
    static TOKEND_INLINE DotU four_codes(const Fields& of, int sub, int j) {
        constexpr uint32_t POWERS[5] = {1, 3, 9, 27, 81};
        int64_t first = 4 * j;
        int digit = sub;
        if (sub >= 5) {
            digit = sub * 2 - 10 + j / 4;
            first = 32 + j % 4 * 4;
        }
        if (digit == 5) {
            digit = j - 4;
            first = 48;
        }
        DotU result{};
        for (int i = 0; i < 4; i++)
            result |= ((of.byte(first + i) * POWERS[digit] & 255) * 3 >> 8) << 8 * i;
        return result + 127 * EACH_BYTE;
    }
    static TOKEND_INLINE DotF scale(const Fields& of, int, int) { return of.half(52); }
};

}  // namespace tokend
