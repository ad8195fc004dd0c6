// What the kernels of recurrent layers share: vectors of any length, the convolution, windows.
#pragma once

#include <omp.h>

#include <cmath>
#include <vector>

#include "common/row_vectors.h"
#include "layers/recurrence.h"

namespace tokend {
namespace {

constexpr int N = ROW_LANES;
constexpr int TILE = TOKEND_STATE_TILE;
constexpr int VECTORS = TILE / N;
// Below this many elements of states, waking other threads costs more than it saves.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 14;

template <class T>
TOKEND_INLINE F<N> load_part(const T* from, int64_t count) {
    return count >= N ? load<N>(from) : load_some<N>(from, count, 0.0f);
}

template <class T>
TOKEND_INLINE void store_part(T* to, int64_t count, F<N> value) {
    count >= N ? store<N>(to, value) : store_some<N>(to, count, value);
}

TOKEND_FLATTEN inline float dot(const float* a, const float* b, int64_t size) {
    F<N> sum{};
    for (int64_t at = 0; at < size; at += N) {
        const int64_t count = std::min<int64_t>(N, size - at);
        sum = multiply_add<N>(load_part(a + at, count), load_part(b + at, count), sum);
    }
    return sum_lanes<N>(sum);
}

inline double softplus(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }

template <class T>
float element(const T* from) {
    return load_some<N>(from, 1, 0.0f)[0];
}

// A causal depthwise convolution.
struct Taps {
    int64_t count;  // tokens that it sees, the current one included
    int64_t channels;
    const float* weights;  // [count, channels], the oldest token first
    const float* bias;     // [channels] or null
};

// The convolution of channels [first, first + size) of a token, and silu of it if SILU. `before` is the
// number of tokens of this sequence before it in this step; older inputs are in `window`, null for zeros.
template <bool SILU, class T>
TOKEND_FLATTEN void convolve(
    const Taps& taps, const T* row, int64_t row_stride, int64_t before, const float* window, int64_t first, int64_t size,
    float* out
) {
    for (int64_t at = 0; at < size; at += N) {
        const int64_t channel = first + at, count = std::min<int64_t>(N, size - at);
        F<N> sum{};
        if (taps.bias) sum = load_part(taps.bias + channel, count);
        for (int64_t tap = 0; tap < taps.count; tap++) {
            const int64_t back = taps.count - 1 - tap;
            F<N> input{};
            if (back <= before) {
                input = load_part(row - back * row_stride + channel, count);
            } else if (window) {
                input = load_part(window + (tap + before) * taps.channels + channel, count);
            }
            sum = multiply_add<N>(input, load_part(taps.weights + tap * taps.channels + channel, count), sum);
        }
        if constexpr (SILU) sum = sum * sigmoid<N>(sum);
        store_part(out + at, count, sum);
    }
}

// The windows that a sequence writes, for channels [first, end). The window after a write follows from
// that after the write before:
//
//   before    | i j k |        three tokens later    | x y z |      one later    | j k x |
//
// rows: the inputs of the convolution, of the step's first token. offset: floats of a state before the window
// [length, channels].
template <class T>
void write_windows(
    const TokendRecurrenceRun& run, const T* rows, int64_t row_stride, int64_t offset, int64_t length, int64_t channels,
    int64_t sequence, int64_t first, int64_t end
) {
    float* const windows = run.states + offset;
    const int32_t source = run.sources[sequence];
    const float* from = source < 0 ? nullptr : windows + source * run.slot_stride;
    int64_t done = run.query_start[sequence];
    for (int64_t write = run.write_start[sequence]; write < run.write_start[sequence + 1]; write++) {
        const int64_t until = run.write_ends[write], passed = until - done;
        float* to = windows + run.write_slots[write] * run.slot_stride;
        for (int64_t i = 0; i < length; i++) {
            float* out = to + i * channels;
            if (i + passed < length) {
                const float* kept = from ? from + (i + passed) * channels : nullptr;
                for (int64_t channel = first; channel < end; channel++) out[channel] = kept ? kept[channel] : 0.0f;
            } else {
                const T* row = rows + (until - length + i) * row_stride;
                for (int64_t channel = first; channel < end; channel += N) {
                    const int64_t count = std::min<int64_t>(N, end - channel);
                    store_part(out + channel, count, load_part(row + channel, count));
                }
            }
        }
        from = to;
        done = until;
    }
}

// Tokens of a step by sequence: the sequence of a token.
inline int64_t sequence_of(const TokendRecurrenceRun& run, int64_t token) {
    return std::upper_bound(run.query_start, run.query_start + run.num_seqs + 1, token) - run.query_start - 1;
}

// Computes the tiles of all sequences, by a team. `make` returns what computes a tile of a sequence, given their
// numbers. A thread passes through a chunk of tokens with all of its tiles before the next chunk, so that what tiles
// share of the tokens stays in a cache.
template <class Make>
void for_each_tile(const TokendRecurrenceRun& run, int64_t num_tiles, int64_t chunk, Make make) {
    const int64_t total = run.num_seqs * num_tiles, threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t end = total * (thread + 1) / threads;
    std::vector<decltype(make(0, 0))> tiles;
    for (int64_t index = total * thread / threads; index < end;) {
        const int64_t sequence = index / num_tiles, last = std::min(end, (sequence + 1) * num_tiles);
        tiles.clear();
        for (; index < last; index++) tiles.push_back(make(sequence, index % num_tiles));
        const int64_t begin = run.query_start[sequence], until = run.query_start[sequence + 1];
        for (int64_t at = begin; at < until; at += chunk)
            for (auto& tile : tiles) tile.run_until(std::min(at + chunk, until));
    }
}

}  // namespace
}  // namespace tokend
