// Products of bytes, four neighbours added: what each instruction set does in one step.
#pragma once

#include "common/simd.h"

namespace tokend {

#if defined(__AVX512F__)
constexpr int DOT_LANES = 16;
#elif defined(__AVX2__)
constexpr int DOT_LANES = 8;
#else
constexpr int DOT_LANES = 4;
#endif

typedef F<DOT_LANES> DotF;
typedef Vec<DOT_LANES>::I DotI;
typedef Vec<DOT_LANES>::U DotU;

TOKEND_INLINE DotI splat_int(int32_t value) { return value - DotI{}; }

TOKEND_INLINE DotF to_floats(DotI value) { return __builtin_convertvector(value, DotF); }

// a * b + c, rounded once if the variant has the instruction: the same in all functions,
// independent of the compiler's contractions.
TOKEND_INLINE DotF fused(DotF a, DotF b, DotF c) {
#if defined(__AVX512F__)
    return (DotF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (DotF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    DotF result;
    for (int lane = 0; lane < DOT_LANES; lane++) result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return result;
#else
    return a * b + c;
#endif
}

// Sums of products of a block, as floats, times its scale: one instruction where there is
// fused(). The sums start at the bits of 1.5 * 2^23, whose float neighbours are 1 apart:
// read as a float such a sum is 1.5 * 2^23 + dots, and
//   (1.5 * 2^23 + dots) * scale - 1.5 * 2^23 * scale
// rounded once is dots * scale rounded once, because a scale has few enough bits (18 at
// most) for the last product to be exact.
#if defined(__FMA__)
constexpr int32_t DOTS_START = 0x4b400000;

struct ScaledDots {
    DotF scale, less;
    TOKEND_INLINE explicit ScaledDots(DotF of) : scale(of), less(of * -12582912.0f) {}
    TOKEND_INLINE DotF operator()(DotI dots) const { return fused(bit_cast<DotF>(dots), scale, less); }
};
#else
constexpr int32_t DOTS_START = 0;

struct ScaledDots {
    DotF scale;
    TOKEND_INLINE explicit ScaledDots(DotF of) : scale(of) {}
    TOKEND_INLINE DotF operator()(DotI dots) const { return to_floats(dots) * scale; }
};
#endif

// DOT_LANES bytes, each as a whole number.
template <class Byte>
TOKEND_INLINE DotI load_bytes_as_ints(const Byte* from) {
#if defined(__AVX512F__)
    const __m128i bytes = load_bytes<__m128i>(from);
    return (DotI)(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_cvtsi64_si128(load_bytes<int64_t>(from));
    return (DotI)(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    DotI result;
    for (int lane = 0; lane < DOT_LANES; lane++) result[lane] = from[lane];
    return result;
#endif
}

// DOT_LANES bytes below 128, each the leading bits of a float16 without its sign.
TOKEND_INLINE DotF load_bytes_as_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    const __m256i words = _mm256_cvtepu8_epi16(load_bytes<__m128i>(from));
    return (DotF)_mm512_cvtph_ps(_mm256_slli_epi16(words, 7));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i words = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(load_bytes<int64_t>(from)));
    return (DotF)_mm256_cvtph_ps(_mm_slli_epi16(words, 7));
#else
    float16 halves[DOT_LANES];
    for (int lane = 0; lane < DOT_LANES; lane++) halves[lane].bits = uint16_t(from[lane] << 7);
    return load<DOT_LANES>(halves);
#endif
}

template <class Byte>
TOKEND_INLINE DotF load_bytes_as_floats(const Byte* from) {
    return to_floats(load_bytes_as_ints(from));
}

// Each byte of `codes`, below 16, becomes table[byte].
TOKEND_INLINE DotU look_up(const uint8_t (&table)[16], DotU codes) {
#if defined(__AVX512F__)
    return (DotU)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_bytes<__m128i>(table)), (__m512i)codes);
#elif defined(__AVX2__)
    return (DotU)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_bytes<__m128i>(table)), (__m256i)codes);
#elif defined(__SSSE3__)
    return (DotU)_mm_shuffle_epi8(load_bytes<__m128i>(table), (__m128i)codes);
#else
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    return (DotU)__builtin_shuffle(load_bytes<Bytes>(table), (Bytes)codes);
#endif
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__SSSE3__)

// A single instruction, or the compiler's substitute.
constexpr bool WORDS_FIRST = false;

// sum + products of unsigned codes and signed x, four at a time.
TOKEND_INLINE DotI dot(DotI sum, DotU codes, DotI x) {
#if defined(__AVX512VNNI__)
    return (DotI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (DotI)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#else
    const DotI unsigned_codes = (DotI)codes;
    for (int byte = 0; byte < 4; byte++)
        sum += (unsigned_codes >> 8 * byte & 255) * (x << (24 - 8 * byte) >> 24);
    return sum;
#endif
}

#else

// Products are added in pairs of 16 bits, which must not overflow, then in fours.
constexpr bool WORDS_FIRST = true;
#define TOKEND_WORDS_FIRST

// Pairs, whose sums must fit in 16 bits.
TOKEND_INLINE DotI pairs(DotU codes, DotI x) {
#if defined(__AVX512F__)
    return (DotI)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
#elif defined(__AVX2__)
    return (DotI)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#else
    return (DotI)_mm_maddubs_epi16((__m128i)codes, (__m128i)x);
#endif
}

// The sum is kept in a register: GCC would rather keep all products, on the stack, and add them in
// pairs at the end.
TOKEND_INLINE DotI add_words(DotI a, DotI b) {
#if defined(__AVX512F__)
    DotI sum = (DotI)_mm512_add_epi16((__m512i)a, (__m512i)b);
    asm("" : "+v"(sum));
#elif defined(__AVX2__)
    DotI sum = (DotI)_mm256_add_epi16((__m256i)a, (__m256i)b);
    asm("" : "+x"(sum));
#else
    DotI sum = (DotI)_mm_add_epi16((__m128i)a, (__m128i)b);
    asm("" : "+x"(sum));
#endif
    return sum;
}

TOKEND_INLINE DotI add_fours(DotI sum, DotI words) {
#if defined(__AVX512F__)
    sum += (DotI)_mm512_madd_epi16((__m512i)words, _mm512_set1_epi16(1));
    asm("" : "+v"(sum));
#elif defined(__AVX2__)
    sum += (DotI)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi16(1));
    asm("" : "+x"(sum));
#else
    sum += (DotI)_mm_madd_epi16((__m128i)words, _mm_set1_epi16(1));
    asm("" : "+x"(sum));
#endif
    return sum;
}

// Codes of 8 bits, less 128, as magnitudes and signs: 128 * 127 * 2 fits in 16 bits.
struct SignedCodes {
    DotI numbers;
    DotU magnitudes;
#if defined(__AVX512F__)
    __mmask64 negative;
    TOKEND_INLINE explicit SignedCodes(DotU codes)
        : numbers((DotI)(codes ^ 0x80808080u)), magnitudes((DotU)_mm512_abs_epi8((__m512i)numbers)),
          negative(_mm512_movepi8_mask((__m512i)numbers)) {}
    TOKEND_INLINE DotI pairs_with(DotI x) const {
        return pairs(magnitudes, (DotI)_mm512_mask_sub_epi8((__m512i)x, negative, __m512i{}, (__m512i)x));
    }
#elif defined(__AVX2__)
    TOKEND_INLINE explicit SignedCodes(DotU codes)
        : numbers((DotI)(codes ^ 0x80808080u)), magnitudes((DotU)_mm256_abs_epi8((__m256i)numbers)) {}
    TOKEND_INLINE DotI pairs_with(DotI x) const {
        return pairs(magnitudes, (DotI)_mm256_sign_epi8((__m256i)x, (__m256i)numbers));
    }
#else
    TOKEND_INLINE explicit SignedCodes(DotU codes)
        : numbers((DotI)(codes ^ 0x80808080u)), magnitudes((DotU)_mm_abs_epi8((__m128i)numbers)) {}
    TOKEND_INLINE DotI pairs_with(DotI x) const {
        return pairs(magnitudes, (DotI)_mm_sign_epi8((__m128i)x, (__m128i)numbers));
    }
#endif
    SignedCodes() = default;
};

#endif

}  // namespace tokend
