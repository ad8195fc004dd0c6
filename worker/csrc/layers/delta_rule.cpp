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

    // Floats of a state before the gates in its log.
    int64_t gates_at(const TokendDeltaRule& layer, int64_t max_logged) const {
        return matrices + (layer.num_taps - 1 + max_logged) * channels;
    }

    int64_t keys, values, channels, heads_per_key, tiles, tile;
    int64_t matrices;  // floats of a state before the inputs
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

// Everything of a token and a key head that needs no matrix. gates: b and a of the token. convolved(first, count, out)
// computes some channels.
template <class T, class Convolved>
void prepare_head(
    const TokendDeltaRule& layer, const Sizes& sizes, const T* gates, int64_t head, const Token& to, Convolved convolved
) {
    const int64_t size = layer.key_size, shift = head * size;
    float *query = to.query + shift, *key = to.key + shift;
    convolved(shift, size, query);
    convolved(sizes.keys + shift, size, key);
    scale(query, size, inverse_norm(query, size) * float(1.0 / std::sqrt(double(size))));
    scale(key, size, inverse_norm(key, size));
    const float product = dot(query, key, size);
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

// Columns of a tile that pass through the tokens together, few enough that their sums stay in registers.
constexpr int COLUMNS = VECTORS >= 2 ? 2 : 1;  // vectors
constexpr int GROUPS = VECTORS / COLUMNS;

// S^T k and S^T q of such columns. Even and odd rows are summed apart: twice as many chains.
struct Products {
    F<N> key[2][COLUMNS] = {}, query[2][COLUMNS] = {};

    template <int HALF>
    TOKEND_INLINE void add(const F<N> (&row)[COLUMNS], float k, float q) {
        each<COLUMNS>([&](auto j) {
            key[HALF][j] = multiply_add<N>(row[j], splat<N>(k), key[HALF][j]);
            query[HALF][j] = multiply_add<N>(row[j], splat<N>(q), query[HALF][j]);
        });
    }
};

// Calls body(half, i) for every row of a tile; half: i modulo 2, a constant.
template <class Body>
TOKEND_INLINE void each_tile_row(int64_t size, Body body) {
    int64_t i = 0;
    for (; i + 1 < size; i += 2) {
        body(std::integral_constant<int, 0>(), i);
        body(std::integral_constant<int, 1>(), i + 1);
    }
    if (i < size) body(std::integral_constant<int, 0>(), i);
}

TOKEND_FLATTEN Products products_of(const float* from, int64_t size, const float* key, const float* query) {
    Products products;
    each_tile_row(size, [&](auto half, int64_t i) {
        F<N> row[COLUMNS];
        each<COLUMNS>([&](auto j) { row[j] = load<N>(from + i * TILE + j * N); });
        products.add<half>(row, key[i], query[i]);
    });
    return products;
}

// to = a from + k correction^T, and with MORE the products of that for the next token.
template <bool MORE>
TOKEND_FLATTEN Products update(
    const float* from, float* to, int64_t size, float a, const float* key, const F<N> (&correction)[COLUMNS],
    const float* next_key, const float* next_query
) {
    Products products;
    each_tile_row(size, [&](auto half, int64_t i) {
        F<N> row[COLUMNS];
        each<COLUMNS>([&](auto j) {
            row[j] = multiply_add<N>(splat<N>(key[i]), correction[j], load<N>(from + i * TILE + j * N) * a);
            store<N>(to + i * TILE + j * N, row[j]);
        });
        if constexpr (MORE) products.add<half>(row, next_key[i], next_query[i]);
    });
    return products;
}

// Tokens that all tiles of a thread pass through before the next ones: what the tiles of a head read of them stays in
// the second cache.
constexpr int64_t CHUNK = 64;

// The tokens of a sequence for one tile of one value head. Outputs take the place of values.
class Tile {
  public:
    Tile(
        const TokendDeltaRule& layer, const Sizes& sizes, const TokendRecurrenceRun& run, float* zeros,
        int64_t sequence, int64_t index
    )
        : layer_(layer), sizes_(sizes), scratch_(static_cast<float*>(run.scratch)), head_(index / sizes.tiles),
          path_(run, sequence, index * sizes.tile, layer.key_size, zeros, zeros + (1 + omp_get_thread_num()) * sizes.tile),
          end_(run.token_start[sequence + 1]) {
        const int64_t key_head = layer.is_tiled ? head_ % layer.num_key_heads : head_ / sizes.heads_per_key;
        shift_ = key_head * layer.key_size;
        const int64_t column = index % sizes.tiles * TILE;
        width_ = std::min<int64_t>(TILE, layer.value_size - column);
        value_at_ = head_ * layer.value_size + column;
        const Token first = token(path_.at());
        for (int group = 0; group < GROUPS; group++)
            products_[group] =
                products_of(path_.from() + group * COLUMNS * N, layer.key_size, first.key + shift_, first.query + shift_);
    }

    // Computes the tokens before `end`.
    void run_until(int64_t end) {
        const TilePath begin = path_;
        for (int group = 0; group < GROUPS; group++) {
            path_ = begin;
            run_columns(group, end);
        }
    }

  private:
    TOKEND_FLATTEN void run_columns(int group, int64_t end) {
        const int64_t size = layer_.key_size, shift = shift_, first = group * COLUMNS * N;
        Products products = products_[group];
        for (int64_t at = path_.at(); at < end; at++) {
            const float* from = path_.from() + first;
            const Token own = token(at);
            float* value = own.value + value_at_ + first;
            const float a = own.decay[head_], strength = own.strength[head_], product = own.product[head_];
            F<N> correction[COLUMNS];
            each<COLUMNS>([&](auto j) {
                const int64_t count = width_ - first - j * N;
                const F<N> seen = (products.key[0][j] + products.key[1][j]) * a;
                correction[j] = ((count > 0 ? load_part(value + j * N, count) : F<N>{}) - seen) * strength;
                const F<N> read = (products.query[0][j] + products.query[1][j]) * a;
                if (count > 0) store_part(value + j * N, count, multiply_add<N>(splat<N>(product), correction[j], read));
            });
            float* to = path_.to() + first;
            if (at + 1 < end_) {
                const Token next = token(at + 1);
                products =
                    update<true>(from, to, size, a, own.key + shift, correction, next.key + shift, next.query + shift);
            } else {
                update<false>(from, to, size, a, own.key + shift, correction, own.key, own.query);
            }
            path_.advance(at + 1, first, COLUMNS * N);
        }
        products_[group] = products;
    }

    Token token(int64_t at) const { return Token(scratch_ + at * sizes_.token, layer_, sizes_); }

    const TokendDeltaRule& layer_;
    const Sizes& sizes_;
    float* scratch_;
    int64_t head_, shift_, width_, value_at_;
    TilePath path_;
    int64_t end_;
    Products products_[GROUPS];
};

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
    const int64_t num_tokens = run.token_start[run.num_seqs];
    float* scratch = static_cast<float*>(run.scratch);
    float* zeros = scratch + num_tokens * sizes.token;
    const T *rows = static_cast<const T*>(run.rows), *gates = static_cast<const T*>(run.gates);
    const int64_t heads = layer.num_value_heads, tiles = heads * sizes.tiles;
    const int64_t gates_at = sizes.gates_at(layer, run.max_logged);
    const Taps taps{layer.num_taps, sizes.channels, layer.taps, nullptr};
    constexpr int64_t SPAN = 1024;
    const int64_t spans = (sizes.channels + SPAN - 1) / SPAN;
    in_team(num_tokens * tiles * sizes.tile > PARALLEL_ELEMENTS, [&] {
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < sizes.tile; index++) zeros[index] = 0.0f;
#pragma omp for schedule(static)
        for (int64_t index = 0; index < num_tokens * layer.num_key_heads; index++) {
            const int64_t token = index / layer.num_key_heads, head = index % layer.num_key_heads;
            const int64_t sequence = sequence_of(run, token);
            const SequenceTokens of(run, sequence);
            const float* before = inputs_before(run, sequence, sizes.matrices);
            const Token to(scratch + token * sizes.token, layer, sizes);
            const auto convolved = [&](int64_t first, int64_t count, float* out) {
                convolve_token<true>(taps, of, token, rows, run.row_stride, before, first, count, out);
            };
            if (token < of.own) {
                const float* logged = before + gates_at - sizes.matrices + (token - of.first) * 2 * heads;
                prepare_head(layer, sizes, logged, head, to, convolved);
            } else {
                prepare_head(layer, sizes, gates + (of.row + token - of.own) * run.gate_stride, head, to, convolved);
            }
        }
        for_each_tile(run, tiles, CHUNK, [&](int64_t sequence, int64_t index) {
            return Tile(layer, sizes, run, zeros, sequence, index);
        });
#pragma omp for schedule(static)
        for (int64_t index = 0; index < run.num_seqs * spans; index++) {
            const int64_t first = index % spans * SPAN;
            write_inputs(
                run, rows, run.row_stride, sizes.matrices, layer.num_taps - 1, sizes.channels, index / spans, first,
                std::min(first + SPAN, sizes.channels)
            );
            if (first == 0) write_gates(run, gates, run.gate_stride, gates_at, 2 * heads, index / spans);
        }
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < num_tokens * heads; index++) {
            const int64_t token = index / heads, at = index % heads * layer.value_size;
            const SequenceTokens of(run, sequence_of(run, token));
            if (token < of.own) continue;
            const int64_t row = of.row + token - of.own;
            gate_head(
                layer, Token(scratch + token * sizes.token, layer, sizes).value + at,
                rows + row * run.row_stride + sizes.channels + at, static_cast<T*>(run.out) + row * sizes.values + at
            );
        }
    });
}

}  // namespace
}  // namespace tokend

extern "C" int64_t tokend_delta_state(const TokendDeltaRule* layer, int64_t max_logged) {
    return tokend::Sizes(*layer).gates_at(*layer, max_logged) + max_logged * 2 * layer->num_value_heads;
}

extern "C" int64_t tokend_delta_bytes(const void* layer, int64_t num_tokens) {
    const tokend::Sizes sizes(*static_cast<const TokendDeltaRule*>(layer));
    return (num_tokens * sizes.token + (1 + omp_get_max_threads()) * sizes.tile) * int64_t(sizeof(float));
}

extern "C" void tokend_delta_run(const void* layer, const TokendRecurrenceRun* run) {
    tokend::with_type(run->dtype, [&](auto* type) {
        tokend::run_layer<std::remove_pointer_t<decltype(type)>>(*static_cast<const TokendDeltaRule*>(layer), *run);
    });
}
