// Attention of a few query rows (a decode): lanes run over head_dim, and each K and V
// row is read from memory once for all of them.
#pragma once

#include "attention_piece.h"

namespace tokend {

constexpr int64_t FEW_ROWS = 8;

// Dot products of R query rows with four K rows: parts[r] as sum_four leaves them.
template <int N, int R, class T>
TOKEND_INLINE void dot_four(const T* const* queries, const T* const* keys, int64_t head_dim, F<N> (&parts)[R]) {
    F<N> sums[R][4];
    each<R>([&](auto r) { each<4>([&](auto t) { sums[r][t] = F<N>{}; }); });
    for (int64_t dim = 0; dim < head_dim; dim += N) {
        F<N> query[R];
        each<R>([&](auto r) { query[r] = load<N>(queries[r] + dim); });
        each<4>([&](auto t) {
            const F<N> key = load<N>(keys[t] + dim);
            each<R>([&](auto r) { sums[r][t] += query[r] * key; });
        });
    }
    each<R>([&](auto r) { parts[r] = sum_four<N>(sums[r][0], sums[r][1], sums[r][2], sums[r][3]); });
}

#if defined(__AVX512BF16__)
// The same for bfloat16 and head_dim a multiple of 32: products are exact in float32.
template <int R>
TOKEND_INLINE void dot_four_bfloat16(const bfloat16* const* queries, const bfloat16* const* keys, int64_t head_dim,
                                     F<16> (&parts)[R]) {
    __m512 sums[R][4];
    each<R>([&](auto r) { each<4>([&](auto t) { sums[r][t] = _mm512_setzero_ps(); }); });
    for (int64_t dim = 0; dim < head_dim; dim += 32) {
        __m512bh query[R];
        each<R>([&](auto r) { query[r] = load_bytes<__m512bh>(queries[r] + dim); });
        each<4>([&](auto t) {
            const auto key = load_bytes<__m512bh>(keys[t] + dim);
            each<R>([&](auto r) { sums[r][t] = _mm512_dpbf16_ps(sums[r][t], query[r], key); });
        });
    }
    each<R>([&](auto r) {
        parts[r] = sum_four<16>((F<16>)sums[r][0], (F<16>)sums[r][1], (F<16>)sums[r][2], (F<16>)sums[r][3]);
    });
}
#endif

template <int N, int R, class T>
TOKEND_INLINE void dot_products(const T* const* queries, const T* const* keys, int64_t head_dim, F<N> (&parts)[R]) {
#if defined(__AVX512BF16__)
    if constexpr (N == 16 && std::is_same_v<T, bfloat16>) {
        if (head_dim % 32 == 0) return dot_four_bfloat16<R>(queries, keys, head_dim, parts);
    }
#endif
    dot_four<N, R, T>(queries, keys, head_dim, parts);
}

// Pages lie far apart, so the processor does not foresee the next one by itself.
template <class T>
TOKEND_INLINE void prefetch(const T* row, int64_t head_dim) {
    const char* bytes = reinterpret_cast<const char*>(row);
    for (int64_t at = 0; at < head_dim * int64_t(sizeof(T)); at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// scores[r][t] for R rows and `count` tokens, count a multiple of N.
template <int N, int R, class T>
TOKEND_INLINE void few_scores(const T* const* queries, const T* const* keys, const T* const* next, int64_t count,
                              int64_t head_dim, float* scores) {
    for (int64_t token = 0; token < count; token += N) {
        // A plain loop: a lambda that only prefetches counts as pure and is dropped.
        for (int i = 0; i < N; i++) prefetch(next[token + i], head_dim);
        F<N> parts[R][N / 4];
        each<N / 4>([&](auto part) {
            F<N> four[R];
            dot_products<N, R, T>(queries, keys + token + part * 4, head_dim, four);
            each<R>([&](auto r) { parts[r][part] = four[r]; });
        });
        each<R>([&](auto r) { store<N>(scores + r * CHUNK + token, gather_sums<N>(parts[r])); });
    }
}

// output[r][dims] = output * rescale[r] + weights[r][t] * V[t][dims], over V vectors of dims.
// Where not all rows see all tokens, a weight of zero takes nothing: zero times NaN would.
template <int N, int R, int V, bool ALL_SEEN, class T>
TOKEND_INLINE void few_values_slice(const float* weights, const float* rescale, const T* const* values,
                                    const T* const* next, int64_t count, int64_t dim, float* output, int64_t head_dim) {
    F<N> sums[R][V];
    each<R>([&](auto r) {
        each<V>([&](auto v) { sums[r][v] = load<N>(output + r * head_dim + dim + v * N) * rescale[r]; });
    });
    for (int64_t token = 0; token < count; token++) {
        prefetch(next[token] + dim, V * N);
        F<N> weight[R];
        each<R>([&](auto r) { weight[r] = splat<N>(weights[r * CHUNK + token]); });
        each<V>([&](auto v) {
            const F<N> value = load<N>(values[token] + dim + v * N);
            each<R>([&](auto r) {
                const F<N> product = weight[r] * value;
                sums[r][v] += ALL_SEEN ? product : weight[r] == F<N>{} ? F<N>{} : product;
            });
        });
    }
    each<R>([&](auto r) {
        each<V>([&](auto v) { store<N>(output + r * head_dim + dim + v * N, sums[r][v]); });
    });
}

template <int N, int R, bool ALL_SEEN, class T>
TOKEND_INLINE void few_values(const float* weights, const float* rescale, const T* const* values, const T* const* next,
                              int64_t count, float* output, int64_t head_dim) {
    constexpr int V = N == 16 ? 4 : 2;
    int64_t dim = 0;
    for (; dim + V * N <= head_dim; dim += V * N)
        few_values_slice<N, R, V, ALL_SEEN, T>(weights, rescale, values, next, count, dim, output, head_dim);
    for (; dim < head_dim; dim += N)
        few_values_slice<N, R, 1, ALL_SEEN, T>(weights, rescale, values, next, count, dim, output, head_dim);
}

// Turns scores[first, seen) of one row into weights, the rest of the chunk into zeros.
// Returns by how much what was summed before must be scaled.
TOKEND_INLINE float weigh_row(float* scores, int64_t first, int64_t seen, float scale, float* best, float* total) {
    constexpr int N = LANES;
    if (seen <= first) {
        std::fill_n(scores, CHUNK, 0.0f);
        return 1.0f;
    }
    for (int64_t token = 0; token < first; token++) scores[token] = NO_SCORE;
    for (int64_t token = seen; token < CHUNK; token++) scores[token] = NO_SCORE;
    F<N> largest = load<N>(scores);
    each<CHUNK / N>([&](auto i) { largest = maximum<N>(largest, load<N>(scores + i * N)); });
    const float new_best = std::max(*best, max_lanes<N>(largest));
    const float rescale = std::exp((*best - new_best) * scale);
    F<N> sum = {};
    each<CHUNK / N>([&](auto i) {
        const F<N> weight = exp_nonpositive<N>((load<N>(scores + i * N) - new_best) * scale);
        store<N>(scores + i * N, weight);
        sum += weight;
    });
    *total = *total * rescale + sum_lanes<N>(sum);
    *best = new_best;
    return rescale;
}

// K and V rows of up to CHUNK tokens.
template <class T>
struct Chunk {
    int64_t from;
    int64_t count;
    const T* keys[CHUNK];
    const T* values[CHUNK];

    // Scores come several at a time and the last chunk of a piece has nothing to
    // prefetch: entries past the end repeat a row that may be read.
    void locate(const Piece<T>& piece, int64_t start) {
        from = start;
        count = std::min<int64_t>(CHUNK, piece.end - from);
        piece.locate(from, from + count, keys, values);
        const T* key = count > 0 ? keys[0] : piece.query(0);
        std::fill(keys + count, keys + CHUNK, key);
        std::fill(values + count, values + CHUNK, key);
    }
};

// Rows of one tile and what is known of them so far.
template <class T>
struct FewRows {
    const T* queries[FEW_ROWS];
    int64_t limits[FEW_ROWS];
    int64_t window;
    float best[FEW_ROWS];
    float total[FEW_ROWS];
    float* output;  // [rows, head_dim]

    FewRows(const Piece<T>& piece, Scratch& scratch)
        : window(piece.window), output(scratch.floats(piece.rows * piece.head_dim)) {
        std::fill_n(output, piece.rows * piece.head_dim, 0.0f);
        for (int64_t row = 0; row < piece.rows; row++) {
            queries[row] = piece.query(row);
            limits[row] = piece.limit(row);
            best[row] = NO_SCORE;
            total[row] = 0.0f;
        }
    }

    // N divides head_dim; R is the most rows that share a pass over a chunk.
    template <int N, int R>
    void compute(const Piece<T>& piece) {
        Chunk<T> chunks[2];
        chunks[0].locate(piece, piece.begin);
        for (int64_t index = 0; chunks[index % 2].count > 0; index++) {
            const Chunk<T>& now = chunks[index % 2];
            Chunk<T>& next = chunks[(index + 1) % 2];
            next.locate(piece, now.from + now.count);
            attend_from<N, R>(0, piece, now, next);
        }
    }

  private:
    // Rows from `row` on, R at a time, then the rest by smaller numbers.
    template <int N, int R>
    void attend_from(int64_t row, const Piece<T>& piece, const Chunk<T>& now, const Chunk<T>& next) {
        for (; row + R <= piece.rows; row += R) attend<N, R>(row, now, next, piece.head_dim, piece.scale);
        if constexpr (R > 1) {
            if (row < piece.rows) attend_from<N, R - 1>(row, piece, now, next);
        }
    }

    // Takes a chunk into R rows.
    template <int N, int R>
    TOKEND_FLATTEN void attend(int64_t row, const Chunk<T>& now, const Chunk<T>& next, int64_t head_dim, float scale) {
        alignas(64) float scores[R * CHUNK];
        float rescale[R];
        bool all_seen = true;
        few_scores<N, R, T>(queries + row, now.keys, next.keys, round_up(now.count, N), head_dim, scores);
        for (int r = 0; r < R; r++) {
            const int64_t seen = std::min(now.count, limits[row + r] - now.from);
            const int64_t first = std::max<int64_t>(0, limits[row + r] - window - now.from);
            all_seen &= first == 0 && seen == now.count;
            rescale[r] = weigh_row(scores + r * CHUNK, first, seen, scale, best + row + r, total + row + r);
        }
        float* rows = output + row * head_dim;
        if (all_seen) few_values<N, R, true, T>(scores, rescale, now.values, next.values, now.count, rows, head_dim);
        else few_values<N, R, false, T>(scores, rescale, now.values, next.values, now.count, rows, head_dim);
    }
};

}  // namespace tokend
