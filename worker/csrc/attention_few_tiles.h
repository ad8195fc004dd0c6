// What the kernels of few query rows with the tile unit share: a piece of tokens, and its softmax
// row by row.
#pragma once

#include "amx.h"
#include "attention_bf16.h"
#include "attention_finish.h"
#include "attention_kernels.h"

#if defined(__AVX512BF16__) && defined(TOKEND_AMX)

namespace tokend {

// Four columns of 16 rows become four rows.
TOKEND_INLINE void turn_four(const float* from, int64_t stride, float* to) {
    __m512 fours[4];
    each<4>([&](auto i) {
        __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(from + i * stride));
        four = _mm512_insertf32x4(four, _mm_loadu_ps(from + (i + 4) * stride), 1);
        four = _mm512_insertf32x4(four, _mm_loadu_ps(from + (i + 8) * stride), 2);
        fours[i] = _mm512_insertf32x4(four, _mm_loadu_ps(from + (i + 12) * stride), 3);
    });
    const auto ab = (__m512d)_mm512_unpacklo_ps(fours[0], fours[1]), AB = (__m512d)_mm512_unpackhi_ps(fours[0], fours[1]);
    const auto cd = (__m512d)_mm512_unpacklo_ps(fours[2], fours[3]), CD = (__m512d)_mm512_unpackhi_ps(fours[2], fours[3]);
    _mm512_storeu_ps(to, (__m512)_mm512_unpacklo_pd(ab, cd));
    _mm512_storeu_ps(to + PIECE, (__m512)_mm512_unpackhi_pd(ab, cd));
    _mm512_storeu_ps(to + 2 * PIECE, (__m512)_mm512_unpacklo_pd(AB, CD));
    _mm512_storeu_ps(to + 3 * PIECE, (__m512)_mm512_unpackhi_pd(AB, CD));
}

// Neighbours first, as the columns of attention_bf16.cpp are summed.
TOKEND_INLINE float sum_pairs(F<16> v) {
    __m512 sum = (__m512)v;
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
    sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1));
    return _mm512_cvtss_f32(_mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4e)));
}

// A weight of zero takes nothing of a scale that is no number.
TOKEND_INLINE F<16> scaled(F<16> weight, const float* scales) {
    const F<16> product = weight * load<16>(scales);
    return weight == F<16>{} ? F<16>{} : product;
}

// Rows of a tile of the plan over one piece.
template <class C>
struct FewRows {
    const Piece& piece;
    const int64_t head_dim, rows;
    Groups<C> groups;
    Ahead<C> ahead;
    int64_t begin, end;  // the tokens that are computed, whole tiles of them
    float best[TILE], total[TILE];

    FewRows(const Piece& p, const Piece& following, int64_t tokens, C* copy)
        : piece(p), head_dim(p.head_dim), rows(p.rows), ahead(p, following) {
        groups.locate(piece, piece.begin, piece.end, copy);
        begin = (groups.from - groups.start) / tokens * tokens;
        end = round_up(groups.to - groups.start, tokens);
    }

    // Of the tokens of the piece a row sees [first_seen, end_seen).
    int64_t first_seen(int64_t row) const {
        return std::max(groups.from, piece.limit(row) - piece.window) - groups.start;
    }
    int64_t end_seen(int64_t row) const { return std::min(groups.to, piece.limit(row)) - groups.start; }

    void cap(float* scores) const {
        if (piece.soft_cap <= 0.0f) return;
        for (float* at = scores + begin; at < scores + end; at += 16)
            store<16>(at, capped<16>(load<16>(at), piece.scale, piece.soft_cap));
    }

    // Softmax of a row over the piece; take(token, weights of 16 tokens, of the next 16).
    TOKEND_INLINE void weigh(int64_t row, float* scores, auto take) {
        for (int64_t token = begin; token < std::min(first_seen(row), end); token++) scores[token] = NO_SCORE;
        for (int64_t token = std::max(end_seen(row), begin); token < end; token++) scores[token] = NO_SCORE;
        F<16> most = splat<16>(NO_SCORE);
        for (int64_t token = begin; token < end; token += 16) most = larger(most, load<16>(scores + token));
        best[row] = _mm512_reduce_max_ps((__m512)most);
        const Weigher weight(splat<16>(best[row]), piece.scale * LOG2_E);
        F<16> sum = {};
        for (int64_t token = begin; token < end; token += INNER) {
            const F<16> low = weight(load<16>(scores + token)), high = weight(load<16>(scores + token + 16));
            sum += low;
            sum += high;
            take(token, low, high);
        }
        total[row] = sum_pairs(sum);
    }
};

}  // namespace tokend

#endif
