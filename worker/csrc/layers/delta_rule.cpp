// Gated delta-rule layers. Token after token: the chunked form of the literature turns prompts into
// products of small matrices, but its sums depend on where chunks begin. What makes this form fast
// enough is that a tile of a state stays in the first cache, and that the update for one token and
// the two products for the next one read it once:
//
//   token t        S -> S^T k, S^T q            output and correction d follow from these
//   token t + 1    S = a S + k d^T -> S^T k', S^T q'
//
// The output needs no S_t: S_t^T q = a S_t-1^T q + (k . q) d.
#include "layers/delta_rule.h"

#include <cmath>

#include "common/team.h"
#include "layers/recurrence_parts.h"

namespace tokend {
namespace {

constexpr double HEAD_EPS = 1e-6;

struct Sizes {
    explicit Sizes(const TokendDeltaRule& layer)
        : keys(layer.num_key_heads * layer.key_size),
          values(layer.num_value_heads * layer.value_size),
          channels(2 * keys + values),
          heads_per_key(layer.num_value_heads / layer.num_key_heads),
          tiles((layer.value_size + TILE - 1) / TILE),
          tile(layer.key_size * TILE),
          matrices(layer.num_value_heads * tiles * tile),
          token(channels + 3 * layer.num_value_heads) {}

    int64_t keys, values, channels, heads_per_key, tiles, tile;
    int64_t matrices;  // floats of a state before the window
    int64_t token;     // floats of scratch memory
};

// A token in scratch memory: | q | k | v, then o | a | strength | k . q |, the last three of each
// value head.
struct Token {
    Token(float* at, const TokendDeltaRule& layer, const Sizes& sizes)
        : query(at),
          key(query + sizes.keys),
          value(key + sizes.keys),
          decay(value + sizes.values),
          strength(decay + layer.num_value_heads),
          product(strength + layer.num_value_heads) {}

    float *query, *key, *value, *decay, *strength, *product;
};

// ---- convolution, norms of heads, gates ---------------------------------------

TOKEND_FLATTEN void scale(float* x, int64_t size, float factor) {
    for (int64_t at = 0; at < size; at += N) {
        const int64_t count = std::min<int64_t>(N, size - at);
        store_part(x + at, count, load_part(x + at, count) * factor);
    }
}

float inverse_norm(const float* x, int64_t size) {
    return float(1.0 / std::sqrt(double(dot(x, x, size)) + HEAD_EPS));
}

// Everything of a token and a key head that needs no matrix.
template <class T>
void prepare_head(
    const TokendDeltaRule& layer, const Sizes& sizes, const TokendRecurrenceRun& run, int64_t token,
    int64_t before, const float* window, int64_t head, const Token& to
) {
    const T* row = static_cast<const T*>(run.rows) + token * run.row_stride;
    const int64_t size = layer.key_size, shift = head * size;
    const Taps taps{layer.num_taps, sizes.channels, layer.taps, nullptr};
    const auto convolved = [&](int64_t first, int64_t count, float* out) {
        convolve<true>(taps, row, run.row_stride, before, window, first, count, out);
    };
    float *query = to.query + shift, *key = to.key + shift;
    convolved(shift, size, query);
    convolved(sizes.keys + shift, size, key);
    scale(query, size, inverse_norm(query, size) * float(1.0 / std::sqrt(double(size))));
    scale(key, size, inverse_norm(key, size));
    const float product = dot(query, key, size);
    const T* gates = static_cast<const T*>(run.gates) + token * run.gate_stride;
    for (int64_t index = 0; index < sizes.heads_per_key; index++) {
        const int64_t own =
            layer.is_tiled ? index * layer.num_key_heads + head : head * sizes.heads_per_key + index;
        const int64_t from = own * layer.value_size;
        convolved(2 * sizes.keys + from, layer.value_size, to.value + from);
        const double b = element(gates + own), a = element(gates + layer.num_value_heads + own);
        to.strength[own] = float(1.0 / (1.0 + std::exp(-b)));
        to.decay[own] = float(std::exp(layer.decay[own] * softplus(a + layer.time_bias[own])));
        to.product[own] = product;
    }
}

// ---- matrices -----------------------------------------------------------------

// S^T k and S^T q of a tile. Even and odd rows are summed apart: twice as many chains.
struct Products {
    F<N> key[2][VECTORS] = {}, query[2][VECTORS] = {};

    template <int HALF>
    TOKEND_INLINE void add(const F<N> (&row)[VECTORS], float k, float q) {
        each<VECTORS>([&](auto j) {
            key[HALF][j] = multiply_add<N>(row[j], splat<N>(k), key[HALF][j]);
            query[HALF][j] = multiply_add<N>(row[j], splat<N>(q), query[HALF][j]);
        });
    }
};

template <int HALF>
TOKEND_INLINE void read_row(const float* from, float k, float q, Products& products) {
    F<N> row[VECTORS];
    each<VECTORS>([&](auto j) { row[j] = load<N>(from + j * N); });
    products.add<HALF>(row, k, q);
}

TOKEND_FLATTEN Products products_of(const float* from, int64_t size, const float* key, const float* query) {
    Products products;
    int64_t i = 0;
    for (; i + 1 < size; i += 2) {
        read_row<0>(from + i * TILE, key[i], query[i], products);
        read_row<1>(from + (i + 1) * TILE, key[i + 1], query[i + 1], products);
    }
    if (i < size) read_row<0>(from + i * TILE, key[i], query[i], products);
    return products;
}

template <int HALF, bool MORE>
TOKEND_INLINE void update_row(
    const float* from, float* to, float a, float k, const F<N> (&correction)[VECTORS], const float* next_key,
    const float* next_query, Products& products
) {
    F<N> row[VECTORS];
    each<VECTORS>([&](auto j) {
        row[j] = multiply_add<N>(splat<N>(k), correction[j], load<N>(from + j * N) * a);
        store<N>(to + j * N, row[j]);
    });
    if constexpr (MORE) products.add<HALF>(row, *next_key, *next_query);
}

// to = a from + k correction^T, and with MORE the products of that for the next token.
template <bool MORE>
TOKEND_FLATTEN Products update(
    const float* from, float* to, int64_t size, float a, const float* key, const F<N> (&correction)[VECTORS],
    const float* next_key, const float* next_query
) {
    Products products;
    int64_t i = 0;
    for (; i + 1 < size; i += 2) {
        update_row<0, MORE>(from + i * TILE, to + i * TILE, a, key[i], correction, next_key + i, next_query + i, products);
        update_row<1, MORE>(
            from + (i + 1) * TILE, to + (i + 1) * TILE, a, key[i + 1], correction, next_key + i + 1, next_query + i + 1,
            products
        );
    }
    if (i < size)
        update_row<0, MORE>(from + i * TILE, to + i * TILE, a, key[i], correction, next_key + i, next_query + i, products);
    return products;
}

// The tokens [first, end) of a sequence for one tile of one value head. Outputs take the place of
// values.
TOKEND_FLATTEN void run_tile(
    const TokendDeltaRule& layer, const Sizes& sizes, const TokendRecurrenceRun& run, int64_t sequence, int64_t head,
    int64_t tile, const float* zeros
) {
    float* scratch = static_cast<float*>(run.scratch);
    const int64_t key_head = layer.is_tiled ? head % layer.num_key_heads : head / sizes.heads_per_key;
    const int64_t size = layer.key_size, shift = key_head * size;
    const int64_t column = tile * TILE, width = std::min<int64_t>(TILE, layer.value_size - column);
    const int64_t value_at = head * layer.value_size + column;
    float* const states = run.states + (head * sizes.tiles + tile) * sizes.tile;
    const int32_t source = run.sources[sequence];
    const float* from = source < 0 ? zeros : states + source * run.slot_stride;
    int64_t write = run.write_start[sequence];
    const int64_t end = run.query_start[sequence + 1];
    int64_t at = run.query_start[sequence];
    Products products;
    {
        const Token token(scratch + at * sizes.token, layer, sizes);
        products = products_of(from, size, token.key + shift, token.query + shift);
    }
    for (; at < end; at++) {
        const Token token(scratch + at * sizes.token, layer, sizes);
        float* value = token.value + value_at;
        const float a = token.decay[head], strength = token.strength[head], product = token.product[head];
        F<N> correction[VECTORS];
        each<VECTORS>([&](auto j) {
            const int64_t count = width - j * N;
            const F<N> seen = (products.key[0][j] + products.key[1][j]) * a;
            const F<N> own = count > 0 ? load_part(value + j * N, count) : F<N>{};
            correction[j] = (own - seen) * strength;
            const F<N> read = (products.query[0][j] + products.query[1][j]) * a;
            if (count > 0) store_part(value + j * N, count, multiply_add<N>(splat<N>(product), correction[j], read));
        });
        float* to = states + run.write_slots[write] * run.slot_stride;
        if (at + 1 < end) {
            const Token next(scratch + (at + 1) * sizes.token, layer, sizes);
            products = update<true>(
                from, to, size, a, token.key + shift, correction, next.key + shift, next.query + shift
            );
        } else {
            update<false>(from, to, size, a, token.key + shift, correction, token.key, token.query);
        }
        from = to;
        if (at + 1 == run.write_ends[write]) write++;
    }
}

// ---- output -------------------------------------------------------------------

// out = norm(o) * silu(z) of one head.
template <class T>
TOKEND_FLATTEN void gate_head(const TokendDeltaRule& layer, const float* o, const T* z, T* out) {
    const int64_t size = layer.value_size;
    const float factor = float(1.0 / std::sqrt(double(dot(o, o, size)) / double(size) + layer.norm_eps));
    for (int64_t at = 0; at < size; at += N) {
        const int64_t count = std::min<int64_t>(N, size - at);
        const F<N> gate = load_part(z + at, count);
        const F<N> normed = load_part(o + at, count) * factor * load_part(layer.norm + at, count);
        store_part(out + at, count, normed * (gate * sigmoid<N>(gate)));
    }
}

template <class T>
void run_layer(const TokendDeltaRule& layer, const TokendRecurrenceRun& run) {
    const Sizes sizes(layer);
    float* scratch = static_cast<float*>(run.scratch);
    float* zeros = scratch + run.num_tokens * sizes.token;
    const int64_t heads = layer.num_value_heads, tiles = heads * sizes.tiles;
    constexpr int64_t SPAN = 1024;
    const int64_t spans = (sizes.channels + SPAN - 1) / SPAN;
    in_team(run.num_tokens * tiles * sizes.tile > PARALLEL_ELEMENTS, [&] {
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < sizes.tile; index++) zeros[index] = 0.0f;
#pragma omp for schedule(static)
        for (int64_t index = 0; index < run.num_tokens * layer.num_key_heads; index++) {
            const int64_t token = index / layer.num_key_heads, sequence = sequence_of(run, token);
            const int32_t source = run.sources[sequence];
            const float* window = source < 0 ? nullptr : run.states + source * run.slot_stride + sizes.matrices;
            prepare_head<T>(
                layer, sizes, run, token, token - run.query_start[sequence], window, index % layer.num_key_heads,
                Token(scratch + token * sizes.token, layer, sizes)
            );
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t index = 0; index < run.num_seqs * tiles; index++)
            run_tile(
                layer, sizes, run, index / tiles, index % tiles / sizes.tiles, index % sizes.tiles, zeros
            );
#pragma omp for schedule(static)
        for (int64_t index = 0; index < run.num_seqs * spans; index++) {
            const int64_t first = index % spans * SPAN;
            write_windows(
                run, static_cast<const T*>(run.rows), run.row_stride, sizes.matrices, layer.num_taps - 1, sizes.channels,
                index / spans, first, std::min(first + SPAN, sizes.channels)
            );
        }
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < run.num_tokens * heads; index++) {
            const int64_t token = index / heads, at = index % heads * layer.value_size;
            const T* row = static_cast<const T*>(run.rows) + token * run.row_stride;
            gate_head(
                layer, Token(scratch + token * sizes.token, layer, sizes).value + at, row + sizes.channels + at,
                static_cast<T*>(run.out) + token * sizes.values + at
            );
        }
    });
}

}  // namespace
}  // namespace tokend

extern "C" int64_t tokend_delta_state(const TokendDeltaRule* layer) {
    const tokend::Sizes sizes(*layer);
    return sizes.matrices + (layer->num_taps - 1) * sizes.channels;
}

extern "C" int64_t tokend_delta_bytes(const void* layer, int64_t num_tokens) {
    const tokend::Sizes sizes(*static_cast<const TokendDeltaRule*>(layer));
    return (num_tokens * sizes.token + sizes.tile) * int64_t(sizeof(float));
}

extern "C" void tokend_delta_run(const void* layer, const TokendRecurrenceRun* run) {
    tokend::with_type(run->dtype, [&](auto* type) {
        tokend::run_layer<std::remove_pointer_t<decltype(type)>>(*static_cast<const TokendDeltaRule*>(layer), *run);
    });
}
