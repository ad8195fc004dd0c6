// What both ways to compute attention share: where a piece's rows and tokens lie.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention.h"
#include "simd.h"

namespace tokend {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// KV tokens that are scored before their weights are applied.
constexpr int CHUNK = 64;
constexpr float NO_SCORE = -std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// One piece of a tile, resolved from the plan.
template <class T>
struct Piece {
    const TokendStep* step;
    const TokendLayer* layer;
    const TokendTile* tile;
    int64_t group;
    int64_t rows;
    int64_t head_dim;
    int64_t begin, end;   // KV tokens
    int64_t first_limit;  // position after the tile's first query
    int64_t window;       // tokens that a query sees at most
    float scale;

    Piece(const TokendStep* s, const TokendLayer* l, const TokendTile* t, int64_t index)
        : step(s), layer(l), tile(t) {
        group = s->num_heads / s->num_kv_heads;
        rows = t->query_count * group;
        head_dim = s->head_dim;
        begin = t->kv_begin + index * t->piece_len;
        end = std::min<int64_t>(begin + t->piece_len, t->kv_end);
        first_limit = t->kv_end - t->query_count + 1;
        window = s->window;
        scale = float(s->scale);
    }

    // A row sees KV tokens [limit - window, limit).
    int64_t limit(int64_t row) const { return first_limit + row / group; }

    // Whether every row sees all of [from, to).
    bool all_see(int64_t from, int64_t to) const { return to <= first_limit && from >= limit(rows - 1) - window; }

    const T* query(int64_t row) const {
        return static_cast<const T*>(layer->query) + token(row) * layer->query_stride + head(row) * head_dim;
    }

    T* output(int64_t row) const {
        return static_cast<T*>(layer->output) + (token(row) * step->num_heads + head(row)) * head_dim;
    }

    // Rows of K and V of tokens [from, to).
    void locate(int64_t from, int64_t to, const T** keys, const T** values) const {
        const int32_t* table = step->block_table + tile->seq * step->max_blocks;
        const int64_t head_offset = tile->kv_head * layer->head_stride;
        const T* key_pages = static_cast<const T*>(layer->key_pages) + head_offset;
        const T* value_pages = static_cast<const T*>(layer->value_pages) + head_offset;
        int64_t page = from / step->block_size, offset = from % step->block_size;
        for (int64_t token = from; token < to; page++, offset = 0) {
            const int64_t run = std::min(step->block_size - offset, to - token);
            const int64_t start = table[page] * layer->block_stride + offset * head_dim;
            for (int64_t i = 0; i < run; i++) {
                *keys++ = key_pages + start + i * head_dim;
                *values++ = value_pages + start + i * head_dim;
            }
            token += run;
        }
    }

  private:
    int64_t token(int64_t row) const {
        return step->query_start[tile->seq] + tile->query_begin + row / group;
    }
    int64_t head(int64_t row) const { return tile->kv_head * group + row % group; }
};

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

}  // namespace tokend
