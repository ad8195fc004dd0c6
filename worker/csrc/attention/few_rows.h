// Attention of a few query rows (a decode): each K and V row is read from memory once for all of
// them.
//
// The sums equal those of many_rows.h bit by bit: a row has the same result in a decode and in any
// chunk of a prompt.
#pragma once

#include "attention/kv_split.h"
#include "attention/softmax.h"

namespace tokend {

constexpr int64_t FEW_ROWS = 8;

// The most rows that share a pass over a chunk; every number up to it is compiled separately.
constexpr int MOST_SHARING = 4;

// Pages are far apart, so the hardware prefetcher does not predict the next one.
template <class T>
TOKEND_INLINE void prefetch(const T* row, int64_t head_dim) {
    const char* bytes = reinterpret_cast<const char*>(row);
    for (int64_t at = 0; at < head_dim * int64_t(sizeof(T)); at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// scores[r][t] for R rows and `count` tokens, count a multiple of N; int8 keys have scales. K is
// transposed N x N at a time, so that lanes are tokens and dims are added in order.
template <int N, int R, class C>
TOKEND_INLINE void few_scores(const float* const* queries, const C* const* keys, const float* key_scales,
                              const C* const* next, int64_t count, int64_t head_dim, float* scores) {
    const int64_t part_dims = QUANTISED<C> ? head_dim / num_scales(head_dim) : head_dim;
    for (int64_t token = 0; token < count; token += N) {
        F<N> sums[R];
        each<R>([&](auto r) { sums[r] = F<N>{}; });
        for (int64_t dim = 0; dim < head_dim; dim += N) {
            // A plain loop: the compiler drops a lambda that only prefetches, because it counts as
            // pure. A line of each row at a time, so that memory and arithmetic overlap.
            if (dim * int64_t(sizeof(C)) % 64 == 0)
                for (int i = 0; i < N; i++) __builtin_prefetch(next[token + i] + dim, 0, 2);
            F<N> square[N];
            each<N>([&](auto t) { square[t] = load<N>(keys[token + t] + dim); });
            transpose_square<N>(square);
            if constexpr (QUANTISED<C>) {
                const F<N> scale = load<N>(key_scales + dim / part_dims * CHUNK + token);
                each<N>([&](auto d) { square[d] *= scale; });
            }
            each<N>([&](auto d) {
                each<R>([&](auto r) { sums[r] = multiply_add<N>(square[d], splat<N>(queries[r][dim + d]), sums[r]); });
            });
        }
        each<R>([&](auto r) { store<N>(scores + r * CHUNK + token, sums[r]); });
    }
}

// output[r][dims] = output * rescale[r] + weights[r][t] * V[t][dims], over V vectors of dims
// from `dim` on. scales: of int8 values.
// If not all rows see all tokens, tokens of weight zero are skipped, because zero times NaN is NaN.
template <int N, int R, int V, bool ALL_SEEN, class T>
TOKEND_INLINE void few_values_slice(const float* weights, const float* rescale, const T* const* values, const float* scales,
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
            F<N> value = load<N>(values[token] + dim + v * N);
            if constexpr (QUANTISED<T>) value *= scales[token];
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
TOKEND_INLINE void few_values(const float* weights, const float* rescale, const T* const* values, const float* scales,
                              const T* const* next, int64_t count, int64_t begin, int64_t end, float* output,
                              int64_t head_dim) {
    constexpr int V = N == 16 ? 4 : 2;
    int64_t dim = begin;
    for (; dim + V * N <= end; dim += V * N)
        few_values_slice<N, R, V, ALL_SEEN, T>(weights, rescale, values, scales, next, count, dim, output, head_dim);
    for (; dim < end; dim += N)
        few_values_slice<N, R, 1, ALL_SEEN, T>(weights, rescale, values, scales, next, count, dim, output, head_dim);
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
    const float rescale = exp_nonpositive<N>(splat<N>((*best - new_best) * scale))[0];
    F<N> sum = {};
    each<CHUNK / N>([&](auto i) {
        const F<N> weight = exp_nonpositive<N>((load<N>(scores + i * N) - new_best) * scale);
        store<N>(scores + i * N, weight);
        sum += weight;
    });
    *total = multiply_add<N>(splat<N>(*total), splat<N>(rescale), splat<N>(sum_lanes<N>(sum)))[0];
    *best = new_best;
    return rescale;
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

    // Tokens past the end of the split are not used; their rows are the first ones of `following`,
    // to be prefetched. Scores are computed several at a time: entries past the last row repeat a
    // readable one.
    void locate(const KVSplit& split, int64_t start, const KVSplit& following) {
        from = start;
        count = next_cut(from, CHUNK, split.end) - from;
        const KVSplit& source = count > 0 ? split : following;
        const int64_t begin = count > 0 ? from : following.begin;
        const int64_t rows = next_cut(begin, CHUNK, source.end) - begin;
        source.locate(begin, begin + rows, keys, values);
        std::fill(keys + rows, keys + CHUNK, keys[0]);
        std::fill(values + rows, values + CHUNK, keys[0]);
    }

    // Read when needed, not when located: until then the pages are being prefetched.
    void load_scales(const KVSplit& split) {
        if constexpr (QUANTISED<C>) {
            split.scales(from, from + count, CHUNK, key_scales, value_scales);
            for (int64_t part = 0; part < num_scales(split.head_dim); part++) {
                std::fill_n(key_scales + part * CHUNK + count, CHUNK - count, 0.0f);
                std::fill_n(value_scales + part * CHUNK + count, CHUNK - count, 0.0f);
            }
        }
    }
};

// Rows of one tile and their intermediate results.
template <class C>
struct FewRows {
    const float* queries[FEW_ROWS];
    int64_t firsts[FEW_ROWS], limits[FEW_ROWS];
    float best[FEW_ROWS];
    float total[FEW_ROWS];
    float* output;  // [rows, head_dim]

    FewRows(const KVSplit& split, Scratch& scratch) {
        const int64_t size = split.rows * split.head_dim;
        output = scratch.floats(2 * size);
        for (int64_t row = 0; row < split.rows; row++) {
            float* query = output + size + row * split.head_dim;
            split.rotated_query(row, query);
            queries[row] = query;
            firsts[row] = split.first(row);
            limits[row] = split.limit(row);
            best[row] = NO_SCORE;
            total[row] = 0.0f;
        }
        std::fill_n(output, size, 0.0f);
    }

    // N divides head_dim; R is the most rows that share a pass over a chunk.
    template <int N, int R>
    void compute(const KVSplit& split, const KVSplit& following) {
        Chunk<C> chunks[2];
        chunks[0].locate(split, split.begin, following);
        for (int64_t index = 0; chunks[index % 2].count > 0; index++) {
            Chunk<C>& now = chunks[index % 2];
            Chunk<C>& next = chunks[(index + 1) % 2];
            now.load_scales(split);
            next.locate(split, now.from + now.count, following);
            attend_from<N, R>(0, split, now, next);
        }
    }

  private:
    // Rows from `row` on, R at a time, then the rest by smaller numbers.
    template <int N, int R>
    void attend_from(int64_t row, const KVSplit& split, const Chunk<C>& now, const Chunk<C>& next) {
        for (; row + R <= split.rows; row += R) attend<N, R>(row, now, next, split);
        if constexpr (R > 1) {
            if (row < split.rows) attend_from<N, R - 1>(row, split, now, next);
        }
    }

    // Accumulates a chunk into R rows.
    template <int N, int R>
    TOKEND_FLATTEN void attend(int64_t row, const Chunk<C>& now, const Chunk<C>& next, const KVSplit& split) {
        alignas(64) float scores[R * CHUNK];
        float rescale[R];
        bool all_seen = true;
        const int64_t head_dim = split.head_dim;
        few_scores<N, R, C>(queries + row, now.keys, now.key_scales, next.keys, round_up(now.count, N), head_dim, scores);
        if (split.soft_cap > 0.0f) cap<R>(scores, round_up(now.count, LANES), split);
        for (int r = 0; r < R; r++) {
            const int64_t seen = std::min(now.count, limits[row + r] - now.from);
            const int64_t first = std::max<int64_t>(0, firsts[row + r] - now.from);
            all_seen &= first == 0 && seen == now.count;
            rescale[r] = weigh_row(scores + r * CHUNK, first, seen, split.scale, best + row + r, total + row + r);
        }
        float* rows = output + row * head_dim;
        if (all_seen) add_values<N, R, true>(scores, rescale, now, next, rows, head_dim);
        else add_values<N, R, false>(scores, rescale, now, next, rows, head_dim);
    }

    template <int N, int R, bool ALL_SEEN>
    TOKEND_INLINE static void add_values(const float* weights, const float* rescale, const Chunk<C>& now, const Chunk<C>& next,
                                         float* rows, int64_t head_dim) {
        const int64_t parts = QUANTISED<C> ? num_scales(head_dim) : 1, dims = head_dim / parts;
        for (int64_t part = 0; part < parts; part++)
            few_values<N, R, ALL_SEEN, C>(weights, rescale, now.values, now.value_scales + part * CHUNK, next.values, now.count,
                                          part * dims, (part + 1) * dims, rows, head_dim);
    }

    template <int R>
    static void cap(float* scores, int64_t count, const KVSplit& split) {
        for (int r = 0; r < R; r++)
            for (float* at = scores + r * CHUNK; at < scores + r * CHUNK + count; at += LANES)
                store<LANES>(at, capped<LANES>(load<LANES>(at), split.scale, split.soft_cap));
    }
};

template <class C>
void attend_few(const KVSplit& split, const KVSplit& following, const TokendAttentionSchedule* plan, int64_t index,
                Scratch& scratch) {
    FewRows<C> tile(split, scratch);
    if (split.head_dim % LANES == 0)
        tile.template compute<LANES, MOST_SHARING>(split, following);
    else
        tile.template compute<8, 1>(split, following);
    for (int64_t row = 0; row < split.rows; row++)
        write_result(split, plan, index, row, {tile.output + row * split.head_dim, tile.best[row], tile.total[row]});
}

}  // namespace tokend
