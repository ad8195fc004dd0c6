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

// The tokens of a sequence, by their numbers in token_start.
//
//   | computed again | of the step |
//   first            own           end
struct SequenceTokens {
    SequenceTokens(const TokendRecurrenceRun& run, int64_t sequence)
        : first(run.token_start[sequence]), end(run.token_start[sequence + 1]), row(run.query_start[sequence]),
          own(end - (run.query_start[sequence + 1] - row)) {}

    int64_t first, end;
    int64_t row;  // of the step, of token `own`
    int64_t own;
};

// The sequence of a token, by its number in token_start.
inline int64_t sequence_of(const TokendRecurrenceRun& run, int64_t token) {
    return std::upper_bound(run.token_start, run.token_start + run.num_seqs + 1, token) - run.token_start - 1;
}

// The inputs in the state that a sequence begins with; null for zeros. offset: floats of a state before them.
inline const float* inputs_before(const TokendRecurrenceRun& run, int64_t sequence, int64_t offset) {
    const int32_t source = run.sources[sequence];
    return source < 0 ? nullptr : run.states + source * run.slot_stride + offset;
}

// As `convolve`, for a token of a sequence. rows: those of the step. inputs: from inputs_before.
template <bool SILU, class T>
void convolve_token(
    const Taps& taps, const SequenceTokens& tokens, int64_t token, const T* rows, int64_t row_stride, const float* inputs,
    int64_t first, int64_t size, float* out
) {
    const int64_t length = taps.count - 1, logged = tokens.own - tokens.first, index = token - tokens.own;
    if (index < 0) {
        const float* row = inputs + (length + logged + index) * taps.channels;
        return convolve<SILU>(taps, row, taps.channels, length, nullptr, first, size, out);
    }
    const float* window = inputs ? inputs + logged * taps.channels : nullptr;
    convolve<SILU>(taps, rows + (tokens.row + index) * row_stride, row_stride, index, window, first, size, out);
}

// Where one tile of the state of a sequence is read and written while the tokens pass. Floats of a tile lie
// together. offset: of the tile in a state. spare: a tile for states after the last one that is written.
class TilePath {
  public:
    TilePath(
        const TokendRecurrenceRun& run, int64_t sequence, int64_t offset, int64_t num_rows, const float* zeros, float* spare
    )
        : run_(&run), states_(run.states + offset), num_rows_(num_rows), spare_(spare), write_(run.write_start[sequence]),
          end_(run.write_start[sequence + 1]) {
        const SequenceTokens tokens(run, sequence);
        shift_ = tokens.own - tokens.row;
        at_ = tokens.first;
        const int32_t source = run.sources[sequence];
        from_ = source < 0 ? zeros : slot(source);
    }

    int64_t at() const { return at_; }  // the next token
    const float* from() const { return from_; }
    float* to() const { return write_ < end_ ? slot(run_->write_slots[write_]) : spare_; }

    // The next token before `end` after which the state is elsewhere, or `end`.
    int64_t next_stop(int64_t end) const { return write_ < end_ ? std::min(end, base()) : end; }

    // Notes that `to` has the state before token `at`, in columns [column, column + width).
    void advance(int64_t at, int64_t column, int64_t width) {
        from_ = to();
        at_ = at;
        while (write_ < end_ && at_ == base()) {
            if (++write_ == end_ || at_ != base()) break;
            float* copy = to();  // another slot begins its log after the same token
            for (int64_t i = 0; i < num_rows_; i++)
                std::copy_n(from_ + i * TILE + column, width, copy + i * TILE + column);
        }
    }

  private:
    float* slot(int64_t number) const { return states_ + number * run_->slot_stride; }
    int64_t base() const { return run_->write_bases[write_] + shift_; }

    const TokendRecurrenceRun* run_;
    float* states_;
    int64_t num_rows_;
    float* spare_;
    int64_t write_, end_, shift_, at_;
    const float* from_;
};

// What a sequence writes of the inputs of its convolution, for channels [first, end). The inputs with a write follow
// from those with the write before:
//
//   before    | i j k |        three tokens later    | x y z |      one later, with a log of two    | j k x y z |
//
// rows: the inputs of the convolution, of the step's first token. offset: floats of a state before its inputs.
// length: num_taps - 1.
template <class T>
void write_inputs(
    const TokendRecurrenceRun& run, const T* rows, int64_t row_stride, int64_t offset, int64_t length, int64_t channels,
    int64_t sequence, int64_t first, int64_t end
) {
    const SequenceTokens tokens(run, sequence);
    float* const inputs = run.states + offset;
    const float* from = inputs_before(run, sequence, offset);
    int64_t begin = tokens.row - (tokens.own - tokens.first) - length;  // the token whose input is first there
    int64_t done = tokens.row;
    for (int64_t write = run.write_start[sequence]; write < run.write_start[sequence + 1]; write++) {
        const int64_t until = run.write_ends[write], next = run.write_bases[write] - length;
        float* to = inputs + run.write_slots[write] * run.slot_stride;
        for (int64_t token = next; token < until; token++) {
            float* out = to + (token - next) * channels;
            if (token < done) {
                const float* kept = from ? from + (token - begin) * channels : nullptr;
                for (int64_t channel = first; channel < end; channel++) out[channel] = kept ? kept[channel] : 0.0f;
            } else {
                const T* row = rows + token * row_stride;
                for (int64_t channel = first; channel < end; channel += N) {
                    const int64_t count = std::min<int64_t>(N, end - channel);
                    store_part(out + channel, count, load_part(row + channel, count));
                }
            }
        }
        from = to;
        begin = next;
        done = until;
    }
}

// Writes the gates of logged tokens, `size` numbers of each. gates: of the step's first token. offset: floats of a
// state before those in its log.
template <class T>
void write_gates(
    const TokendRecurrenceRun& run, const T* gates, int64_t stride, int64_t offset, int64_t size, int64_t sequence
) {
    for (int64_t write = run.write_start[sequence]; write < run.write_start[sequence + 1]; write++) {
        float* out = run.states + run.write_slots[write] * run.slot_stride + offset;
        for (int64_t token = run.write_bases[write]; token < run.write_ends[write]; token++)
            for (int64_t index = 0; index < size; index++) *out++ = element(gates + token * stride + index);
    }
}

// Computes the tiles of all sequences, by a team. `make` returns what computes a tile of a sequence, given their
// numbers. A thread passes through a chunk of tokens with all of its tiles before the next chunk, so that what tiles
// share of the tokens stays in a cache. The last chunk has at least max_logged tokens, if the sequence has: states that
// are not written stay in one place of a thread.
template <class Make>
void for_each_tile(const TokendRecurrenceRun& run, int64_t num_tiles, int64_t chunk, Make make) {
    const int64_t total = run.num_seqs * num_tiles, threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t end = total * (thread + 1) / threads;
    std::vector<decltype(make(0, 0))> tiles;
    for (int64_t index = total * thread / threads; index < end;) {
        const int64_t sequence = index / num_tiles, last = std::min(end, (sequence + 1) * num_tiles);
        tiles.clear();
        for (; index < last; index++) tiles.push_back(make(sequence, index % num_tiles));
        const SequenceTokens tokens(run, sequence);
        for (int64_t at = tokens.first; at < tokens.end;) {
            at = tokens.end - at >= 2 * chunk ? at + chunk : tokens.end;
            for (auto& tile : tiles) tile.run_until(at);
        }
    }
}

}  // namespace
}  // namespace tokend
