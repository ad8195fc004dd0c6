// Mamba-2 layers. Token after token, as delta_rule.cpp: a tile of a state stays in the first cache while the tokens
// of a sequence pass, and each token reads and writes it once:
//
//   S = a S + B (d x)^T, and S^T C of the rows that were just written
#include "layers/mamba2.h"

#include <cmath>

#include "common/team.h"
#include "layers/recurrence_parts.h"

namespace tokend {
namespace {

struct Sizes {
    explicit Sizes(const TokendMamba2& layer)
        : inner(layer.num_heads * layer.head_size),
          groups(layer.num_groups * layer.state_size),
          channels(inner + 2 * groups),
          heads_per_group(layer.num_heads / layer.num_groups),
          tiles((layer.head_size + TILE - 1) / TILE),
          tile(layer.state_size * TILE),
          matrices(layer.num_heads * tiles * tile),
          token(channels + 2 * layer.num_heads) {}

    // Floats of a state before the gates in its log.
    int64_t gates_at(const TokendMamba2& layer, int64_t max_logged) const {
        return matrices + (layer.num_taps - 1 + max_logged) * channels;
    }

    int64_t inner, groups, channels, heads_per_group, tiles, tile;
    int64_t matrices;  // floats of a state before the inputs
    int64_t token;     // floats of scratch memory
};

// The tokens of a step in scratch memory. What the heads of a group share lies close together, since each of them
// reads it:
//
//   | x, then y, of each token | B | C of each token | a | d of each token | zeros | spare tiles |    a, d: of each head
struct Tokens {
    Tokens(void* scratch, int64_t count, const TokendMamba2& layer, const Sizes& sizes)
        : x(static_cast<float*>(scratch)),
          states(x + count * sizes.inner),
          times(states + count * 2 * sizes.groups),
          zeros(times + count * 2 * layer.num_heads) {}

    // A tile of this thread.
    float* spare(const Sizes& sizes) const { return zeros + (1 + omp_get_thread_num()) * sizes.tile; }

    float *x, *states, *times;
    float* zeros;  // a tile
};

// a and d of the heads of a token; from: its dt. to: [2][num_heads].
template <class T>
void prepare_times(const TokendMamba2& layer, const T* from, float* to) {
    for (int64_t head = 0; head < layer.num_heads; head++) {
        const double time = softplus(element(from + head) * layer.time_factor + layer.time_bias[head]);
        to[head] = float(std::exp(layer.decay[head] * time));
        to[layer.num_heads + head] = float(time);
    }
}

// Tokens that pass through a row of a tile at a time, and columns of it that stay in registers meanwhile.
constexpr int PASS = 4;
constexpr int PAIR = VECTORS >= 2 ? 2 : 1;

// What a pass reads of a token.
struct PassToken {
    const float* x;  // [TILE], times d
    const float* write;
    const float* read;
    float decay;
};

// For each of COUNT tokens in turn: to = a from + write x^T, sums = to^T read; `from` is what the token before left.
// sums: [COUNT][TILE].
template <int COUNT>
TOKEND_FLATTEN void pass_tokens(const float* from, float* to, int64_t size, const PassToken* tokens, float* sums) {
    for (int column = 0; column < TILE; column += PAIR * N) {
        F<N> sum[COUNT][PAIR] = {};
        for (int64_t i = 0; i < size; i++) {
            F<N> row[PAIR];
            each<PAIR>([&](auto j) { row[j] = load<N>(from + i * TILE + column + j * N); });
            each<COUNT>([&](auto t) {
                const F<N> a = splat<N>(tokens[t].decay), b = splat<N>(tokens[t].write[i]), c = splat<N>(tokens[t].read[i]);
                each<PAIR>([&](auto j) {
                    row[j] = multiply_add<N>(b, load<N>(tokens[t].x + column + j * N), row[j] * a);
                    sum[t][j] = multiply_add<N>(row[j], c, sum[t][j]);
                });
            });
            each<PAIR>([&](auto j) { store<N>(to + i * TILE + column + j * N, row[j]); });
        }
        each<COUNT>([&](auto t) {
            each<PAIR>([&](auto j) { store<N>(sums + t * TILE + column + j * N, sum[t][j]); });
        });
    }
}

// Tokens that all tiles pass through before the next ones: their B and C stay in the second cache.
constexpr int64_t CHUNK = 128;

// The tokens of a sequence for one tile of one head. Outputs take the place of x.
class Tile {
  public:
    Tile(
        const TokendMamba2& layer, const Sizes& sizes, const TokendRecurrenceRun& run, const Tokens& tokens,
        int64_t sequence, int64_t index
    )
        : layer_(layer), sizes_(sizes), tokens_(tokens), head_(index / sizes.tiles),
          column_(head_ * layer.head_size + index % sizes.tiles * TILE),
          width_(std::min<int64_t>(TILE, (head_ + 1) * layer.head_size - column_)),
          path_(run, sequence, index * sizes.tile, layer.state_size, tokens.zeros, tokens.spare(sizes)) {}

    // Computes the tokens before `end`.
    TOKEND_FLATTEN void run_until(int64_t end) {
        while ((at_ = path_.at()) < end) {
            const int64_t count = std::min<int64_t>(PASS, path_.next_stop(end) - at_);
            switch (count) {
                case 1: pass<1>(); break;
                case 2: pass<2>(); break;
                case 3: pass<3>(); break;
                default: pass<PASS>();
            }
            path_.advance(at_ + count, 0, TILE);
        }
    }

  private:
    template <int COUNT>
    TOKEND_INLINE void pass() {
        alignas(64) float scaled[COUNT][TILE], sums[COUNT][TILE];
        PassToken tokens[COUNT];
        const int64_t group = head_ / sizes_.heads_per_group * layer_.state_size;
        each<COUNT>([&](auto t) {
            const float* times = tokens_.times + (at_ + t) * 2 * layer_.num_heads + head_;
            const float* shared = tokens_.states + (at_ + t) * 2 * sizes_.groups + group;
            each<VECTORS>([&](auto j) {
                store<N>(scaled[t] + j * N, load_own(t, j * N) * times[layer_.num_heads]);
            });
            tokens[t] = {scaled[t], shared, shared + sizes_.groups, times[0]};
        });
        pass_tokens<COUNT>(path_.from(), path_.to(), layer_.state_size, tokens, sums[0]);
        const float skip = layer_.skip[head_];
        each<COUNT>([&](auto t) {
            each<VECTORS>([&](auto j) {
                const int64_t rest = width_ - j * N;
                if (rest > 0)
                    store_part(own(t) + j * N, rest, multiply_add<N>(splat<N>(skip), load_own(t, j * N), load<N>(sums[t] + j * N)));
            });
        });
    }

    float* own(int64_t t) const { return tokens_.x + (at_ + t) * sizes_.inner + column_; }

    F<N> load_own(int64_t t, int64_t from) const {
        return from < width_ ? load_part(own(t) + from, width_ - from) : F<N>{};
    }

    const TokendMamba2& layer_;
    const Sizes& sizes_;
    const Tokens& tokens_;
    int64_t head_, column_, width_;
    TilePath path_;
    int64_t at_ = 0;
};

float inverse_root(const TokendMamba2& layer, const float* y, int64_t size) {
    return float(1.0 / std::sqrt(double(dot(y, y, size)) / double(size) + layer.norm_eps));
}

// Gate and norm of `size` channels: a group. y is overwritten.
template <class T, class To>
TOKEND_FLATTEN void finish_group(
    const TokendMamba2& layer, float* y, const T* z, const float* norm, int64_t size, To* out
) {
    const float gate_factor = float(layer.gate_factor);
    float factor = 1.0f;
    if (layer.gate_norm == TOKEND_GATED_NORM) factor = inverse_root(layer, y, size);
    for (int64_t at = 0; at < size; at += N) {
        const int64_t count = std::min<int64_t>(N, size - at);
        const F<N> gate = load_part(z + at, count) * gate_factor;
        store_part(y + at, count, load_part(y + at, count) * factor * (gate * sigmoid<N>(gate)));
    }
    factor = layer.gate_norm == TOKEND_NORM_OF_GATED ? inverse_root(layer, y, size) : 1.0f;
    for (int64_t at = 0; at < size; at += N) {
        const int64_t count = std::min<int64_t>(N, size - at);
        F<N> value = load_part(y + at, count) * factor;
        if (norm) value = value * load_part(norm + at, count);
        store_part(out + at, count, value);
    }
}

template <class T, class To>
void run_layer(const TokendMamba2& layer, const TokendRecurrenceRun& run) {
    const Sizes sizes(layer);
    const Taps taps{layer.num_taps, sizes.channels, layer.taps, layer.conv_bias};
    const int64_t num_tokens = run.token_start[run.num_seqs], heads = layer.num_heads;
    const Tokens tokens(run.scratch, num_tokens, layer, sizes);
    const T* rows = static_cast<const T*>(run.rows);
    const T* inputs = rows + sizes.inner;
    const int64_t tiles = heads * sizes.tiles, gates_at = sizes.gates_at(layer, run.max_logged);
    constexpr int64_t SPAN = 1024;
    const int64_t spans = (sizes.channels + SPAN - 1) / SPAN, own_spans = (sizes.inner + SPAN - 1) / SPAN;
    const int64_t all_spans = own_spans + (2 * sizes.groups + SPAN - 1) / SPAN;
    const int64_t group_size = sizes.inner / layer.num_groups;
    in_team(num_tokens * tiles * sizes.tile > PARALLEL_ELEMENTS, [&] {
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < sizes.tile; index++) tokens.zeros[index] = 0.0f;
#pragma omp for schedule(static)
        for (int64_t index = 0; index < num_tokens * all_spans; index++) {
            const int64_t token = index / all_spans, span = index % all_spans, sequence = sequence_of(run, token);
            const SequenceTokens of(run, sequence);
            const float* before = inputs_before(run, sequence, sizes.matrices);
            const bool is_own = span < own_spans;
            const int64_t from = (is_own ? span : span - own_spans) * SPAN;
            convolve_token<true>(
                taps, of, token, inputs, run.row_stride, before, is_own ? from : sizes.inner + from,
                std::min(SPAN, (is_own ? sizes.inner : 2 * sizes.groups) - from),
                (is_own ? tokens.x + token * sizes.inner : tokens.states + token * 2 * sizes.groups) + from
            );
            if (span != 0) continue;
            float* times = tokens.times + token * 2 * heads;
            if (token < of.own) {
                prepare_times(layer, before + gates_at - sizes.matrices + (token - of.first) * heads, times);
            } else {
                prepare_times(layer, inputs + (of.row + token - of.own) * run.row_stride + sizes.channels, times);
            }
        }
        for_each_tile(run, tiles, CHUNK, [&](int64_t sequence, int64_t index) {
            return Tile(layer, sizes, run, tokens, sequence, index);
        });
#pragma omp for schedule(static)
        for (int64_t index = 0; index < run.num_seqs * spans; index++) {
            const int64_t first = index % spans * SPAN;
            write_inputs(
                run, inputs, run.row_stride, sizes.matrices, layer.num_taps - 1, sizes.channels, index / spans, first,
                std::min(first + SPAN, sizes.channels)
            );
            if (first == 0) write_gates(run, inputs + sizes.channels, run.row_stride, gates_at, heads, index / spans);
        }
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < num_tokens * layer.num_groups; index++) {
            const int64_t token = index / layer.num_groups, at = index % layer.num_groups * group_size;
            const SequenceTokens of(run, sequence_of(run, token));
            if (token < of.own) continue;
            const int64_t row = of.row + token - of.own;
            finish_group(
                layer, tokens.x + token * sizes.inner + at, rows + row * run.row_stride + at,
                layer.norm ? layer.norm + at : nullptr, group_size, static_cast<To*>(run.out) + row * sizes.inner + at
            );
        }
    });
}

}  // namespace
}  // namespace tokend

extern "C" int64_t tokend_mamba2_state(const TokendMamba2* layer, int64_t max_logged) {
    return tokend::Sizes(*layer).gates_at(*layer, max_logged) + max_logged * layer->num_heads;
}

extern "C" int64_t tokend_mamba2_bytes(const void* layer, int64_t num_tokens) {
    const tokend::Sizes sizes(*static_cast<const TokendMamba2*>(layer));
    return (num_tokens * sizes.token + (1 + omp_get_max_threads()) * sizes.tile) * int64_t(sizeof(float));
}

extern "C" void tokend_mamba2_run(const void* layer, const TokendRecurrenceRun* run) {
    const TokendMamba2& own = *static_cast<const TokendMamba2*>(layer);
    tokend::with_type(run->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        if (own.has_wide_output) {
            tokend::run_layer<T, float>(own, *run);
        } else {
            tokend::run_layer<T, T>(own, *run);
        }
    });
}
