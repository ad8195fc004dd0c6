// Attention of up to 16 query rows over a piece of bfloat16 pages with the tile unit: a decode.
//
// Reading K and V is the limit, so the arithmetic must be cheap: a tile of 16 rows of K is
// multiplied in place, and V takes one instruction for two rows.
//
//   scores [token, row]  = K [token, dim] . Q^T [dim, row]
//   output [row, dim]   += weights [row, token] . V [token, dim]
//
// The sums equal those of many_rows_amx.cpp bit by bit: a row has the same result in a decode and
// in any chunk of a prompt.
#include "attention/amx_tiles.h"
#include "attention/piece.h"
#include "common/amx.h"

namespace tokend {

#if defined(__AVX512BF16__) && defined(TOKEND_AMX)
namespace {

// Transposes four columns of 16 rows to four rows.
TOKEND_INLINE void turn_four(const float* from, int64_t stride, float* to) {
    __m512 fours[4];
    each<4>([&](auto i) {
        __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(from + i * stride));
        four = _mm512_insertf32x4(four, _mm_loadu_ps(from + (i + 4) * stride), 1);
        four = _mm512_insertf32x4(four, _mm_loadu_ps(from + (i + 8) * stride), 2);
        fours[i] = _mm512_insertf32x4(four, _mm_loadu_ps(from + (i + 12) * stride), 3);
    });
    const auto ab = (__m512d)_mm512_unpacklo_ps(fours[0], fours[1]), AB = (__m512d)_mm512_unpackhi_ps(fours[0], fours[1]);
    const auto cd = (__m512d)_mm512_unpacklo_ps(fours[2], fours[3]), CD = (__m512d)_mm512_unpackhi_ps(fours[2], fours[3]);
    _mm512_storeu_ps(to, (__m512)_mm512_unpacklo_pd(ab, cd));
    _mm512_storeu_ps(to + PIECE, (__m512)_mm512_unpackhi_pd(ab, cd));
    _mm512_storeu_ps(to + 2 * PIECE, (__m512)_mm512_unpacklo_pd(AB, CD));
    _mm512_storeu_ps(to + 3 * PIECE, (__m512)_mm512_unpackhi_pd(AB, CD));
}

// Adds neighbours first, in the order of the column sums of many_rows_amx.cpp.
TOKEND_INLINE float sum_pairs(F<16> v) {
    __m512 sum = (__m512)v;
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
    sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1));
    return _mm512_cvtss_f32(_mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4e)));
}

// Rows of a tile of the plan over one piece.
struct FewRows {
    const Piece& piece;
    const int64_t head_dim, rows;
    Groups<bfloat16> groups;
    Ahead ahead;
    int64_t begin, end;  // the computed tokens, in whole tiles
    float best[TILE], total[TILE];

    FewRows(const Piece& p, const Piece& following, bfloat16* copy)
        : piece(p), head_dim(p.head_dim), rows(p.rows), ahead(p, following) {
        groups.locate(piece, piece.begin, piece.end, copy);
        begin = (groups.from - groups.start) / INNER * INNER;
        end = round_up(groups.to - groups.start, INNER);
    }

    // A row sees tokens [first_seen, end_seen) of the piece.
    int64_t first_seen(int64_t row) const {
        return std::max(groups.from, piece.limit(row) - piece.window) - groups.start;
    }
    int64_t end_seen(int64_t row) const { return std::min(groups.to, piece.limit(row)) - groups.start; }

    void cap(float* scores) const {
        if (piece.soft_cap <= 0.0f) return;
        for (float* at = scores + begin; at < scores + end; at += 16)
            store<16>(at, capped<16>(load<16>(at), piece.scale, piece.soft_cap));
    }

    // Softmax of a row over the piece; take(token, weights of 16 tokens, of the next 16).
    TOKEND_INLINE void weigh(int64_t row, float* scores, auto take) {
        for (int64_t token = begin; token < std::min(first_seen(row), end); token++) scores[token] = NO_SCORE;
        for (int64_t token = std::max(end_seen(row), begin); token < end; token++) scores[token] = NO_SCORE;
        F<16> most = splat<16>(NO_SCORE);
        for (int64_t token = begin; token < end; token += 16) most = larger(most, load<16>(scores + token));
        best[row] = _mm512_reduce_max_ps((__m512)most);
        const Weigher weight(splat<16>(best[row]), piece.scale * LOG2_E);
        F<16> sum = {};
        for (int64_t token = begin; token < end; token += INNER) {
            const F<16> low = weight(load<16>(scores + token)), high = weight(load<16>(scores + token + 16));
            sum += low;
            sum += high;
            take(token, low, high);
        }
        total[row] = sum_pairs(sum);
    }
};

// Tiles 0 1: scores; 2: queries; 3 4: K.   0 1 2 3: output; 4: weights; 5 6: V.
struct Tiles {
    TileShapes keys, values;

    Tiles(int64_t rows, int64_t columns) {
        for (int tile : {0, 1, 2}) keys.set(tile, TILE, int(columns) * 4);
        for (int tile : {3, 4}) keys.set(tile, TILE);
        for (int tile : {0, 1, 2, 3, 4}) values.set(tile, int(rows));
        for (int tile : {5, 6}) values.set(tile, TILE);
    }
    ~Tiles() { _tile_release(); }
};

constexpr int64_t DIMS = 64;  // of V that one pass takes
constexpr int64_t ROW_WORDS = PIECE / 2;

// Memory of one piece, part of the thread's.
struct Memory {
    uint32_t* queries;  // tiles [head_dim / 32]
    uint32_t* values;   // [2, TILE, 64] words: two steps of tokens
    bfloat16* clean;    // [2, 64]
    bfloat16* copy;     // of the groups
    float* products;    // [PIECE, columns]
    float* scores;      // [columns, PIECE]
    uint32_t* weights;  // [rows, ROW_WORDS]
    float* output;      // [rows, head_dim], in the order of the products

    Memory(Scratch& scratch, int64_t head_dim) {
        const int64_t copied = Groups<bfloat16>::copy_size(head_dim) / 2;
        float* at = scratch.floats(TILE * head_dim * 3 / 2 + 2 * TILE * DIMS + DIMS + copied + 2 * PIECE * TILE +
                                   TILE * ROW_WORDS);
        const auto take = [&at](int64_t size) { return std::exchange(at, at + size); };
        queries = reinterpret_cast<uint32_t*>(take(TILE * head_dim / 2));
        values = reinterpret_cast<uint32_t*>(take(2 * TILE * DIMS));
        clean = reinterpret_cast<bfloat16*>(take(DIMS));
        copy = reinterpret_cast<bfloat16*>(take(copied));
        products = take(PIECE * TILE);
        scores = take(PIECE * TILE);
        weights = reinterpret_cast<uint32_t*>(take(TILE * ROW_WORDS));
        output = take(TILE * head_dim);
    }
};

struct Rows : Memory, FewRows {
    int64_t columns;  // rows in whole fours
    NonfiniteTokens nonfinite;

    Rows(const Piece& p, const Piece& following, Scratch& scratch)
        : Memory(scratch, p.head_dim), FewRows(p, following, copy), columns(round_up(p.rows, 4)) {
        pack_queries();
    }

    void compute() {
        const Tiles tiles(rows, columns);
        tiles.keys.load();
        multiply_keys();
        for (int64_t token = begin; token < end; token += TILE) {
            ahead.fetch(head_dim / 16);
            for (int64_t row = 0; row < rows; row += 4)
                turn_four(products + token * columns + row, columns, scores + row * PIECE + token);
        }
        for (int64_t row = 0; row < rows; row++) {
            cap(scores + row * PIECE);
            weigh(row, scores + row * PIECE, [&](int64_t token, F<16> low, F<16> high) {
                const auto words = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
                _mm512_storeu_si512(weights + row * ROW_WORDS + token / 2, words);
            });
        }
        tiles.values.load();
        for (int64_t dim = 0; dim < head_dim; dim += DIMS) multiply_values(dim, std::min(DIMS, head_dim - dim));
        if (nonfinite.any()) set_nan();
    }

  private:
    void pack_queries() {
        uint32_t* pairs = reinterpret_cast<uint32_t*>(products);  // [TILE, head_dim / 2], unused
        std::fill_n(pairs, TILE * head_dim / 2, 0u);
        for (int64_t row = 0; row < rows; row++) pair_query<bfloat16>(piece, row, pairs + row * head_dim / 2);
        for (int64_t step = 0; step < head_dim / INNER; step++)
            transpose(pairs + step * TILE, head_dim / 2, queries + step * TILE_WORDS, TILE);
    }

    void multiply_keys() {
        const int64_t row_bytes = head_dim * 2;
        for (int64_t token = begin; token < end; token += INNER) {
            ahead.fetch(head_dim / 8);
            const bfloat16 *upper = groups.keys[token / TILE], *lower = groups.keys[token / TILE + 1];
            // The compiler does not know that tiles are read from memory.
            asm volatile("" ::: "memory");
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t dim = 0; dim < head_dim; dim += INNER) {
                _tile_loadd(2, queries + dim / INNER * TILE_WORDS, 64);
                _tile_loadd(3, upper + dim, row_bytes);
                _tile_loadd(4, lower + dim, row_bytes);
                _tile_dpbf16ps(0, 3, 2);
                _tile_dpbf16ps(1, 4, 2);
            }
            _tile_stored(0, products + token * columns, columns * 4);
            _tile_stored(1, products + (token + TILE) * columns, columns * 4);
            asm volatile("" ::: "memory");
        }
    }

    // `dims` of the output, 64 or 32. V of a step is packed while the tiles take the one before.
    void multiply_values(int64_t dim, int64_t dims) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        pack(begin, dim, dims);
        for (int64_t token = begin; token < end; token += INNER) {
            if (token + INNER < end) pack(token + INNER, dim, dims);
            const uint32_t* words = values + token / INNER % 2 * TILE * DIMS;
            asm volatile("" ::: "memory");
            _tile_loadd(4, weights + token / 2, ROW_WORDS * 4);
            _tile_loadd(5, words, dims * 4);
            _tile_loadd(6, words + TILE, dims * 4);
            _tile_dpbf16ps(0, 4, 5);
            _tile_dpbf16ps(1, 4, 6);
            if (dims < DIMS) continue;
            _tile_loadd(5, words + 2 * TILE, DIMS * 4);
            _tile_loadd(6, words + 3 * TILE, DIMS * 4);
            _tile_dpbf16ps(2, 4, 5);
            _tile_dpbf16ps(3, 4, 6);
        }
        float* to = output + dim;
        _tile_stored(0, to, head_dim * 4);
        _tile_stored(1, to + TILE, head_dim * 4);
        if (dims == DIMS) {
            _tile_stored(2, to + 2 * TILE, head_dim * 4);
            _tile_stored(3, to + 3 * TILE, head_dim * 4);
        }
        asm volatile("" ::: "memory");
    }

    TOKEND_INLINE void pack(int64_t token, int64_t dim, int64_t dims) {
        const int64_t step = token / INNER;
        uint32_t* words = values + step % 2 * TILE * DIMS;
        const bool zero_nonfinite = !piece.all_see(groups.start + token, groups.start + token + INNER);
        const auto fetch = [&](int64_t) { ahead.fetch(1); };
        if (dims == DIMS) pack_values(groups, step, head_dim, dim, DIMS, zero_nonfinite, nonfinite, clean, words, fetch);
        else pack_values(groups, step, head_dim, dim, INNER, zero_nonfinite, nonfinite, clean, words, fetch);
    }

    // Rows that see a token with nonfinite V become NaN.
    void set_nan() {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t token = first_seen(row); token < end_seen(row); token++)
                if (nonfinite.has(token)) total[row] = NAN;
    }
};

}  // namespace

bool attend_in_tiles(const Piece& piece, const Piece& following, const TokendAttentionSchedule* plan, int64_t index,
                     Scratch& scratch) {
    const bool suits = suits_bfloat16(piece.layer, piece.head_dim) && piece.layer->cache_dtype == TOKEND_BFLOAT16;
    if (!suits || !tiles_allowed()) return false;
    Rows few(piece, following, scratch);
    few.compute();
    for (int64_t row = 0; row < piece.rows; row++) {
        float* output = few.output + row * piece.head_dim;
        order_dims<bfloat16>(output, piece.head_dim);
        leave_bfloat16(piece, plan, index, row, {output, few.best[row], few.total[row]});
    }
    return true;
}

#else

bool attend_in_tiles(const Piece&, const Piece&, const TokendAttentionSchedule*, int64_t, Scratch&) { return false; }

#endif

}  // namespace tokend
