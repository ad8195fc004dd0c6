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

    int64_t inner, groups, channels, heads_per_group, tiles, tile;
    int64_t matrices;  // floats of a state before the window
    int64_t token;     // floats of scratch memory
};

// A token in scratch memory: | x, then y | B | C | a | d |, the last two of each head.
struct Token {
    Token(float* at, const TokendMamba2& layer, const Sizes& sizes)
        : x(at), write(x + sizes.inner), read(write + sizes.groups), decay(read + sizes.groups), time(decay + layer.num_heads) {}

    float *x, *write, *read, *decay, *time;
};

// a and d of the heads of a token; from: its dt.
template <class T>
void prepare_times(const TokendMamba2& layer, const T* from, const Token& to) {
    for (int64_t head = 0; head < layer.num_heads; head++) {
        const double time = softplus(element(from + head) * layer.time_factor + layer.time_bias[head]);
        to.time[head] = float(time);
        to.decay[head] = float(std::exp(layer.decay[head] * time));
    }
}

// S^T C of a tile. Even and odd rows are summed apart: twice as many chains.
struct Sums {
    F<N> of[2][VECTORS] = {};
};

template <int HALF>
TOKEND_INLINE void update_row(const float* from, float* to, float a, float b, float c, const F<N> (&x)[VECTORS], Sums& sums) {
    each<VECTORS>([&](auto j) {
        const F<N> row = multiply_add<N>(splat<N>(b), x[j], load<N>(from + j * N) * a);
        store<N>(to + j * N, row);
        sums.of[HALF][j] = multiply_add<N>(row, splat<N>(c), sums.of[HALF][j]);
    });
}

// to = a from + write x^T; returns its products with `read`.
TOKEND_FLATTEN Sums update(
    const float* from, float* to, int64_t size, float a, const float* write, const float* read, const F<N> (&x)[VECTORS]
) {
    Sums sums;
    int64_t i = 0;
    for (; i + 1 < size; i += 2) {
        update_row<0>(from + i * TILE, to + i * TILE, a, write[i], read[i], x, sums);
        update_row<1>(from + (i + 1) * TILE, to + (i + 1) * TILE, a, write[i + 1], read[i + 1], x, sums);
    }
    if (i < size) update_row<0>(from + i * TILE, to + i * TILE, a, write[i], read[i], x, sums);
    return sums;
}

// The tokens of a sequence for one tile of one head. Outputs take the place of x.
TOKEND_FLATTEN void run_tile(
    const TokendMamba2& layer, const Sizes& sizes, const TokendRecurrenceRun& run, int64_t sequence, int64_t head,
    int64_t tile, const float* zeros
) {
    float* scratch = static_cast<float*>(run.scratch);
    const int64_t group = head / sizes.heads_per_group * layer.state_size;
    const int64_t column = tile * TILE, width = std::min<int64_t>(TILE, layer.head_size - column);
    const int64_t x_at = head * layer.head_size + column;
    float* const states = run.states + (head * sizes.tiles + tile) * sizes.tile;
    const int32_t source = run.sources[sequence];
    const float* from = source < 0 ? zeros : states + source * run.slot_stride;
    const float skip = layer.skip[head];
    int64_t write = run.write_start[sequence];
    for (int64_t at = run.query_start[sequence]; at < run.query_start[sequence + 1]; at++) {
        const Token token(scratch + at * sizes.token, layer, sizes);
        float* const own = token.x + x_at;
        F<N> x[VECTORS], scaled[VECTORS];
        each<VECTORS>([&](auto j) {
            const int64_t count = width - j * N;
            x[j] = count > 0 ? load_part(own + j * N, count) : F<N>{};
            scaled[j] = x[j] * token.time[head];
        });
        float* to = states + run.write_slots[write] * run.slot_stride;
        const Sums sums =
            update(from, to, layer.state_size, token.decay[head], token.write + group, token.read + group, scaled);
        each<VECTORS>([&](auto j) {
            const int64_t count = width - j * N;
            const F<N> read = sums.of[0][j] + sums.of[1][j];
            if (count > 0) store_part(own + j * N, count, multiply_add<N>(splat<N>(skip), x[j], read));
        });
        from = to;
        if (at + 1 == run.write_ends[write]) write++;
    }
}

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
    float* scratch = static_cast<float*>(run.scratch);
    float* zeros = scratch + run.num_tokens * sizes.token;
    const T* rows = static_cast<const T*>(run.rows);
    const int64_t tiles = layer.num_heads * sizes.tiles;
    constexpr int64_t SPAN = 1024;
    const int64_t spans = (sizes.channels + SPAN - 1) / SPAN;
    const int64_t group_size = sizes.inner / layer.num_groups;
    in_team(run.num_tokens * tiles * sizes.tile > PARALLEL_ELEMENTS, [&] {
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < sizes.tile; index++) zeros[index] = 0.0f;
#pragma omp for schedule(static)
        for (int64_t index = 0; index < run.num_tokens * spans; index++) {
            const int64_t token = index / spans, first = index % spans * SPAN, sequence = sequence_of(run, token);
            const int32_t source = run.sources[sequence];
            const float* window = source < 0 ? nullptr : run.states + source * run.slot_stride + sizes.matrices;
            const T* row = rows + token * run.row_stride;
            const Token to(scratch + token * sizes.token, layer, sizes);
            convolve<true>(
                taps, row + sizes.inner, run.row_stride, token - run.query_start[sequence], window, first,
                std::min(SPAN, sizes.channels - first), to.x + first
            );
            if (first == 0) prepare_times(layer, row + sizes.inner + sizes.channels, to);
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t index = 0; index < run.num_seqs * tiles; index++)
            run_tile(layer, sizes, run, index / tiles, index % tiles / sizes.tiles, index % sizes.tiles, zeros);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < run.num_seqs * spans; index++) {
            const int64_t first = index % spans * SPAN;
            write_windows(
                run, rows + sizes.inner, run.row_stride, sizes.matrices, layer.num_taps - 1, sizes.channels, index / spans,
                first, std::min(first + SPAN, sizes.channels)
            );
        }
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < run.num_tokens * layer.num_groups; index++) {
            const int64_t token = index / layer.num_groups, at = index % layer.num_groups * group_size;
            finish_group(
                layer, Token(scratch + token * sizes.token, layer, sizes).x + at, rows + token * run.row_stride + at,
                layer.norm ? layer.norm + at : nullptr, group_size, static_cast<To*>(run.out) + token * sizes.inner + at
            );
        }
    });
}

}  // namespace
}  // namespace tokend

extern "C" int64_t tokend_mamba2_state(const TokendMamba2* layer) {
    const tokend::Sizes sizes(*layer);
    return sizes.matrices + (layer->num_taps - 1) * sizes.channels;
}

extern "C" int64_t tokend_mamba2_bytes(const void* layer, int64_t num_tokens) {
    const tokend::Sizes sizes(*static_cast<const TokendMamba2*>(layer));
    return (num_tokens * sizes.token + sizes.tile) * int64_t(sizeof(float));
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
