// A piece of attention work: where its query rows and its tokens' K and V are. Shared by all kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/attention.h"
#include "attention/token_rows.h"
#include "common/simd.h"

namespace tokend {

// The cuts of attention into pieces, the same in all kernels.
//
// The KV tokens of a sequence are cut at fixed positions, whatever part of them is computed
// together, so that a row adds up the same numbers in the same order alone, in a batch and in
// any chunk of its prompt:
//
//   token     0        64       128      192      256                          1024
//   chunk     |--------|--------|--------|--------|-- …     one softmax, then its values
//   piece     |-----------------------------------|-- …     chunks one after the other
//   span      |------------------------------------------ … ------------------|-- …
//
// Pieces are merged into their span from left to right, and spans into the row.

constexpr int64_t CHUNK = 64;
// Short enough to distribute one sequence evenly over threads.
constexpr int64_t PIECE = 256;
constexpr int64_t SPAN = 1024;

// Up to this many rows a task is bound by reading KV, and is a piece; else it is a span.
constexpr int64_t PIECE_ROWS = 16;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

constexpr float NO_SCORE = -std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// The next multiple of `unit`, or the end of what there is.
inline int64_t next_cut(int64_t token, int64_t unit, int64_t end) {
    return std::min(end, (token / unit + 1) * unit);
}

// Tokens that kernels process together, at least as rows of one tile.
constexpr int64_t GROUP = 16;

template <class C>
constexpr bool QUANTISED = std::is_same_v<C, int8_t>;

// One piece of a tile, resolved from the plan; element types are known only at run time.
struct Piece {
    const TokendAttentionStep* step;
    const TokendAttentionLayer* layer;
    const TokendTile* tile;
    int64_t group;
    int64_t rows;
    int64_t head_dim;
    int64_t rotary_dim;   // of a head, the last ones
    int64_t value_dim;    // of an output, the first ones
    int64_t begin, end;   // KV tokens
    int64_t first_limit;  // position after the last token that the tile's first query may see
    int64_t window;       // tokens that a query sees at most
    float scale;
    float soft_cap;

    Piece(const TokendAttentionStep* s, const TokendAttentionLayer* l, const TokendTile* t, int64_t index)
        : step(s), layer(l), tile(t) {
        group = s->num_heads / s->num_kv_heads;
        rows = t->query_count * group;
        head_dim = s->head_dim;
        rotary_dim = s->head_dim - s->latent_dim;
        value_dim = s->latent_dim > 0 ? s->latent_dim : s->head_dim;
        const int64_t from = (t->kv_begin / t->piece_len + index) * t->piece_len;
        begin = std::max<int64_t>(from, t->kv_begin);
        end = std::min<int64_t>(from + t->piece_len, t->kv_end);
        const int64_t queries = s->query_start[t->seq + 1] - s->query_start[t->seq];
        first_limit = s->seq_lens[t->seq] - queries + t->query_begin + 1 + s->ahead;
        window = s->window;
        scale = float(s->scale);
        soft_cap = float(s->soft_cap);
    }

    // The same piece of another KV head's tile: tiles of the same queries are adjacent.
    Piece of_head(int64_t number) const {
        Piece other = *this;
        other.tile += number;
        return other;
    }

    // The token and the head of a row, among those of the step.
    int64_t token(int64_t row) const {
        return step->query_start[tile->seq] + tile->query_begin + row / group;
    }
    int64_t head(int64_t row) const { return tile->kv_head * group + row % group; }

    // A row sees KV tokens [limit - window, limit) as far as there are any.
    int64_t limit(int64_t row) const { return first_limit + row / group; }

    // Whether every row sees all of [from, to).
    bool all_see(int64_t from, int64_t to) const {
        return to <= std::min(first_limit, end) && from >= limit(rows - 1) - window;
    }

    // The query of a row, rotated and rounded to the activations' dtype.
    void rotated_query(int64_t row, float* query) const {
        read_row(layer->dtype, layer->query, token(row) * layer->query_stride + head(row) * head_dim, head_dim, query);
        rotate_row(layer->rotation + token(row) * rotary_dim, rotary_dim, query + head_dim - rotary_dim);
        round_row(layer->dtype, head_dim, query);
    }

    void write_output(int64_t row, const float* output) const {
        write_row(layer->dtype, output, value_dim, layer->output, (token(row) * step->num_heads + head(row)) * value_dim);
    }

    // Rows of K and V of tokens [from, to).
    template <class C>
    void locate(int64_t from, int64_t to, const C** keys, const C** values) const {
        over_pages<C>(from, to, [&](const C* key_page, const C* value_page, int64_t offset, int64_t run) {
            for (int64_t i = 0; i < run; i++) {
                *keys++ = key_page + (offset + i) * head_dim;
                *values++ = value_page + (offset + i) * head_dim;
            }
            if constexpr (QUANTISED<C>) {
                fetch_scales(key_page, value_page, offset);
            }
        });
    }

    // Calls body(number, the first rows of K and of V, tokens before them in their page) for each 16
    // tokens from a multiple of 16 up to `to`, where pages hold whole sixteens.
    template <class C, class Body>
    TOKEND_INLINE void each_group(int64_t from, int64_t to, Body body) const {
        const int32_t* table = step->block_table + tile->seq * step->max_blocks;
        const int64_t block_size = step->block_size, head_offset = tile->kv_head * layer->head_stride;
        int64_t page = from / block_size, offset = from % block_size;
        for (int64_t group = 0; from < to; group++, from += GROUP) {
            const int64_t at = table[page] * layer->block_stride + head_offset + offset * head_dim;
            body(group, static_cast<const C*>(layer->key_pages) + at, static_cast<const C*>(layer->value_pages) + at,
                 offset);
            offset += GROUP;
            if (offset == block_size) {
                offset = 0;
                page++;
            }
        }
    }

    // Scales of int8 K and V of tokens [from, to); those of a part of the rows `stride` after
    // those of the part before.
    void scales(int64_t from, int64_t to, int64_t stride, float* keys, float* values) const {
        using C = int8_t;
        over_pages<C>(from, to, [&](const C* key_page, const C* value_page, int64_t offset, int64_t run) {
            for (int64_t part = 0; part < num_scales(head_dim); part++) {
                const int64_t at = part * step->block_size + offset;
                std::copy_n(page_scales(key_page, step->block_size, head_dim) + at, run, keys + part * stride);
                std::copy_n(page_scales(value_page, step->block_size, head_dim) + at, run, values + part * stride);
            }
            keys += run;
            values += run;
        });
    }

  private:
    void fetch_scales(const int8_t* key_page, const int8_t* value_page, int64_t offset) const {
        for (int64_t part = 0; part < num_scales(head_dim); part++) {
            const int64_t at = part * step->block_size + offset;
            __builtin_prefetch(page_scales(key_page, step->block_size, head_dim) + at);
            __builtin_prefetch(page_scales(value_page, step->block_size, head_dim) + at);
        }
    }

    // Calls body(pages of K and V of the tile's head, first token in them, number of tokens).
    template <class C, class Body>
    TOKEND_INLINE void over_pages(int64_t from, int64_t to, Body body) const {
        const int32_t* table = step->block_table + tile->seq * step->max_blocks;
        const int64_t head_offset = tile->kv_head * layer->head_stride;
        const C* key_pages = static_cast<const C*>(layer->key_pages) + head_offset;
        const C* value_pages = static_cast<const C*>(layer->value_pages) + head_offset;
        int64_t page = from / step->block_size, offset = from % step->block_size;
        for (int64_t token = from; token < to; page++, offset = 0) {
            const int64_t run = std::min(step->block_size - offset, to - token);
            const int64_t start = table[page] * layer->block_stride;
            body(key_pages + start, value_pages + start, offset, run);
            token += run;
        }
    }
};

// Replaces raw scores so that, times `scale`, they are soft_cap * tanh(score * scale / soft_cap).
template <int N>
TOKEND_INLINE F<N> capped(F<N> score, float scale, float soft_cap) {
    return tanh<N>(score * (scale / soft_cap)) * (soft_cap / scale);
}

// Memory of one thread, kept between calls.
class Scratch {
  public:
    // The first `size` floats, on a cache line boundary.
    float* floats(size_t size) {
        if (buffer_.size() < size + 16) buffer_.resize(size + 16);
        const auto address = reinterpret_cast<uintptr_t>(buffer_.data());
        return reinterpret_cast<float*>((address + 63) & ~uintptr_t(63));
    }

  private:
    std::vector<float> buffer_;
};

// The kernels for queries of bfloat16 over pages of bfloat16 or int8, in sources of their own,
// which are compiled for the tile unit if a variant has it. A kernel returns whether it supports
// the piece; if not, the generic kernels run.

// many_rows_bf16.cpp: many query rows, a span of tokens, and how many rows a tile of a longer
// prompt has: enough to reuse K and V many times.
int64_t tile_rows();
bool attend_in_bfloat16(const Piece& piece, const TokendAttentionSchedule* plan, int64_t index, Scratch& scratch);

// few_rows_bf16.cpp: few query rows over pages of bfloat16, a piece of tokens; `following` is
// what to fetch ahead.
bool attend_few_in_bfloat16(const Piece& piece, const Piece& following, const TokendAttentionSchedule* plan, int64_t index,
                            Scratch& scratch);

// few_rows_int8.cpp: few query rows over pages of int8, a piece of neighbouring heads.
bool attend_few_in_int8(const Piece& first, int64_t heads, const Piece& following, const TokendAttentionSchedule* plan,
                        int64_t index, Scratch& scratch);

}  // namespace tokend
