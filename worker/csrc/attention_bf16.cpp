// Attention of many query rows with products of bfloat16: by the tile unit, or by vectors.
//
// Tokens run down, query rows across, so that the softmax never sums across lanes:
//
//   scores [token, row]  = K [token, dim] . Q^T [dim, row]
//   output [dim, row]   += V^T [dim, token] . weights [token, row]
//
// V is transposed once a piece, and then the query rows pass over it 32 at a time with their
// scores, weights and outputs in the first cache.
#include "attention_bf16.h"

#include "amx.h"
#include "attention_finish.h"
#include "attention_kernels.h"

namespace tokend {

#if defined(__AVX512BF16__)
namespace {

constexpr int64_t PAIR = 2 * TILE;  // query rows that are computed together

// c [32, 32] (+)= a . b: two tiles of `a` below each other, two of `b` side by side, `steps`
// times along the inner dimension. Strides and steps in bytes; rows of c are 32 floats.
struct Product {
    const void *upper, *lower;
    int64_t stride, step;
    const uint32_t *left, *right;
    int64_t words;  // from a tile of `b` to the next
    int64_t steps;
    float* to;
    bool adds;
};

#if defined(TOKEND_AMX)

TOKEND_INLINE const char* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }

void multiply_tiles(const Product& p) {
    constexpr int64_t ROW = PAIR * sizeof(float);
    // The compiler does not know that tiles are read from memory.
    asm volatile("" ::: "memory");
    if (p.adds) {
        _tile_loadd(0, p.to, ROW);
        _tile_loadd(1, p.to + TILE, ROW);
        _tile_loadd(2, p.to + TILE * PAIR, ROW);
        _tile_loadd(3, p.to + TILE * PAIR + TILE, ROW);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
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

// All eight tiles whole, for as long as this lives.
struct Tiles {
    Tiles() {
        TileShapes shapes;
        for (int tile = 0; tile < 8; tile++) shapes.set(tile, TILE);
        shapes.load();
    }
    ~Tiles() { _tile_release(); }
};

#endif

// Eight rows of one tile of `a`.
TOKEND_INLINE void multiply_eight(const Product& p, const void* rows, float* to) {
    constexpr int ROWS = 8;
    __m512 sums[ROWS][2];
    each<ROWS>([&](auto row) {
        each<2>([&](auto v) { sums[row][v] = p.adds ? _mm512_loadu_ps(to + row * PAIR + v * 16) : _mm512_setzero_ps(); });
    });
    for (int64_t step = 0; step < p.steps; step++) {
        const char* a = static_cast<const char*>(rows) + step * p.step;
        for (int64_t word = 0; word < TILE; word++) {
            const auto left = load_bytes<__m512bh>(p.left + step * p.words + word * TILE);
            const auto right = load_bytes<__m512bh>(p.right + step * p.words + word * TILE);
            each<ROWS>([&](auto row) {
                const auto one = (__m512bh)_mm512_set1_epi32(load_bytes<int32_t>(a + row * p.stride + word * 4));
                sums[row][0] = _mm512_dpbf16_ps(sums[row][0], one, left);
                sums[row][1] = _mm512_dpbf16_ps(sums[row][1], one, right);
            });
        }
    }
    each<ROWS>([&](auto row) {
        each<2>([&](auto v) { _mm512_storeu_ps(to + row * PAIR + v * 16, sums[row][v]); });
    });
}

TOKEND_FLATTEN void multiply_vectors(const Product& p) {
    for (int64_t row = 0; row < TILE; row += 8) {
        multiply_eight(p, static_cast<const char*>(p.upper) + row * p.stride, p.to + row * PAIR);
        multiply_eight(p, static_cast<const char*>(p.lower) + row * p.stride, p.to + (TILE + row) * PAIR);
    }
}

// Query rows of one tile of the plan and what is known of them so far.
template <class C>
struct Rows {
    static constexpr int64_t CHUNKS = PIECE / CHUNK, HALF = CHUNK / 2;

    const Piece& piece;
    int64_t head_dim, width;
    void (*multiply)(const Product&);
    float log_scale;
    ColumnResults all;   // [head_dim, width]: pieces that are done
    ColumnResults part;  // [head_dim, 32]: the rows and the piece at hand
    float* limits;       // [width], position after the last KV token that a row sees
    float* scores;       // [CHUNK, 32]
    uint32_t* queries;   // tiles [width / 16][head_dim / 32]
    uint32_t* weights;   // tiles [chunk half][2]
    uint32_t* values;    // tiles [head_dim / 16][PIECE / 32]
    uint32_t* pairs;     // [16, head_dim] words, on the way to `values`
    C* clean;            // [2, head_dim]
    uint32_t* keys;      // [PIECE, head_dim / 2] words: those that do not lie in a page as needed
    const void* key_tiles[PIECE / TILE];
    float key_scales[PIECE], value_scales[PIECE];
    uint64_t broken[CHUNKS];  // tokens of which V is not finite, where not all rows see all
    int64_t start, from, to;  // the piece at hand, and what there is of it

    Rows(const Piece& p, Scratch& scratch, void (*product)(const Product&))
        : piece(p), head_dim(p.head_dim), width(round_up(p.rows, PAIR)), multiply(product) {
        const int64_t half_words = head_dim / 2;
        float* at = scratch.floats((width + PAIR) * (head_dim + 2) + width + CHUNK * PAIR + width * half_words +
                                   CHUNK * TILE + PIECE * half_words + TILE * head_dim + 2 * head_dim +
                                   PIECE * half_words);
        const auto take = [&at](int64_t size) { return std::exchange(at, at + size); };
        const auto words = [&](int64_t size) { return reinterpret_cast<uint32_t*>(take(size)); };
        all = {take(width * head_dim), take(width), take(width), width, width};
        part = {take(PAIR * head_dim), take(PAIR), take(PAIR), PAIR, PAIR};
        limits = take(width);
        scores = take(CHUNK * PAIR);
        queries = words(width * half_words);
        weights = words(CHUNK * TILE);
        values = words(PIECE * half_words);
        pairs = words(TILE * head_dim);
        clean = reinterpret_cast<C*>(take(2 * head_dim));
        keys = words(PIECE * half_words);
        log_scale = piece.scale * LOG2_E;
        all.clear(head_dim);
        for (int64_t tile = 0; tile < width / TILE; tile++) pack_queries(tile);
    }

    void compute() {
        for (from = piece.begin; from < piece.end; from = to) {
            start = from / PIECE * PIECE;
            to = next_cut(from, PIECE, piece.end);
            pack_tokens();
            for (int64_t column = 0; column < width; column += PAIR) attend(column);
        }
    }

    // Rows of one tile in the order of the dims: [TILE, head_dim].
    float* output_rows(int64_t tile) {
        float* rows = reinterpret_cast<float*>(keys);  // free by now
        for (int64_t dim = 0; dim < head_dim; dim += TILE)
            transpose(reinterpret_cast<uint32_t*>(all.output) + dim * width + tile * TILE, width,
                      reinterpret_cast<uint32_t*>(rows) + dim, head_dim);
        for (int64_t row = 0; row < TILE; row++) order_dims<C>(rows + row * head_dim, head_dim);
        return rows;
    }

  private:
    void pack_queries(int64_t tile) {
        uint32_t* rows = pairs;  // [TILE, head_dim / 2], free as yet
        float* query = scores;
        std::fill_n(rows, TILE * head_dim / 2, 0u);
        for (int64_t row = tile * TILE; row < (tile + 1) * TILE; row++) {
            limits[row] = row < piece.rows ? float(piece.limit(row)) : 0.0f;
            if (row >= piece.rows) continue;
            piece.turned_query(row, query);
            pair_query<C>(query, head_dim, rows + row % TILE * head_dim / 2);
        }
        for (int64_t step = 0; step < head_dim / INNER; step++)
            transpose(rows + step * TILE, head_dim / 2, queries + (tile * head_dim / INNER + step) * TILE_WORDS, TILE);
    }

    // K and V of the piece at hand. Tokens that it lacks are zeros.
    void pack_tokens() {
        const C *key_rows[PIECE], *value_rows[PIECE];
        std::memset(static_cast<void*>(clean), 0, 2 * head_dim * sizeof(C));
        std::fill(value_rows, value_rows + PIECE, clean);
        piece.locate(from, to, key_rows + (from - start), value_rows + (from - start));
        if constexpr (QUANTISED<C>) {
            std::fill_n(key_scales, PIECE, 0.0f);
            std::fill_n(value_scales, PIECE, 0.0f);
            piece.scales(from, to, key_scales + (from - start), value_scales + (from - start));
        }
        for (int64_t first = 0; first < PIECE; first += TILE)
            key_tiles[first / TILE] = key_tile(key_rows, first);
        for (int64_t first = 0; first < PIECE; first += INNER) pack_values(value_rows, first);
    }

    // Sixteen rows of K, `head_dim` numbers of bfloat16 each without a gap.
    const void* key_tile(const C* const* rows, int64_t first) {
        const int64_t low = std::clamp(from - start, first, first + TILE), high = std::clamp(to - start, low, first + TILE);
        if constexpr (!QUANTISED<C>) {
            bool whole = high - low == TILE;
            for (int64_t token = low; token + 1 < high; token++) whole &= rows[token + 1] == rows[token] + head_dim;
            if (whole) return rows[low];
        }
        // What is outside is read, but hidden.
        for (int64_t token = low; token < high; token++)
            pair_dims(rows[token], head_dim, keys + token * head_dim / 2);
        return keys + first * head_dim / 2;
    }

    void pack_values(const C* const* rows, int64_t first) {
        const int64_t chunk = start + first / CHUNK * CHUNK;
        if (chunk + CHUNK <= from || start + first >= to) return;
        uint64_t& odd = broken[first / CHUNK];
        if (first % CHUNK == 0) odd = 0;
        const bool mends = !QUANTISED<C> && !piece.all_see(chunk, chunk + CHUNK);
        for (int64_t token = first; token < first + INNER; token += 2) {
            const C *a = rows[token], *b = rows[token + 1];
            if constexpr (!QUANTISED<C>) {
                if (mends) {
                    // Zero times NaN is NaN: it must not reach rows that do not see the token.
                    odd |= uint64_t(is_broken(a, head_dim, clean)) << token % CHUNK;
                    odd |= uint64_t(is_broken(b, head_dim, clean + head_dim)) << (token + 1) % CHUNK;
                    a = clean;
                    b = clean + head_dim;
                }
            }
            pair_tokens(a, b, head_dim, pairs + (token - first) / 2 * head_dim);
        }
        if (mends) std::memset(static_cast<void*>(clean), 0, 2 * head_dim * sizeof(C));
        for (int64_t dim = 0; dim < head_dim; dim += TILE)
            transpose(pairs + dim, head_dim, values + (dim / TILE * (PIECE / INNER) + first / INNER) * TILE_WORDS, TILE);
    }

    // 32 rows over the piece at hand.
    void attend(int64_t column) {
        const int64_t last = std::min(piece.rows, column + PAIR) - 1;
        const int64_t end = std::min(to, piece.limit(last));
        const int64_t begin = std::max(from, piece.limit(column) - piece.window);
        if (begin >= end) return;
        part.clear(head_dim);
        for (int64_t chunk = begin / CHUNK * CHUNK; chunk < end; chunk += CHUNK) {
            const int64_t halves = chunk + HALF < end ? 2 : 1;
            const bool all_seen = chunk + CHUNK <= std::min(piece.limit(column), to) &&
                                  chunk >= std::max(piece.limit(last) - piece.window, from);
            multiply_keys(column, chunk, halves);
            if constexpr (QUANTISED<C>) scale_scores(chunk, halves);
            if (piece.soft_cap > 0.0f) cap(halves);
            for (int64_t tile = 0; tile < 2; tile++) {
                const F<16> limit = load<16>(limits + column + tile * TILE) - float(chunk);
                if (!all_seen) hide(tile, limit, halves);
                if (halves == 2) weigh<2>(tile, chunk);
                else weigh<1>(tile, chunk);
                if (!all_seen && !QUANTISED<C>) spoil(tile, limit, broken[(chunk - start) / CHUNK]);
            }
            multiply_values(chunk, halves);
        }
        const ColumnResults columns = {all.output + column, all.best + column, all.total + column, PAIR, width};
        columns.fold(part, head_dim, piece.scale);
    }

    void multiply_keys(int64_t column, int64_t chunk, int64_t halves) {
        const int64_t steps = head_dim / INNER;
        const uint32_t* query = queries + column / TILE * steps * TILE_WORDS;
        for (int64_t half = 0; half < halves; half++) {
            const void* const* rows = key_tiles + (chunk - start) / TILE + half * 2;
            multiply({rows[0], rows[1], head_dim * 2, INNER * 2, query, query + steps * TILE_WORDS, TILE_WORDS, steps,
                      scores + half * HALF * PAIR, false});
        }
    }

    void multiply_values(int64_t chunk, int64_t halves) {
        constexpr int64_t ROW = PIECE / INNER * TILE_WORDS;
        const uint32_t* tiles = values + (chunk - start) / INNER * TILE_WORDS;
        for (int64_t dim = 0; dim < head_dim; dim += 2 * TILE) {
            const uint32_t* upper = tiles + dim / TILE * ROW;
            multiply({upper, upper + ROW, 64, TILE_WORDS * 4, weights, weights + TILE_WORDS, 2 * TILE_WORDS, halves,
                      part.output + dim * PAIR, true});
        }
    }

    void scale_scores(int64_t chunk, int64_t halves) {
        const float* scales = key_scales + (chunk - start);
        for (int64_t token = 0; token < halves * HALF; token++)
            for (float* at = scores + token * PAIR; at < scores + (token + 1) * PAIR; at += 16)
                store<16>(at, load<16>(at) * scales[token]);
    }

    void cap(int64_t halves) {
        for (float* at = scores; at < scores + halves * HALF * PAIR; at += 16)
            store<16>(at, capped<16>(load<16>(at), piece.scale, piece.soft_cap));
    }

    // A row sees tokens [limit - window, limit) of the chunk.
    void hide(int64_t tile, F<16> limit, int64_t halves) {
        const F<16> first = limit - float(piece.window), none = splat<16>(NO_SCORE);
        for (int64_t token = 0; token < halves * HALF; token++) {
            float* at = scores + token * PAIR + tile * TILE;
            const F<16> score = first > float(token) ? none : load<16>(at);
            store<16>(at, limit > float(token) ? score : none);
        }
    }

    // Those who see a token of which V is not finite.
    void spoil(int64_t tile, F<16> limit, uint64_t tokens) {
        const F<16> first = limit - float(piece.window);
        for (; tokens != 0; tokens &= tokens - 1) {
            const float token = float(__builtin_ctzll(tokens));
            float* at = part.total + tile * TILE;
            const F<16> total = load<16>(at), seen = limit > token ? splat<16>(NAN) : total;
            store<16>(at, first > token ? total : seen);
        }
    }

    // Online softmax of 16 rows over a chunk: scores become weights. Sums go down lanes of 16
    // tokens first and then in pairs, as attention_tiles.cpp sums a row.
    template <int HALVES>
    TOKEND_FLATTEN void weigh(int64_t tile, int64_t chunk) {
        const float *at = scores + tile * TILE, *scales = value_scales + (chunk - start);
        const F<16> before = load<16>(part.best + tile * TILE);
        F<16> most[4];
        each<4>([&](auto i) { most[i] = before; });
        for (int64_t token = 0; token < HALVES * HALF; token += 4)
            each<4>([&](auto i) { most[i] = larger(most[i], load<16>(at + (token + i) * PAIR)); });
        const F<16> largest = larger(larger(most[0], most[1]), larger(most[2], most[3]));
        const Weigher weight(before, largest, log_scale);
        F<16> sums[8];
        each<8>([&](auto word) {
            F<16> even, odd;
            each<2 * HALVES>([&](auto part_of) {
                constexpr int token = part_of * 16 + word * 2;
                F<16> a = weight(load<16>(at + token * PAIR)), b = weight(load<16>(at + (token + 1) * PAIR));
                if constexpr (part_of == 0) {
                    even = a;
                    odd = b;
                } else {
                    even += a;
                    odd += b;
                }
                if constexpr (QUANTISED<C>) {
                    a = scaled(a, scales[token]);
                    b = scaled(b, scales[token + 1]);
                }
                uint32_t* words = weights + (part_of / 2 * 2 + tile) * TILE_WORDS + (part_of % 2 * 8 + word) * TILE;
                _mm512_storeu_si512(words, pair_rounded((__m512)a, (__m512)b));
            });
            sums[word] = even + odd;
        });
        const F<16> sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        float* total = part.total + tile * TILE;
        store<16>(total, multiply_add<16>(load<16>(total), weight.rescale, sum));
        store<16>(part.best + tile * TILE, largest);
        if (min_lanes<16>(weight.rescale) == 1.0f) return;
        for (float* out = part.output + tile * TILE; out < part.output + head_dim * PAIR; out += PAIR)
            store<16>(out, load<16>(out) * weight.rescale);
    }

    // A weight of zero takes nothing of a scale that is no number.
    static TOKEND_INLINE F<16> scaled(F<16> weight, float scale) {
        return weight == F<16>{} ? F<16>{} : weight * scale;
    }
};

template <class C>
void attend(const Piece& piece, const TokendPlan* plan, int64_t index, Scratch& scratch,
            void (*multiply)(const Product&)) {
    Rows<C> rows(piece, scratch, multiply);
    rows.compute();
    for (int64_t tile = 0; tile * TILE < piece.rows; tile++) {
        float* output = rows.output_rows(tile);
        const int64_t begin = tile * TILE, end = std::min(piece.rows, begin + TILE);
        for (int64_t row = begin; row < end; row++)
            leave_row(piece, plan, index, row,
                      {output + (row - begin) * piece.head_dim, rows.all.best[row], rows.all.total[row]});
    }
}

}  // namespace

bool attend_in_bfloat16(const Piece& piece, const TokendPlan* plan, int64_t index, Scratch& scratch) {
    if (!suits_bfloat16(piece.layer, piece.head_dim)) return false;
    const auto attend_all = piece.layer->cache_dtype == TOKEND_INT8 ? attend<int8_t> : attend<bfloat16>;
#if defined(TOKEND_AMX)
    if (tiles_allowed()) {
        const Tiles tiles;
        attend_all(piece, plan, index, scratch, multiply_tiles);
        return true;
    }
#endif
    attend_all(piece, plan, index, scratch, multiply_vectors);
    return true;
}

#else

bool attend_in_bfloat16(const Piece&, const TokendPlan*, int64_t, Scratch&) { return false; }

#endif

}  // namespace tokend
