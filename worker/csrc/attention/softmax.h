// Merging the results of a row over neighbouring ranges of tokens, as in Flash-Decoding.
//
// A result is an unnormalised softmax: the sum of weighted values, the largest raw score, and the
// sum of weights, exp((score - largest) * scale). The empty result is zeros and NO_SCORE; merging
// into it changes no bit.
#pragma once

#include "attention/kv_split.h"

namespace tokend {

// The maximum of two largest scores, and the factors that rescale the sums of each side.
template <int N>
struct Fold {
    F<N> best, kept, added;

    TOKEND_INLINE Fold(F<N> first, F<N> second, float scale) : best(maximum<N>(first, second)) {
        // Two empty results must not compute infinity minus infinity.
        const F<N> shift = best == NO_SCORE ? F<N>{} : best;
        kept = exp_nonpositive<N>((first - shift) * scale);
        added = exp_nonpositive<N>((second - shift) * scale);
    }

    TOKEND_INLINE F<N> operator()(F<N> sum, F<N> part) const { return multiply_add<N>(part, added, sum * kept); }
};

// One row; output [head_dim].
struct RowResult {
    float* output;
    float best;
    float total;

    void clear(int64_t head_dim) {
        std::fill_n(output, head_dim, 0.0f);
        best = NO_SCORE;
        total = 0.0f;
    }

    void fold(const float* part, float part_best, float part_total, int64_t head_dim, float scale) {
        constexpr int N = 8;
        const Fold<N> both(splat<N>(best), splat<N>(part_best), scale);
        for (int64_t dim = 0; dim < head_dim; dim += N)
            store<N>(output + dim, both(load<N>(output + dim), load<N>(part + dim)));
        total = both(splat<N>(total), splat<N>(part_total))[0];
        best = both.best[0];
    }
};

// Rows side by side in whole vectors: output [head_dim, stride], best and total [width].
struct ColumnResults {
    float* output;
    float* best;
    float* total;
    int64_t width;
    int64_t stride;

    void clear(int64_t head_dim) const {
        for (int64_t dim = 0; dim < head_dim; dim++) std::fill_n(output + dim * stride, width, 0.0f);
        std::fill_n(best, width, NO_SCORE);
        std::fill_n(total, width, 0.0f);
    }

    void fold(const ColumnResults& part, int64_t head_dim, float scale) const {
        constexpr int N = LANES;
        for (int64_t column = 0; column < width; column += N) {
            const Fold<N> both(load<N>(best + column), load<N>(part.best + column), scale);
            store<N>(best + column, both.best);
            store<N>(total + column, both(load<N>(total + column), load<N>(part.total + column)));
            for (int64_t dim = 0; dim < head_dim; dim++) {
                float* at = output + dim * stride + column;
                store<N>(at, both(load<N>(at), load<N>(part.output + dim * part.stride + column)));
            }
        }
    }
};

// Writing the result of a row: to the output, or to the partial results of its tile.

// | output, head_dim floats | largest raw score | sum of weights | padding |
inline int64_t partial_width(int64_t head_dim) { return head_dim + 8; }

// The sum of a row's weights with the weight of its head's sink, which has no value to add. A sink
// too large for a float leaves an output of 0.
inline float whole_total(const KVSplit& split, int64_t row, const RowResult& result) {
    const float* sinks = split.layer->sinks;
    if (sinks == nullptr) return result.total;
    return result.total + std::exp(sinks[split.head(row)] - result.best * split.scale);
}

inline void finish_row(const KVSplit& split, int64_t row, const RowResult& result) {
    const float total = whole_total(split, row, result);
    for (int64_t dim = 0; dim < split.head_dim; dim += 8)
        store<8>(result.output + dim, load<8>(result.output + dim) / total);
    split.write_output(row, result.output);
}

// Writes the result of one row of split `index` of a tile: the output itself if the tile has one split, else a
// partial result.
inline void write_result(const KVSplit& split, const TokendAttentionSchedule* plan, int64_t index, int64_t row,
                         const RowResult& result) {
    if (split.tile->num_splits == 1) return finish_row(split, row, result);
    const int64_t at = split.tile->partial_row + index * split.rows + row;
    float* partial = plan->partials + at * partial_width(split.head_dim);
    std::copy_n(result.output, split.head_dim, partial);
    partial[split.head_dim] = result.best;
    partial[split.head_dim + 1] = result.total;
}

}  // namespace tokend

#if defined(__AVX512F__)

namespace tokend {

// The softmax's arithmetic in vectors of 16, for kernels that see the largest score of a short
// split before its first weight.

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

// Computes softmax weights from raw scores, given the largest score of each row. scale: factor of
// the scores times log2 e.
struct Weigher {
    F<16> factor, offset;

    TOKEND_INLINE Weigher(F<16> largest, float scale) : factor(splat<16>(scale)) {
        // A row without visible tokens must not compute infinity minus infinity.
        offset = (largest == NO_SCORE ? F<16>{} : -largest) * factor;
    }

    TOKEND_INLINE F<16> operator()(F<16> score) const { return power_of_two(multiply_add<16>(score, factor, offset)); }
};

constexpr float LOG2_E = 1.44269504088896341f;

// A weight of zero stays zero even if the scale is NaN.
TOKEND_INLINE F<16> scaled(F<16> weight, F<16> scale) { return weight == F<16>{} ? F<16>{} : weight * scale; }

TOKEND_INLINE F<16> larger(F<16> largest, F<16> score) { return (F<16>)_mm512_max_ps((__m512)largest, (__m512)score); }

}  // namespace tokend

#endif
