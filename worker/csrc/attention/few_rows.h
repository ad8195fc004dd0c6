// Attention of a few query rows (a decode): lanes run over head_dim, and each K and V
// row is read from memory once for all of them.
#pragma once

#include "attention/piece.h"
#include "attention/softmax.h"

namespace tokend {

constexpr int64_t FEW_ROWS = 8;

// The most rows that share a pass over a chunk. Every number up to it is compiled separately, so
// the rarest type of pages has only one.
template <class C>
constexpr int MOST_SHARING = std::is_same_v<C, float16> ? 1 : 4;

// Dot products of R query rows with four K rows over dims [begin, end): parts[r] in the layout of
// sum_four.
template <int N, int R, class Q, class C>
TOKEND_INLINE void dot_four(const Q* const* queries, const C* const* keys, int64_t begin, int64_t end,
                            F<N> (&parts)[R]) {
    F<N> sums[R][4];
    each<R>([&](auto r) { each<4>([&](auto t) { sums[r][t] = F<N>{}; }); });
    for (int64_t dim = begin; dim < end; dim += N) {
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

template <int N, int R, class Q, class C>
TOKEND_INLINE void dot_products(const Q* const* queries, const C* const* keys, int64_t begin, int64_t end,
                                F<N> (&parts)[R]) {
#if defined(__AVX512BF16__)
    if constexpr (N == 16 && std::is_same_v<Q, bfloat16> && std::is_same_v<C, bfloat16>) {
        if (end % 32 == 0) return dot_four_bfloat16<R>(queries, keys, end, parts);
    }
#endif
    dot_four<N, R, Q, C>(queries, keys, begin, end, parts);
}

// Pages are far apart, so the hardware prefetcher does not predict the next one.
template <class T>
TOKEND_INLINE void prefetch(const T* row, int64_t head_dim) {
    const char* bytes = reinterpret_cast<const char*>(row);
    for (int64_t at = 0; at < head_dim * int64_t(sizeof(T)); at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// scores[r][t] for R rows and `count` tokens, count a multiple of N; int8 keys have scales.
template <int N, int R, class Q, class C>
TOKEND_INLINE void few_scores(const Q* const* queries, const C* const* keys, const float* key_scales,
                              const C* const* next, int64_t count, int64_t head_dim, float* scores) {
    for (int64_t token = 0; token < count; token += N) {
        // A plain loop: the compiler drops a lambda that only prefetches, because it counts as
        // pure.
        for (int i = 0; i < N; i++) prefetch(next[token + i], head_dim);
        const int64_t num_parts = QUANTISED<C> ? num_scales(head_dim) : 1, dims = head_dim / num_parts;
        for (int64_t part = 0; part < num_parts; part++) {
            F<N> fours[R][N / 4];
            each<N / 4>([&](auto i) {
                F<N> four[R];
                dot_products<N, R, Q, C>(queries, keys + token + i * 4, part * dims, (part + 1) * dims, four);
                each<R>([&](auto r) { fours[r][i] = four[r]; });
            });
            each<R>([&](auto r) {
                float* at = scores + r * CHUNK + token;
                F<N> sums = gather_sums<N>(fours[r]);
                if constexpr (QUANTISED<C>) {
                    const F<N> scale = load<N>(key_scales + part * CHUNK + token);
                    sums = part == 0 ? sums * scale : multiply_add<N>(sums, scale, load<N>(at));
                }
                store<N>(at, sums);
            });
        }
    }
}

// output[r][dims] = output * rescale[r] + weights[r][t] * V[t][dims], over V vectors of dims
// from `dim` on.
// If not all rows see all tokens, tokens of weight zero are skipped, because zero times NaN is NaN.
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
                const F<N> sum = multiply_add<N>(weight[r], value, sums[r][v]);
                sums[r][v] = ALL_SEEN ? sum : weight[r] == F<N>{} ? sums[r][v] : sum;
            });
        });
    }
    each<R>([&](auto r) {
        each<V>([&](auto v) { store<N>(output + r * head_dim + dim + v * N, sums[r][v]); });
    });
}

template <int N, int R, bool ALL_SEEN, class T>
TOKEND_INLINE void few_values(const float* weights, const float* rescale, const T* const* values, const T* const* next,
                              int64_t count, int64_t begin, int64_t end, float* output, int64_t head_dim) {
    constexpr int V = N == 16 ? 4 : 2;
    int64_t dim = begin;
    for (; dim + V * N <= end; dim += V * N)
        few_values_slice<N, R, V, ALL_SEEN, T>(weights, rescale, values, next, count, dim, output, head_dim);
    for (; dim < end; dim += N)
        few_values_slice<N, R, 1, ALL_SEEN, T>(weights, rescale, values, next, count, dim, output, head_dim);
}

// Converts scores[first, seen) of one row to weights, and the rest of the chunk to zeros. Returns
// the factor that rescales the earlier sums.
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

// Weights times the scales of int8 values. If not all rows see all tokens, a NaN scale is skipped
// for weight zero.
template <int R, bool ALL_SEEN>
TOKEND_INLINE void scale_weights(const float* scales, const float* weights, float* scaled) {
    constexpr int N = LANES;
    for (int64_t token = 0; token < CHUNK; token += N) {
        const F<N> scale = load<N>(scales + token);
        each<R>([&](auto r) {
            const F<N> weight = load<N>(weights + r * CHUNK + token), product = weight * scale;
            store<N>(scaled + r * CHUNK + token, ALL_SEEN ? product : weight == F<N>{} ? F<N>{} : product);
        });
    }
}

// K and V rows of up to CHUNK tokens, and the scales of int8 ones once they are loaded.
template <class C>
struct Chunk {
    int64_t from;
    int64_t count;
    const C* keys[CHUNK];
    const C* values[CHUNK];
    alignas(64) float key_scales[QUANTISED<C> ? MOST_SCALES * CHUNK : 1];  // [part, CHUNK]
    alignas(64) float value_scales[QUANTISED<C> ? MOST_SCALES * CHUNK : 1];

    // Tokens past the end of the piece are not used; their rows are the first ones of `following`,
    // to be prefetched. Scores are computed several at a time: entries past the last row repeat a
    // readable one.
    void locate(const Piece& piece, int64_t start, const Piece& following) {
        from = start;
        count = next_cut(from, CHUNK, piece.end) - from;
        const Piece& source = count > 0 ? piece : following;
        const int64_t begin = count > 0 ? from : following.begin;
        const int64_t rows = next_cut(begin, CHUNK, source.end) - begin;
        source.locate(begin, begin + rows, keys, values);
        std::fill(keys + rows, keys + CHUNK, keys[0]);
        std::fill(values + rows, values + CHUNK, keys[0]);
    }

    // Read when needed, not when located: until then the pages are being prefetched.
    void load_scales(const Piece& piece) {
        if constexpr (QUANTISED<C>) {
            piece.scales(from, from + count, CHUNK, key_scales, value_scales);
            for (int64_t part = 0; part < num_scales(piece.head_dim); part++) {
                std::fill_n(key_scales + part * CHUNK + count, CHUNK - count, 0.0f);
                std::fill_n(value_scales + part * CHUNK + count, CHUNK - count, 0.0f);
            }
        }
    }
};

// Rows of one tile and their intermediate results. Queries are floats, or bfloat16
// where the processor multiplies those by pages of bfloat16.
template <class Q, class C>
struct FewRows {
    const Q* queries[FEW_ROWS];
    int64_t limits[FEW_ROWS];
    int64_t window;
    float best[FEW_ROWS];
    float total[FEW_ROWS];
    float* output;  // [rows, head_dim]

    FewRows(const Piece& piece, Scratch& scratch) : window(piece.window) {
        const int64_t size = piece.rows * piece.head_dim;
        output = scratch.floats(2 * size + piece.head_dim);
        Q* turned = reinterpret_cast<Q*>(output + size);
        float* query = output + 2 * size;
        for (int64_t row = 0; row < piece.rows; row++) {
            Q* at = turned + row * piece.head_dim;
            piece.rotated_query(row, query);
            for (int64_t dim = 0; dim < piece.head_dim; dim += 8) store<8>(at + dim, load<8>(query + dim));
            queries[row] = at;
            limits[row] = piece.limit(row);
            best[row] = NO_SCORE;
            total[row] = 0.0f;
        }
        std::fill_n(output, size, 0.0f);
    }

    // N divides head_dim; R is the most rows that share a pass over a chunk.
    template <int N, int R>
    void compute(const Piece& piece, const Piece& following) {
        Chunk<C> chunks[2];
        chunks[0].locate(piece, piece.begin, following);
        for (int64_t index = 0; chunks[index % 2].count > 0; index++) {
            Chunk<C>& now = chunks[index % 2];
            Chunk<C>& next = chunks[(index + 1) % 2];
            now.load_scales(piece);
            next.locate(piece, now.from + now.count, following);
            attend_from<N, R>(0, piece, now, next);
        }
    }

  private:
    // Rows from `row` on, R at a time, then the rest by smaller numbers.
    template <int N, int R>
    void attend_from(int64_t row, const Piece& piece, const Chunk<C>& now, const Chunk<C>& next) {
        for (; row + R <= piece.rows; row += R) attend<N, R>(row, now, next, piece);
        if constexpr (R > 1) {
            if (row < piece.rows) attend_from<N, R - 1>(row, piece, now, next);
        }
    }

    // Accumulates a chunk into R rows.
    template <int N, int R>
    TOKEND_FLATTEN void attend(int64_t row, const Chunk<C>& now, const Chunk<C>& next, const Piece& piece) {
        alignas(64) float scores[R * CHUNK];
        float rescale[R];
        bool all_seen = true;
        const int64_t head_dim = piece.head_dim;
        few_scores<N, R, Q, C>(queries + row, now.keys, now.key_scales, next.keys, round_up(now.count, N), head_dim, scores);
        if (piece.soft_cap > 0.0f) cap<R>(scores, round_up(now.count, LANES), piece);
        for (int r = 0; r < R; r++) {
            const int64_t seen = std::min(now.count, limits[row + r] - now.from);
            const int64_t first = std::max<int64_t>(0, limits[row + r] - window - now.from);
            all_seen &= first == 0 && seen == now.count;
            rescale[r] = weigh_row(scores + r * CHUNK, first, seen, piece.scale, best + row + r, total + row + r);
        }
        float* rows = output + row * head_dim;
        if (all_seen) add_values<N, R, true>(scores, rescale, now, next, rows, head_dim);
        else add_values<N, R, false>(scores, rescale, now, next, rows, head_dim);
    }

    template <int N, int R, bool ALL_SEEN>
    TOKEND_INLINE static void add_values(const float* weights, const float* rescale, const Chunk<C>& now, const Chunk<C>& next,
                                         float* rows, int64_t head_dim) {
        const int64_t parts = QUANTISED<C> ? num_scales(head_dim) : 1, dims = head_dim / parts;
        alignas(64) float scaled[QUANTISED<C> ? R * CHUNK : 1];
        for (int64_t part = 0; part < parts; part++) {
            if constexpr (QUANTISED<C>) scale_weights<R, ALL_SEEN>(now.value_scales + part * CHUNK, weights, scaled);
            few_values<N, R, ALL_SEEN, C>(QUANTISED<C> ? scaled : weights, rescale, now.values, next.values, now.count,
                                          part * dims, (part + 1) * dims, rows, head_dim);
        }
    }

    template <int R>
    static void cap(float* scores, int64_t count, const Piece& piece) {
        for (int r = 0; r < R; r++)
            for (float* at = scores + r * CHUNK; at < scores + r * CHUNK + count; at += LANES)
                store<LANES>(at, capped<LANES>(load<LANES>(at), piece.scale, piece.soft_cap));
    }
};

template <class Q, class C>
void attend_few(const Piece& piece, const Piece& following, const TokendAttentionSchedule* plan, int64_t index, Scratch& scratch) {
    FewRows<Q, C> tile(piece, scratch);
    if (piece.head_dim % LANES == 0)
        tile.template compute<LANES, MOST_SHARING<C>>(piece, following);
    else
        tile.template compute<8, 1>(piece, following);
    for (int64_t row = 0; row < piece.rows; row++)
        leave_row(piece, plan, index, row, {tile.output + row * piece.head_dim, tile.best[row], tile.total[row]});
}

}  // namespace tokend
