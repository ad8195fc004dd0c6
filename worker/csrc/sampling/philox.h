// Philox-4x32-10 over vectors of counters (Salmon, Moraes, Dror, Shaw, SC 2011, section 3.4).
#pragma once

#include "common/simd.h"

namespace tokend {

template <int N>
using U = typename Vec<N>::U;

// High and low words of the 64-bit products of N 32-bit words with one constant.
template <int N>
TOKEND_INLINE void multiply_wide(U<N> words, uint32_t by, U<N>& high, U<N>& low) {
#if defined(__AVX512F__)
    if constexpr (N == 16) {
        const __m512i factor = _mm512_set1_epi64(by);
        const __m512i even = _mm512_mul_epu32((__m512i)words, factor);
        const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)words, 32), factor);
        high = (U<N>)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
        low = (U<N>)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
        return;
    }
#elif defined(__AVX2__)
    if constexpr (N == 8) {
        const __m256i factor = _mm256_set1_epi64x(by);
        const __m256i even = _mm256_mul_epu32((__m256i)words, factor);
        const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)words, 32), factor);
        high = (U<N>)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
        low = (U<N>)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
        return;
    }
#endif
    for (int lane = 0; lane < N; lane++) {
        const uint64_t product = uint64_t(words[lane]) * by;
        high[lane] = uint32_t(product >> 32);
        low[lane] = uint32_t(product);
    }
}

// Replaces the counter words c[0..3] by the four output words.
template <int N>
TOKEND_INLINE void philox_4x32_10(U<N> (&c)[4], uint32_t key0, uint32_t key1) {
    each<10>([&](auto) {
        U<N> high0, low0, high1, low1;
        multiply_wide<N>(c[0], 0xD2511F53u, high0, low0);
        multiply_wide<N>(c[2], 0xCD9E8D57u, high1, low1);
        c[0] = high1 ^ c[1] ^ key0;
        c[1] = low1;
        c[2] = high0 ^ c[3] ^ key1;
        c[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    });
}

}  // namespace tokend
