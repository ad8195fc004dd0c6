// Attention of many query rows (a chunk of a prompt): lanes run over the rows.
//
// Queries are transposed once, so both products broadcast one element of K or V
// against vectors of rows, and the softmax never sums across lanes:
//
//   scores [token, row]  = K [token, dim] · Q [dim, row]
//   output [dim, row]   += V [token, dim]ᵀ · weights [token, row]
#pragma once

#include "attention/kv_split.h"
#include "attention/softmax.h"

namespace tokend {

// Vectors of accumulators: TILE_M x TILE_N; the registers hold them and their operands.
constexpr int TILE_M = LANES == 16 ? 8 : 4;
constexpr int TILE_N = 3;

// scores[m][n] for TILE_M tokens and V vectors of rows.
template <int V>
TOKEND_FLATTEN void many_scores(const float* const* keys, const float* queries, int64_t head_dim, int64_t width, float* scores) {
    constexpr int N = LANES;
    F<N> sums[TILE_M][V];
    each<TILE_M>([&](auto m) { each<V>([&](auto v) { sums[m][v] = F<N>{}; }); });
    for (int64_t dim = 0; dim < head_dim; dim++) {
        F<N> query[V];
        each<V>([&](auto v) { query[v] = load<N>(queries + dim * width + v * N); });
        each<TILE_M>([&](auto m) {
            const F<N> key = splat<N>(keys[m][dim]);
            each<V>([&](auto v) { sums[m][v] = multiply_add<N>(key, query[v], sums[m][v]); });
        });
    }
    each<TILE_M>([&](auto m) {
        each<V>([&](auto v) { store<N>(scores + m * width + v * N, sums[m][v]); });
    });
}

// output[m][n] of TILE_M dims and V vectors of rows, over `count` tokens. If not all rows see all
// tokens, tokens of weight zero are skipped, because zero times NaN is NaN.
template <int V, bool ALL_SEEN>
TOKEND_FLATTEN void many_values(const float* const* values, int64_t dim, const float* weights, int64_t count, int64_t width,
                 float* output) {
    constexpr int N = LANES;
    F<N> sums[TILE_M][V];
    each<TILE_M>([&](auto m) {
        each<V>([&](auto v) { sums[m][v] = load<N>(output + m * width + v * N); });
    });
    for (int64_t token = 0; token < count; token++) {
        const float* value = values[token] + dim;
        F<N> weight[V];
        each<V>([&](auto v) { weight[v] = load<N>(weights + token * width + v * N); });
        each<TILE_M>([&](auto m) {
            const F<N> one = splat<N>(value[m]);
            each<V>([&](auto v) {
                const F<N> sum = multiply_add<N>(one, weight[v], sums[m][v]);
                sums[m][v] = ALL_SEEN ? sum : weight[v] == F<N>{} ? sums[m][v] : sum;
            });
        });
    }
    each<TILE_M>([&](auto m) {
        each<V>([&](auto v) { store<N>(output + m * width + v * N, sums[m][v]); });
    });
}

// Calls body(column, V) with the widest tiles that cover `width` rows.
template <class Body>
TOKEND_INLINE void over_columns(int64_t width, Body body) {
    int64_t column = 0;
    for (; column + TILE_N * LANES <= width; column += TILE_N * LANES)
        body(column, std::integral_constant<int, TILE_N>());
    if (width - column == 2 * LANES) body(column, std::integral_constant<int, 2>());
    if (width - column == LANES) body(column, std::integral_constant<int, 1>());
}

// Float rows of `count` tokens: the pages themselves, or a converted copy. scales: [part, CHUNK].
template <class C>
void as_floats(const C* const* rows, const float* scales, int64_t count, int64_t head_dim, float* copy,
               const float** floats) {
    for (int64_t token = 0; token < count; token++) {
        if constexpr (std::is_same_v<C, float>) {
            floats[token] = rows[token];
        } else {
            float* to = copy + token * head_dim;
            floats[token] = to;
            const int64_t parts = QUANTISED<C> ? num_scales(head_dim) : 1, dims = head_dim / parts;
            for (int64_t part = 0; part < parts; part++) {
                for (int64_t dim = part * dims; dim < (part + 1) * dims; dim += 8) {
                    F<8> value = load<8>(rows[token] + dim);
                    if constexpr (QUANTISED<C>) value *= scales[part * CHUNK + token];
                    store<8>(to + dim, value);
                }
            }
        }
    }
}

// Rows of one tile and what is known of them so far; width = rows in whole vectors.
template <class C>
struct ManyRows {
    int64_t width;
    float* queries;  // [head_dim, width]
    ColumnResults all;   // of completed short splits
    ColumnResults part;  // of the current short split
    float* scores;   // [CHUNK, width]
    float* first;    // [width], position of the first KV token that a row sees
    float* limit;    // [width], position after the last one
    float* keys;     // [CHUNK, head_dim]
    float* values;   // [CHUNK, head_dim]

    ManyRows(const KVSplit& split, Scratch& scratch) : width(round_up(split.rows, LANES)) {
        const int64_t square = split.head_dim * width, chunk = CHUNK * split.head_dim;
        float* at = scratch.floats(3 * square + CHUNK * width + 6 * width + 2 * chunk);
        const auto take = [&at](int64_t size) { return std::exchange(at, at + size); };
        queries = take(square);
        for (ColumnResults* each : {&all, &part}) {
            *each = {take(square), take(width), take(width), width, width};
            each->clear(split.head_dim);
        }
        scores = take(CHUNK * width);
        first = take(width);
        limit = take(width);
        keys = take(chunk);
        values = take(chunk);
        std::fill_n(queries, square, 0.0f);
        std::fill_n(first, width, 0.0f);
        std::fill_n(limit, width, 0.0f);
        for (int64_t row = 0; row < split.rows; row++) transpose_query(split, row);
    }

    void compute(const KVSplit& split) {
        const int64_t head_dim = split.head_dim;
        const C *key_rows[CHUNK], *value_rows[CHUNK];
        float key_scales[MOST_SCALES * CHUNK], value_scales[MOST_SCALES * CHUNK];
        const float *float_keys[CHUNK], *float_values[CHUNK];
        for (int64_t from = split.begin, to; from < split.end; from = to) {
            to = next_cut(from, CHUNK, split.end);
            const int64_t count = to - from;
            split.locate(from, from + count, key_rows, value_rows);
            if constexpr (QUANTISED<C>) split.scales(from, from + count, CHUNK, key_scales, value_scales);
            as_floats(key_rows, key_scales, count, head_dim, keys, float_keys);
            as_floats(value_rows, value_scales, count, head_dim, values, float_values);
            // Scores are computed TILE_M tokens at a time: entries past the end repeat a readable
            // row.
            for (int64_t token = count; token < round_up(count, TILE_M); token++)
                float_keys[token] = float_keys[0];
            over_columns(width, [&](int64_t column, auto vectors) {
                for (int64_t token = 0; token < count; token += TILE_M)
                    many_scores<vectors>(float_keys + token, queries + column, head_dim, width,
                                         scores + token * width + column);
            });
            if (split.soft_cap > 0.0f) cap(count, split);
            const bool all_seen = split.all_see(from, from + count);
            weigh(from, count, all_seen, split.scale, head_dim);
            if (all_seen) add_values<true>(float_values, count, head_dim);
            else add_values<false>(float_values, count, head_dim);
            if (to != next_cut(from, SHORT_SPLIT, split.end)) continue;
            // Merging into an empty result changes no bit.
            if (from < next_cut(split.begin, SHORT_SPLIT, split.end)) std::swap(all, part);
            else all.fold(part, head_dim, split.scale);
            if (to < split.end) part.clear(head_dim);
        }
    }

  private:
    template <bool ALL_SEEN>
    void add_values(const float* const* float_values, int64_t count, int64_t head_dim) {
        over_columns(width, [&](int64_t column, auto vectors) {
            for (int64_t dim = 0; dim < head_dim; dim += TILE_M)
                many_values<vectors, ALL_SEEN>(float_values, dim, scores + column, count, width,
                                               part.output + dim * width + column);
        });
    }

    void transpose_query(const KVSplit& split, int64_t row) {
        float* query = keys;  // still unused, and large enough for a row
        first[row] = float(split.first(row));
        limit[row] = float(split.limit(row));
        split.rotated_query(row, query);
        for (int64_t dim = 0; dim < split.head_dim; dim++) queries[dim * width + row] = query[dim];
    }

    void cap(int64_t count, const KVSplit& split) {
        for (int64_t at = 0; at < count * width; at += LANES)
            store<LANES>(scores + at, capped<LANES>(load<LANES>(scores + at), split.scale, split.soft_cap));
    }

    // Online softmax of one chunk. `from` is its first token, `all_seen` that every
    // row sees all of it.
    void weigh(int64_t from, int64_t count, bool all_seen, float scale, int64_t head_dim) {
        constexpr int N = LANES;
        for (int64_t column = 0; column < width; column += N) {
            float* chunk = scores + column;
            if (!all_seen) hide(chunk, load<N>(first + column) - float(from), load<N>(limit + column) - float(from), count);
            const F<N> before = load<N>(part.best + column);
            F<N> largest = before;
            for (int64_t token = 0; token < count; token++)
                largest = maximum<N>(largest, load<N>(chunk + token * width));
            // A row without visible tokens so far must not compute infinity minus infinity.
            const F<N> shift = largest == NO_SCORE ? F<N>{} : largest;
            const F<N> rescale = exp_nonpositive<N>((before - shift) * scale);
            // Every N-th token is summed first, then halves: the order of sum_lanes over tokens.
            F<N> sums[N];
            for (int64_t lane = 0; lane < N; lane++) {
                F<N> sum = {};
                for (int64_t token = lane; token < count; token += N) {
                    const F<N> weight = exp_nonpositive<N>((load<N>(chunk + token * width) - shift) * scale);
                    store<N>(chunk + token * width, weight);
                    sum += weight;
                }
                sums[lane] = sum;
            }
            for (int64_t half = N / 2; half > 0; half /= 2)
                for (int64_t lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
            store<N>(part.best + column, largest);
            store<N>(part.total + column, multiply_add<N>(load<N>(part.total + column), rescale, sums[0]));
            if (min_lanes<N>(rescale) == 1.0f) continue;
            for (int64_t at = column; at < head_dim * width; at += width)
                store<N>(part.output + at, load<N>(part.output + at) * rescale);
        }
    }

    // A row sees tokens [first, seen) of the chunk.
    void hide(float* chunk, F<LANES> first, F<LANES> seen, int64_t count) {
        for (int64_t token = 0; token < count; token++) {
            float* at = chunk + token * width;
            const F<LANES> none = splat<LANES>(NO_SCORE), score = first > float(token) ? none : load<LANES>(at);
            store<LANES>(at, seen > float(token) ? score : none);
        }
    }
};

}  // namespace tokend
