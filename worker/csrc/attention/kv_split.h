// A split of a tile's KV tokens, as all kernels see it: where its query rows and its tokens' K and V are.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/attention.h"
#include "attention/token_rows.h"
#include "common/simd.h"

namespace tokend {

// Numbers of tokens between cuts; attention.cpp draws and explains them.
constexpr int64_t TOKEN_GROUP = 16;
constexpr int64_t CHUNK = 64;
constexpr int64_t SHORT_SPLIT = 256;
constexpr int64_t LONG_SPLIT = 1024;

// Tiles of up to this many rows are bound by reading KV and have short splits, others long ones.
constexpr int64_t SHORT_SPLIT_ROWS = 16;

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

template <class C>
constexpr bool QUANTISED = std::is_same_v<C, int8_t>;

// One split of a tile, resolved from the plan; element types are known only at run time.
struct KVSplit {
    const TokendAttentionStep* step;
    const TokendAttentionLayer* layer;
    const TokendTile* tile;
    int64_t group_size;   // query heads of a KV head
    int64_t rows;
    int64_t head_dim;
    int64_t rotary_dim;   // of a head, the last ones
    int64_t value_dim;    // of an output, the first ones
    int64_t begin, end;   // KV tokens
    int64_t first_limit;  // position after the last token that the tile's first query may see, without `attend_end`
    const int32_t* attend_end;  // the step's, from the tile's first query on; or null
    int64_t window;       // tokens that a query sees at most
    float scale;
    float soft_cap;

    KVSplit(const TokendAttentionStep* s, const TokendAttentionLayer* l, const TokendTile* t, int64_t index)
        : step(s), layer(l), tile(t) {
        group_size = s->num_heads / s->num_kv_heads;
        rows = t->query_count * group_size;
        head_dim = s->head_dim;
        rotary_dim = s->head_dim - s->latent_dim;
        value_dim = s->latent_dim > 0 ? s->latent_dim : s->head_dim;
        const int64_t from = (t->kv_begin / t->split_len + index) * t->split_len;
        begin = std::max<int64_t>(from, t->kv_begin);
        end = std::min<int64_t>(from + t->split_len, t->kv_end);
        const int64_t queries = s->query_start[t->seq + 1] - s->query_start[t->seq];
        first_limit = s->seq_lens[t->seq] - queries + t->query_begin + 1 + s->ahead;
        attend_end = s->attend_end == nullptr ? nullptr : s->attend_end + s->query_start[t->seq] + t->query_begin;
        window = s->window;
        scale = float(s->scale);
        soft_cap = float(s->soft_cap);
    }

    // The same split of another KV head's tile: tiles of the same queries are adjacent.
    KVSplit of_head(int64_t number) const {
        KVSplit other = *this;
        other.tile += number;
        return other;
    }

    // The token and the head of a row, among those of the step.
    int64_t token(int64_t row) const {
        return step->query_start[tile->seq] + tile->query_begin + row / group_size;
    }
    int64_t head(int64_t row) const { return tile->kv_head * group_size + row % group_size; }

    // A row sees KV tokens [first, limit) as far as there are any. Both never fall from one row to the next.
    int64_t first(int64_t row) const { return first_limit - window + row / group_size; }
    int64_t limit(int64_t row) const {
        return attend_end == nullptr ? first_limit + row / group_size : attend_end[row / group_size];
    }

    // Whether every row sees all of [from, to).
    bool all_see(int64_t from, int64_t to) const { return to <= std::min(limit(0), end) && from >= first(rows - 1); }

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

    // Calls body(number, the first rows of K and of V, tokens before them in their page) for each token
    // group from a multiple of TOKEN_GROUP up to `to`, where pages hold whole groups.
    template <class C, class Body>
    TOKEND_INLINE void each_group(int64_t from, int64_t to, Body body) const {
        const int32_t* table = step->block_table + tile->seq * step->max_blocks;
        const int64_t block_size = step->block_size, head_offset = tile->kv_head * layer->head_stride;
        int64_t page = from / block_size, offset = from % block_size;
        for (int64_t group = 0; from < to; group++, from += TOKEN_GROUP) {
            const int64_t at = table[page] * layer->block_stride + head_offset + offset * head_dim;
            body(group, static_cast<const C*>(layer->key_pages) + at, static_cast<const C*>(layer->value_pages) + at,
                 offset);
            offset += TOKEN_GROUP;
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
// the split; if not, the generic kernels run.

// many_rows_bf16.cpp: many query rows, a split of either length, and how many rows a tile of a longer
// prompt has: enough to reuse K and V many times.
int64_t tile_rows();
bool attend_in_bfloat16(const KVSplit& split, const TokendAttentionSchedule* plan, int64_t index, Scratch& scratch);

// few_rows_bf16.cpp: few query rows over pages of bfloat16, a short split; `following` is
// what to fetch ahead.
bool attend_few_in_bfloat16(const KVSplit& split, const KVSplit& following, const TokendAttentionSchedule* plan,
                            int64_t index, Scratch& scratch);

// few_rows_int8.cpp: few query rows over pages of int8, a short split of neighbouring heads.
bool attend_few_in_int8(const KVSplit& first, int64_t heads, const KVSplit& following,
                        const TokendAttentionSchedule* plan, int64_t index, Scratch& scratch);

}  // namespace tokend
