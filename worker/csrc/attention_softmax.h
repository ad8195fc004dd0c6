// The softmax's arithmetic in vectors of 16, for kernels that see the largest score of a piece
// before its first weight.
#pragma once

#include "attention_piece.h"

#if defined(__AVX512F__)

namespace tokend {

// 2^x for x of about 0 or less, relative error below 4e-6; 0 far below, NaN of NaN, exactly 1
// of 0. The polynomial is the least largest relative error over a fraction, with p(0) = 1.
TOKEND_INLINE F<16> power_of_two(F<16> x) {
    constexpr float POWER[4] = {0.69304484f, 0.24128020f, 0.05224248f, 0.01342668f};
    // The order of the operands decides what becomes of NaN.
    const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
    const F<16> fraction = (F<16>)_mm512_reduce_ps(clamped, _MM_FROUND_TO_NEG_INF);
    F<16> p = splat<16>(POWER[3]);
    p = multiply_add<16>(p, fraction, splat<16>(POWER[2]));
    p = multiply_add<16>(p, fraction, splat<16>(POWER[1]));
    p = multiply_add<16>(p, fraction, splat<16>(POWER[0]));
    p = multiply_add<16>(p, fraction, splat<16>(1.0f));
    return (F<16>)_mm512_scalef_ps((__m512)p, clamped);
}

// What turns raw scores of rows whose largest is `largest` into weights; scale: of the scores,
// times log2 e.
struct Weigher {
    F<16> factor, offset;

    TOKEND_INLINE Weigher(F<16> largest, float scale) : factor(splat<16>(scale)) {
        // A row that sees nothing must not compute infinity minus infinity.
        offset = (largest == NO_SCORE ? F<16>{} : -largest) * factor;
    }

    TOKEND_INLINE F<16> operator()(F<16> score) const { return power_of_two(multiply_add<16>(score, factor, offset)); }
};

constexpr float LOG2_E = 1.44269504088896341f;

// A weight of zero takes nothing of a scale that is no number.
TOKEND_INLINE F<16> scaled(F<16> weight, F<16> scale) { return weight == F<16>{} ? F<16>{} : weight * scale; }

TOKEND_INLINE F<16> larger(F<16> largest, F<16> score) { return (F<16>)_mm512_max_ps((__m512)largest, (__m512)score); }

}  // namespace tokend

#endif
