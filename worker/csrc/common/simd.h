// Vectors of N floats over GCC's vector extensions, and the element types of a KV cache.
//
// Instruction sets are named only where a conversion has its own instruction; the compiler flags of
// a variant choose the instructions of the rest.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TOKEND_INLINE inline __attribute__((always_inline))
// Inlines all calls of the function, including the bodies of each().
#define TOKEND_FLATTEN __attribute__((flatten))

namespace tokend {

struct bfloat16 {
    uint16_t bits;
};

struct float16 {
    uint16_t bits;
};

template <int N>
struct Vec {
    static constexpr int lanes = N;
    typedef float F __attribute__((vector_size(N * 4)));
    typedef int32_t I __attribute__((vector_size(N * 4)));
    typedef uint32_t U __attribute__((vector_size(N * 4)));
    typedef uint16_t H __attribute__((vector_size(N * 2)));
    typedef int8_t B __attribute__((vector_size(N)));
};

template <int N>
using F = typename Vec<N>::F;

template <class To, class From>
TOKEND_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}

template <class V>
TOKEND_INLINE V load_bytes(const void* from) {
    V value;
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
}

template <int N>
TOKEND_INLINE F<N> splat(float value) {
    return value - F<N>{};
}

// Calls body(0), …, body(COUNT - 1) with indices known at compile time, so that
// arrays of vectors live in registers.
template <int COUNT, class Body>
TOKEND_INLINE void each(Body body) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
        (body(std::integral_constant<int, I>()), ...);
    }(std::make_integer_sequence<int, COUNT>());
}

// ---- loads: element type -> float ------------------------------------------

// N 16-bit words, zero-extended. GCC 12 splits the generic conversion in two.
template <int N>
TOKEND_INLINE typename Vec<N>::U load_words(const void* from) {
    using U = typename Vec<N>::U;
#if defined(__AVX512F__)
    if constexpr (N == 16) return (U)_mm512_cvtepu16_epi32(load_bytes<__m256i>(from));
#endif
#if defined(__AVX2__)
    if constexpr (N == 8) return (U)_mm256_cvtepu16_epi32(load_bytes<__m128i>(from));
#endif
    return __builtin_convertvector(load_bytes<typename Vec<N>::H>(from), U);
}

template <int N>
TOKEND_INLINE F<N> load(const float* from) {
    return load_bytes<F<N>>(from);
}

template <int N>
TOKEND_INLINE F<N> load(const bfloat16* from) {
    return bit_cast<F<N>>(typename Vec<N>::U(load_words<N>(from) << 16));
}

template <int N>
TOKEND_INLINE F<N> load(const float16* from) {
#if defined(__AVX512F__)
    if constexpr (N == 16) return (F<N>)_mm512_cvtph_ps(load_bytes<__m256i>(from));
#endif
#if defined(__F16C__)
    if constexpr (N == 8) return (F<N>)_mm256_cvtph_ps(load_bytes<__m128i>(from));
#endif
    using U = typename Vec<N>::U;
    const U half = load_words<N>(from);
    // Rebias the exponent by a product, which also converts subnormals.
    const F<N> scaled = bit_cast<F<N>>(U((half & 0x7fffu) << 13)) * splat<N>(0x1p112f);
    const U special = U((half & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return bit_cast<F<N>>(U(bit_cast<U>(scaled) | special | ((half & 0x8000u) << 16)));
}

template <int N>
TOKEND_INLINE F<N> load(const int8_t* from) {
#if defined(__AVX512F__)
    if constexpr (N == 16) return (F<N>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes<__m128i>(from)));
#endif
#if defined(__AVX2__)
    if constexpr (N == 8) return (F<N>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#endif
#if defined(__SSE4_1__)
    if constexpr (N == 4) return (F<N>)_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(load_bytes<int32_t>(from))));
#endif
    return __builtin_convertvector(load_bytes<typename Vec<N>::B>(from), F<N>);
}

// ---- stores: float -> element type, to the nearest, ties to even --------------

template <int N>
TOKEND_INLINE void store(float* to, F<N> value) {
    __builtin_memcpy(to, &value, sizeof(value));
}

template <int N>
TOKEND_INLINE void store(bfloat16* to, F<N> value) {
#if defined(__AVX512BF16__)
    // Subnormal numbers become zero here.
    if constexpr (N == 16) {
        const __m256bh half = _mm512_cvtneps_pbh((__m512)value);
        __builtin_memcpy(to, &half, sizeof(half));
        return;
    }
    if constexpr (N == 8) {
        const __m128bh half = _mm256_cvtneps_pbh((__m256)value);
        __builtin_memcpy(to, &half, sizeof(half));
        return;
    }
#endif
    using U = typename Vec<N>::U;
    const U bits = bit_cast<U>(value);
    const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const U quiet = (bits >> 16) | 0x40u;
    const U is_nan = U(value != value);
    const auto half =
        __builtin_convertvector(U((rounded & ~is_nan) | (quiet & is_nan)), typename Vec<N>::H);
    __builtin_memcpy(to, &half, sizeof(half));
}

inline uint16_t to_float16(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Subnormal: adding 0.5 leaves the 10 bits, rounded, at the bottom of the mantissa.
        const float shifted = bit_cast<float>(magnitude) + 0.5f;
        return uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u));
    }
    return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

template <int N>
TOKEND_INLINE void store(float16* to, F<N> value) {
#if defined(__AVX512F__)
    if constexpr (N == 16) {
        const __m256i half = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
        __builtin_memcpy(to, &half, sizeof(half));
        return;
    }
#endif
#if defined(__F16C__)
    if constexpr (N == 8) {
        const __m128i half = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
        __builtin_memcpy(to, &half, sizeof(half));
        return;
    }
#endif
    for (int lane = 0; lane < N; lane++) to[lane].bits = to_float16(value[lane]);
}

// The nearest integers, ties to even. Not by adding a large number: the compiler may fuse the
// addition with a product before it, which rounds once instead of twice.
template <int N>
TOKEND_INLINE typename Vec<N>::I nearest(F<N> value) {
    using I = typename Vec<N>::I;
#if defined(__AVX512F__)
    if constexpr (N == 16) return (I)_mm512_cvtps_epi32((__m512)value);
#endif
#if defined(__AVX2__)
    if constexpr (N == 8) return (I)_mm256_cvtps_epi32((__m256)value);
#endif
#if defined(__SSE2__)
    if constexpr (N == 4) return (I)_mm_cvtps_epi32((__m128)value);
#endif
    I whole;
    for (int lane = 0; lane < N; lane++) whole[lane] = int32_t(__builtin_rintf(value[lane]));
    return whole;
}

// ---- sums ---------------------------------------------------------------------

// a * b + c with a fixed order: of two products, a compiler fuses either one.
template <int N>
TOKEND_INLINE F<N> multiply_add(F<N> a, F<N> b, F<N> c) {
#if defined(__AVX512F__)
    if constexpr (N == 16) return (F<N>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__FMA__)
    if constexpr (N == 8) return (F<N>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
    return a * b + c;
}

// ---- across lanes -----------------------------------------------------------

template <int N>
TOKEND_INLINE F<N> maximum(F<N> a, F<N> b) {
    return a > b ? a : b;
}

template <int N>
TOKEND_INLINE float sum_lanes(F<N> v) {
    float total[N];
    __builtin_memcpy(total, &v, sizeof(v));
    for (int width = N / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++) total[lane] += total[lane + width];
    return total[0];
}

template <int N>
TOKEND_INLINE float max_lanes(F<N> v) {
    float best[N];
    __builtin_memcpy(best, &v, sizeof(v));
    for (int width = N / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            best[lane] = best[lane + width] > best[lane] ? best[lane + width] : best[lane];
    return best[0];
}

template <int N>
TOKEND_INLINE float min_lanes(F<N> v) {
    return -max_lanes<N>(-v);
}

// from(i): the index of element i of the result, in a and then b.
template <int N, class From>
TOKEND_INLINE F<N> shuffled(F<N> a, F<N> b, From from) {
    return [&]<int... I>(std::integer_sequence<int, I...>) {
        return __builtin_shuffle(a, b, typename Vec<N>::I{from(I)...});
    }(std::make_integer_sequence<int, N>());
}

// Exchanges squares of SIZE elements across the diagonal, then of twice the size …
template <int N, int SIZE>
TOKEND_INLINE void exchange_squares(F<N> (&rows)[N]) {
    each<N>([&](auto row) {
        if constexpr ((row & SIZE) == 0) {
            const F<N> a = rows[row], b = rows[row + SIZE];
            rows[row] = shuffled<N>(a, b, [](int i) constexpr { return (i & SIZE) == 0 ? i : i - SIZE + N; });
            rows[row + SIZE] = shuffled<N>(a, b, [](int i) constexpr { return (i & SIZE) == 0 ? i + SIZE : i + N; });
        }
    });
    if constexpr (2 * SIZE < N) exchange_squares<N, 2 * SIZE>(rows);
}

// Transposes N vectors in place: four rows in each 128-bit lane, then whole lanes.
template <int N>
TOKEND_INLINE void transpose_square(F<N> (&rows)[N]) {
    // a0 b0 a1 b1 and a2 b2 a3 b3; a0 a1 b0 b1 and a2 a3 b2 b3
    const auto low = [](int i) constexpr { return i / 4 * 4 + i % 4 / 2 + i % 2 * N; };
    const auto high = [](int i) constexpr { return i / 4 * 4 + i % 4 / 2 + 2 + i % 2 * N; };
    const auto first = [](int i) constexpr { return i / 4 * 4 + i % 2 + i % 4 / 2 * N; };
    const auto second = [](int i) constexpr { return i / 4 * 4 + i % 2 + 2 + i % 4 / 2 * N; };
    each<N / 4>([&](auto four) {
        F<N>* at = rows + four * 4;
        const F<N> ab = shuffled<N>(at[0], at[1], low), AB = shuffled<N>(at[0], at[1], high);
        const F<N> cd = shuffled<N>(at[2], at[3], low), CD = shuffled<N>(at[2], at[3], high);
        at[0] = shuffled<N>(ab, cd, first);
        at[1] = shuffled<N>(ab, cd, second);
        at[2] = shuffled<N>(AB, CD, first);
        at[3] = shuffled<N>(AB, CD, second);
    });
    if constexpr (N > 4) exchange_squares<N, 4>(rows);
}

// ---- functions ----------------------------------------------------------------

// e^x for x <= 0, relative error below 2e-7; 0 below -87, NaN of NaN. Range reduction by
// multiples of ln 2 in two parts (Cody and Waite), then the degree 6 polynomial
// of Cephes' expf.
template <int N>
TOKEND_INLINE F<N> exp_nonpositive(F<N> x) {
    using I = typename Vec<N>::I;
    const F<N> clamped = maximum<N>(splat<N>(-87.0f), x);
    const F<N> magic = splat<N>(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the integer
    const F<N> biased = clamped * 1.44269504088896341f + magic;
    const F<N> n = biased - magic;
    F<N> r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    F<N> p = splat<N>(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const I exponent = (bit_cast<I>(biased) - 0x4b400000 + 127) << 23;
    const I below = I(x < -87.0f);
    return bit_cast<F<N>>(I(bit_cast<I>(p * bit_cast<F<N>>(exponent)) & ~below));
}

// 1 / (1 + e^-x). With e = exp(-|x|), which does not overflow, it is 1 / (1 + e) for x >= 0, else
// e / (1 + e).
template <int N>
TOKEND_INLINE F<N> sigmoid(F<N> x) {
    const F<N> one = splat<N>(1.0f);
    const F<N> e = exp_nonpositive<N>(x < F<N>{} ? x : -x);
    return (x < F<N>{} ? e : one) / (one + e);
}

// tanh x, absolute error below 2e-7.
template <int N>
TOKEND_INLINE F<N> tanh(F<N> x) {
    const F<N> small = exp_nonpositive<N>(maximum<N>(x, -x) * -2.0f);
    const F<N> size = (1.0f - small) / (1.0f + small);
    return x < 0.0f ? -size : size;
}

}  // namespace tokend
