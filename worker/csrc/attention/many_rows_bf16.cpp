// Attention of many query rows with products of bfloat16: by the tile unit, or by instructions that
// multiply a vector of pairs.
//
// Tokens are rows, query rows are columns, so that the softmax never sums across lanes:
//
//   scores [token, row]  = K [token, dim] . Q^T [dim, row]
//   output [dim, row]   += V^T [dim, token] . weights [token, row]
//
// V is transposed once per short split, and then used for the query rows, 32 at a time.
#include "attention/bf16_pairs.h"
#include "attention/kv_split.h"
#include "common/amx.h"

namespace tokend {

#if defined(__AVX512BF16__)
namespace {

constexpr int64_t PAIR = 2 * TILE;  // query rows that are computed together

// c [32, 32] = a . b: two tiles of `a` below each other, two of `b` side by side, `steps`
// times along the inner dimension. Strides and steps in bytes; rows of c are 32 floats.
struct Product {
    const void *upper, *lower;
    int64_t stride, step;
    const uint32_t *left, *right;
    int64_t words;  // from a tile of `b` to the next
    int64_t steps;
    float* to;
};

TOKEND_INLINE const char* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }

// The product without a tile unit: eight rows of `a` at a time, a word of each against 32 columns.
TOKEND_FLATTEN void multiply_vectors(const Product& p) {
    for (int64_t row = 0; row < PAIR; row += 8) {
        const char* rows = at(row < TILE ? p.upper : p.lower, row % TILE * p.stride);
        __m512 sums[8][2];
        each<8>([&](auto r) { sums[r][0] = sums[r][1] = _mm512_setzero_ps(); });
        for (int64_t step = 0; step < p.steps; step++) {
            const char* words = at(rows, step * p.step);
            const uint32_t *left = p.left + step * p.words, *right = p.right + step * p.words;
            for (int64_t word = 0; word < TILE; word++) {
                const auto b = load_bytes<__m512bh>(left + word * TILE), c = load_bytes<__m512bh>(right + word * TILE);
                each<8>([&](auto r) {
                    const __m512bh a = broadcast_pair(at(words, r * p.stride + word * 4));
                    sums[r][0] = _mm512_dpbf16_ps(sums[r][0], a, b);
                    sums[r][1] = _mm512_dpbf16_ps(sums[r][1], a, c);
                });
            }
        }
        each<8>([&](auto r) {
            _mm512_storeu_ps(p.to + (row + r) * PAIR, sums[r][0]);
            _mm512_storeu_ps(p.to + (row + r) * PAIR + TILE, sums[r][1]);
        });
    }
}

#if defined(TOKEND_AMX)

void multiply(const Product& p) {
    if (!tiles_allowed()) return multiply_vectors(p);
    constexpr int64_t ROW = PAIR * sizeof(float);
    // The compiler does not know that tiles are read from memory.
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < p.steps; step++) {
        _tile_loadd(4, at(p.upper, step * p.step), p.stride);
        _tile_loadd(6, p.left + step * p.words, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, p.right + step * p.words, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, at(p.lower, step * p.step), p.stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, p.to, ROW);
    _tile_stored(1, p.to + TILE, ROW);
    _tile_stored(2, p.to + TILE * PAIR, ROW);
    _tile_stored(3, p.to + TILE * PAIR + TILE, ROW);
    asm volatile("" ::: "memory");
}

// Configures all eight tiles with full size for the lifetime of this object.
struct ManyRowsTiles {
    ManyRowsTiles() {
        if (!tiles_allowed()) return;
        TileShapes shapes;
        for (int tile = 0; tile < 8; tile++) shapes.set(tile, TILE);
        shapes.load();
    }
    ~ManyRowsTiles() {
        if (tiles_allowed()) _tile_release();
    }
};

#else

void multiply(const Product& p) { multiply_vectors(p); }

#endif

// Query rows of one tile of the plan and their intermediate results.
template <class C>
struct ManyRowsBf16 {
    static constexpr int64_t STEPS = SHORT_SPLIT / INNER;

    const KVSplit& split;
    int64_t head_dim, width;
    int64_t parts, part_dims;  // of a row, with a scale each
    float log_scale;
    ColumnResults all;   // [head_dim, width]: short splits that are done
    ColumnResults part;  // [head_dim, 32]: the current rows and short split
    float* firsts;       // [width], position of the first KV token that a row sees
    float* limits;       // [width], position after the last one
    float* scores;       // [SHORT_SPLIT, 32]
    float* part_scores;  // [SHORT_SPLIT, 32], of a part of the dims with a scale of its own
    uint32_t* queries;   // tiles [width / 16][head_dim / 32]
    uint32_t* weights;   // tiles [parts][STEPS][2]
    uint32_t* values;    // tiles [head_dim / 16][STEPS]
    uint32_t* pairs;     // [16, head_dim] words, on the way to `values`
    uint32_t* keys;      // [SHORT_SPLIT, head_dim / 2] words: int8 ones in the form of tiles
    C* clean;            // [2, head_dim]
    C* copy;
    const void* key_tiles[SHORT_SPLIT / TILE];
    TokenGroups<C> groups;  // the current short split
    NonfiniteTokens nonfinite;  // by V, if not all rows see all tokens

    ManyRowsBf16(const KVSplit& p, Scratch& scratch) : split(p), head_dim(p.head_dim), width(round_up(p.rows, PAIR)) {
        parts = QUANTISED<C> ? num_scales(head_dim) : 1;
        part_dims = head_dim / parts;
        const int64_t half_words = head_dim / 2, copied = TokenGroups<C>::copy_size(head_dim) * sizeof(C) / 4;
        float* at = scratch.floats((width + PAIR) * (head_dim + 2) + 2 * width + 2 * SHORT_SPLIT * PAIR +
                                   width * half_words + parts * SHORT_SPLIT * TILE + SHORT_SPLIT * half_words +
                                   TILE * head_dim + SHORT_SPLIT * half_words + 2 * head_dim + copied);
        const auto take = [&at](int64_t size) { return std::exchange(at, at + size); };
        const auto words = [&](int64_t size) { return reinterpret_cast<uint32_t*>(take(size)); };
        all = {take(width * head_dim), take(width), take(width), width, width};
        part = {take(PAIR * head_dim), take(PAIR), take(PAIR), PAIR, PAIR};
        firsts = take(width);
        limits = take(width);
        scores = take(SHORT_SPLIT * PAIR);
        part_scores = take(SHORT_SPLIT * PAIR);
        queries = words(width * half_words);
        weights = words(parts * SHORT_SPLIT * TILE);
        values = words(SHORT_SPLIT * half_words);
        pairs = words(TILE * head_dim);
        keys = words(SHORT_SPLIT * half_words);
        clean = reinterpret_cast<C*>(take(2 * head_dim));
        copy = reinterpret_cast<C*>(take(copied));
        log_scale = split.scale * LOG2_E;
        all.clear(head_dim);
        for (int64_t tile = 0; tile < width / TILE; tile++) pack_queries(tile);
    }

    void compute() {
#if defined(TOKEND_AMX)
        const ManyRowsTiles tiles;
#endif
        for (int64_t from = split.begin, to; from < split.end; from = to) {
            to = next_cut(from, SHORT_SPLIT, split.end);
            pack_tokens(from, to);
            for (int64_t column = 0; column < width; column += PAIR) attend(column);
        }
    }

    // Rows of one tile in the order of the dims: [TILE, head_dim].
    float* output_rows(int64_t tile) {
        float* rows = reinterpret_cast<float*>(pairs);  // unused by now
        for (int64_t dim = 0; dim < head_dim; dim += TILE)
            transpose(reinterpret_cast<uint32_t*>(all.output) + dim * width + tile * TILE, width, pairs + dim, head_dim);
        for (int64_t row = 0; row < TILE; row++) order_dims<C>(rows + row * head_dim, head_dim);
        return rows;
    }

  private:
    void pack_queries(int64_t tile) {
        uint32_t* rows = pairs;  // [TILE, head_dim / 2], still unused
        for (int64_t row = tile * TILE; row < (tile + 1) * TILE; row++) {
            uint32_t* words = rows + row % TILE * head_dim / 2;
            firsts[row] = row < split.rows ? float(split.first(row)) : 0.0f;
            limits[row] = row < split.rows ? float(split.limit(row)) : 0.0f;
            if (row < split.rows) pair_query<C>(split, row, words);
            else std::fill_n(words, head_dim / 2, 0u);
        }
        for (int64_t step = 0; step < head_dim / INNER; step++)
            transpose(rows + step * TILE, head_dim / 2, queries + (tile * head_dim / INNER + step) * TILE_WORDS, TILE);
    }

    void pack_tokens(int64_t from, int64_t to) {
        groups.locate(split, from, to, copy);
        nonfinite = {};
        for (int64_t step = groups.first_step(); step < groups.end_step(); step++) {
            for (int64_t tile = step * 2; tile < step * 2 + 2; tile++)
                key_tiles[tile] = key_tile(groups.keys[tile], head_dim, keys + tile * TILE * head_dim / 2);
            const int64_t token = groups.start + step * INNER;
            const bool zero_nonfinite = !split.all_see(token, token + INNER);
            pack_values(groups, step, head_dim, 0, head_dim, zero_nonfinite, nonfinite, clean, pairs, [](int64_t) {});
            for (int64_t dim = 0; dim < head_dim; dim += TILE)
                transpose(pairs + dim, head_dim, values + (dim / TILE * STEPS + step) * TILE_WORDS, TILE);
        }
    }

    // 32 rows over the current short split.
    void attend(int64_t column) {
        const int64_t last = std::min(split.rows, column + PAIR) - 1, start = groups.start;
        // The tokens that any row sees, and those that all rows see.
        const int64_t begin = std::max(groups.from, split.first(column));
        const int64_t end = std::min(groups.to, split.limit(last));
        if (begin >= end) return;
        const int64_t all_from = std::max(begin, split.first(last));
        const int64_t all_to = std::min(end, split.limit(column));
        const int64_t first = (begin - start) / INNER, steps = (end - start + INNER - 1) / INNER - first;
        multiply_keys(column, 0, first, steps, scores);
        if constexpr (QUANTISED<C>) {
            scale_scores(first, steps);
            for (int64_t part = 1; part < parts; part++) add_scores(column, part, first, steps);
        }
        if (split.soft_cap > 0.0f) cap(first, steps);
        for (int64_t tile = 0; tile < 2; tile++) {
            const F<16> from = load<16>(firsts + column + tile * TILE) - float(start);
            const F<16> to = seen_by(load<16>(limits + column + tile * TILE) - float(start));
            hide(tile, from, to, first * INNER, std::min(all_from, end) - start);
            hide(tile, from, to, std::max(all_to, begin) - start, (first + steps) * INNER);
            weigh(tile, first, steps);
            if (nonfinite.any()) set_nan(tile, from, to);
        }
        multiply_values(first, steps);
        const ColumnResults columns = {all.output + column, all.best + column, all.total + column, PAIR, width};
        columns.fold(part, head_dim, split.scale);
    }

    // Scores over the dims of a part.
    void multiply_keys(int64_t column, int64_t part, int64_t first, int64_t steps, float* to) {
        const int64_t inner = head_dim / INNER, part_inner = part_dims / INNER, offset = part * part_dims * 2;
        const uint32_t* query = queries + (column / TILE * inner + part * part_inner) * TILE_WORDS;
        for (int64_t step = first; step < first + steps; step++)
            multiply({at(key_tiles[step * 2], offset), at(key_tiles[step * 2 + 1], offset), head_dim * 2, INNER * 2,
                      query, query + inner * TILE_WORDS, TILE_WORDS, part_inner, to + step * INNER * PAIR});
    }

    void multiply_values(int64_t first, int64_t steps) {
        for (int64_t dim = 0; dim < head_dim; dim += 2 * TILE) {
            const uint32_t* weight = weights + (dim / part_dims * SHORT_SPLIT + first * INNER) * TILE;
            const uint32_t* upper = values + (dim / TILE * STEPS + first) * TILE_WORDS;
            multiply({upper, upper + STEPS * TILE_WORDS, 64, TILE_WORDS * 4, weight, weight + TILE_WORDS,
                      2 * TILE_WORDS, steps, part.output + dim * PAIR});
        }
    }

    void scale_scores(int64_t first, int64_t steps) {
        for (int64_t token = first * INNER; token < (first + steps) * INNER; token++)
            for (float* at = scores + token * PAIR; at < scores + (token + 1) * PAIR; at += 16)
                store<16>(at, load<16>(at) * groups.key_scales[token]);
    }

    // Adds the scores of another part of the dims.
    void add_scores(int64_t column, int64_t part, int64_t first, int64_t steps) {
        multiply_keys(column, part, first, steps, part_scores);
        for (int64_t token = first * INNER; token < (first + steps) * INNER; token++) {
            const F<16> scale = splat<16>(groups.key_scales[part * SHORT_SPLIT + token]);
            for (int64_t at = token * PAIR; at < (token + 1) * PAIR; at += 16)
                store<16>(scores + at, multiply_add<16>(load<16>(part_scores + at), scale, load<16>(scores + at)));
        }
    }

    void cap(int64_t first, int64_t steps) {
        for (float* at = scores + first * INNER * PAIR; at < scores + (first + steps) * INNER * PAIR; at += 16)
            store<16>(at, capped<16>(load<16>(at), split.scale, split.soft_cap));
    }

    // Where a row sees no further token: its limit, or the end of the short split.
    F<16> seen_by(F<16> limit) const {
        const F<16> end = splat<16>(float(groups.to - groups.start));
        return limit < end ? limit : end;
    }

    // Of tokens [from, to) of the short split, a row sees [first, seen).
    void hide(int64_t tile, F<16> first, F<16> seen, int64_t from, int64_t to) {
        const F<16> none = splat<16>(NO_SCORE);
        for (int64_t token = from; token < to; token++) {
            float* at = scores + token * PAIR + tile * TILE;
            const F<16> score = first > float(token) ? none : load<16>(at);
            store<16>(at, seen > float(token) ? score : none);
        }
    }

    // Rows that see a token with nonfinite V become NaN.
    void set_nan(int64_t tile, F<16> first, F<16> end) {
        float* at = part.total + tile * TILE;
        for (int64_t token = 0; token < SHORT_SPLIT; token++) {
            if (!nonfinite.has(token)) continue;
            const F<16> total = load<16>(at), seen = end > float(token) ? splat<16>(NAN) : total;
            store<16>(at, first > float(token) ? total : seen);
        }
    }

    // Softmax of 16 rows over the short split: scores become weights. Every sixteenth token is summed
    // first and then neighbours, in the order of few_rows_bf16.cpp.
    TOKEND_FLATTEN void weigh(int64_t tile, int64_t first, int64_t steps) {
        const int64_t end = (first + steps) * INNER;
        const float *column = scores + tile * TILE, *scales = groups.value_scales;
        F<16> most[4];
        each<4>([&](auto i) { most[i] = splat<16>(NO_SCORE); });
        for (int64_t token = first * INNER; token < end; token += 4)
            each<4>([&](auto i) { most[i] = larger(most[i], load<16>(column + (token + i) * PAIR)); });
        const F<16> largest = larger(larger(most[0], most[1]), larger(most[2], most[3]));
        const Weigher weight(largest, log_scale);
        F<16> sums[8];
        for (int64_t word = 0; word < 8; word++) {
            F<16> even = {}, odd = {};
            for (int64_t token = first * INNER + word * 2; token < end; token += TILE) {
                const F<16> a = weight(load<16>(column + token * PAIR)), b = weight(load<16>(column + (token + 1) * PAIR));
                even += a;
                odd += b;
                uint32_t* to = weights + (token / INNER * 2 + tile) * TILE_WORDS + token % INNER / 2 * TILE;
                if constexpr (QUANTISED<C>) {
                    for (int64_t part = 0; part < parts; part++, to += SHORT_SPLIT * TILE) {
                        const float* scale = scales + part * SHORT_SPLIT + token;
                        const F<16> c = scaled(a, splat<16>(scale[0])), d = scaled(b, splat<16>(scale[1]));
                        _mm512_storeu_si512(to, pair_rounded((__m512)c, (__m512)d));
                    }
                } else {
                    _mm512_storeu_si512(to, pair_rounded((__m512)a, (__m512)b));
                }
            }
            sums[word] = even + odd;
        }
        const F<16> sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        store<16>(part.total + tile * TILE, sum);
        store<16>(part.best + tile * TILE, largest);
    }
};

template <class C>
void attend(const KVSplit& split, const TokendAttentionSchedule* plan, int64_t index, Scratch& scratch) {
    ManyRowsBf16<C> rows(split, scratch);
    rows.compute();
    for (int64_t tile = 0; tile * TILE < split.rows; tile++) {
        float* output = rows.output_rows(tile);
        const int64_t begin = tile * TILE, end = std::min(split.rows, begin + TILE);
        for (int64_t row = begin; row < end; row++)
            write_bfloat16_result(split, plan, index, row,
                                  {output + (row - begin) * split.head_dim, rows.all.best[row], rows.all.total[row]});
    }
}

}  // namespace

bool attend_in_bfloat16(const KVSplit& split, const TokendAttentionSchedule* plan, int64_t index, Scratch& scratch) {
    if (!suits_bfloat16(split)) return false;
    if (split.layer->cache_dtype == TOKEND_INT8) attend<int8_t>(split, plan, index, scratch);
    else attend<bfloat16>(split, plan, index, scratch);
    return true;
}

int64_t tile_rows() { return 192; }

#else

bool attend_in_bfloat16(const KVSplit&, const TokendAttentionSchedule*, int64_t, Scratch&) { return false; }

int64_t tile_rows() { return 96; }

#endif

}  // namespace tokend
