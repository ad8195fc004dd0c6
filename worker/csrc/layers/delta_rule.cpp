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

// Columns of a tile that pass through the tokens together: so many that their sums stay in registers.
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
        const TokendDeltaRule& layer, const Sizes& sizes, const TokendRecurrenceRun& run, const float* zeros,
        int64_t sequence, int64_t index
    )
        : layer_(layer), sizes_(sizes), run_(run), head_(index / sizes.tiles),
          states_(run.states + index * sizes.tile), write_(run.write_start[sequence]),
          at_(run.query_start[sequence]), end_(run.query_start[sequence + 1]) {
        const int32_t source = run.sources[sequence];
        from_ = source < 0 ? zeros : states_ + source * run.slot_stride;
        const int64_t key_head = layer.is_tiled ? head_ % layer.num_key_heads : head_ / sizes.heads_per_key;
        shift_ = key_head * layer.key_size;
        const int64_t column = index % sizes.tiles * TILE;
        width_ = std::min<int64_t>(TILE, layer.value_size - column);
        value_at_ = head_ * layer.value_size + column;
        const Token first = token(at_);
        for (int group = 0; group < GROUPS; group++)
            products_[group] =
                products_of(from_ + group * COLUMNS * N, layer.key_size, first.key + shift_, first.query + shift_);
    }

    // Computes the tokens before `end`.
    void run_until(int64_t end) {
        for (int group = 0; group < GROUPS; group++) run_columns(group, end);
        for (; at_ < end; at_++) {
            from_ = to(write_);
            if (at_ + 1 == run_.write_ends[write_]) write_++;
        }
    }

  private:
    TOKEND_FLATTEN void run_columns(int group, int64_t end) {
        const int64_t size = layer_.key_size, shift = shift_, first = group * COLUMNS * N;
        const float* from = from_ + first;
        int64_t write = write_;
        Products products = products_[group];
        for (int64_t at = at_; at < end; at++) {
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
            float* next_state = to(write) + first;
            if (at + 1 < end_) {
                const Token next = token(at + 1);
                products = update<true>(
                    from, next_state, size, a, own.key + shift, correction, next.key + shift, next.query + shift
                );
            } else {
                update<false>(from, next_state, size, a, own.key + shift, correction, own.key, own.query);
            }
            from = next_state;
            if (at + 1 == run_.write_ends[write]) write++;
        }
        products_[group] = products;
    }

    float* to(int64_t write) const { return states_ + run_.write_slots[write] * run_.slot_stride; }

    Token token(int64_t at) const {
        return Token(static_cast<float*>(run_.scratch) + at * sizes_.token, layer_, sizes_);
    }

    const TokendDeltaRule& layer_;
    const Sizes& sizes_;
    const TokendRecurrenceRun& run_;
    int64_t head_, shift_, width_, value_at_;
    float* states_;
    const float* from_;
    int64_t write_, at_, end_;
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
        for_each_tile(run, tiles, CHUNK, [&](int64_t sequence, int64_t index) {
            return Tile(layer, sizes, run, zeros, sequence, index);
        });
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
