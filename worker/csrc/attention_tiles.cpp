// Attention of up to 16 query rows over a piece of bfloat16 pages with the tile unit: a decode.
//
// Reading K and V once is the limit, so what is done with them must be little: a tile of 16
// rows of K is multiplied as it lies in the page, and V takes one instruction for two rows.
//
//   scores [token, row]  = K [token, dim] . Q^T [dim, row]
//   output [row, dim]   += weights [row, token] . V [token, dim]
//
// The sums are those of attention_bf16.cpp, bit by bit: a row comes out the same in a decode
// and in any chunk of a prompt.
#include "attention_few_tiles.h"

namespace tokend {

#if defined(__AVX512BF16__) && defined(TOKEND_AMX)
namespace {

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

// Memory of one piece, from the thread's.
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

struct Rows : Memory, FewRows<bfloat16> {
    int64_t columns;  // rows in whole fours
    Broken broken;

    Rows(const Piece& p, const Piece& following, Scratch& scratch)
        : Memory(scratch, p.head_dim), FewRows(p, following, INNER, copy), columns(round_up(p.rows, 4)) {
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
        if (broken.any()) spoil();
    }

  private:
    void pack_queries() {
        uint32_t* pairs = reinterpret_cast<uint32_t*>(products);  // [TILE, head_dim / 2], free as yet
        std::fill_n(pairs, TILE * head_dim / 2, 0u);
        for (int64_t row = 0; row < rows; row++) {
            piece.turned_query(row, scores);
            pair_query<bfloat16>(scores, head_dim, pairs + row * head_dim / 2);
        }
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
        const bool mends = !piece.all_see(groups.start + token, groups.start + token + INNER);
        const auto fetch = [&](int64_t) { ahead.fetch(1); };
        if (dims == DIMS) pack_values(groups, step, head_dim, dim, DIMS, mends, broken, clean, words, fetch);
        else pack_values(groups, step, head_dim, dim, INNER, mends, broken, clean, words, fetch);
    }

    // Those who see a token of which V is not finite.
    void spoil() {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t token = first_seen(row); token < end_seen(row); token++)
                if (broken.has(token)) total[row] = NAN;
    }
};

}  // namespace

bool attend_in_tiles(const Piece& piece, const Piece& following, const TokendPlan* plan, int64_t index,
                     Scratch& scratch) {
    if (!suits_bfloat16(piece.layer, piece.head_dim) || !tiles_allowed()) return false;
    if (piece.layer->cache_dtype == TOKEND_INT8) return attend_in_int8_tiles(piece, following, plan, index, scratch);
    Rows few(piece, following, scratch);
    few.compute();
    for (int64_t row = 0; row < piece.rows; row++) {
        float* output = few.output + row * piece.head_dim;
        order_dims<bfloat16>(output, piece.head_dim);
        leave_row(piece, plan, index, row, {output, few.best[row], few.total[row]});
    }
    return true;
}

#else

bool attend_in_tiles(const Piece&, const Piece&, const TokendPlan*, int64_t, Scratch&) { return false; }

#endif

}  // namespace tokend
