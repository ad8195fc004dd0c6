// Two results of a row over neighbouring tokens become one.
//
// A result is what a softmax leaves that is not finished: the sum of weighted values, the
// largest raw score, and the sum of weights, exp((score - largest) * scale). Nothing seen is
// zeros and NO_SCORE; folding into nothing changes no bit.
#pragma once

#include "attention_piece.h"

namespace tokend {

// What two largest scores come to, and the factors of what was weighed by each.
template <int N>
struct Fold {
    F<N> best, kept, added;

    TOKEND_INLINE Fold(F<N> first, F<N> second, float scale) : best(maximum<N>(first, second)) {
        // Nothing seen in either must not compute infinity minus infinity.
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

}  // namespace tokend
