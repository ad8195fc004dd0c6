// Attention of up to 8 query rows over a piece of int8 pages with the tile unit: a decode.
//
// K and V are multiplied as the integers that they are. A number on the other side, of a query
// or a weight, becomes an integer of 15 bits in two halves, high * 256 + low, which are rows of
// their own in the same product; the largest of a row is 127 * 256. So a score is off by at most
// 2^-16 of the largest number of the query, times the sum of the key's sizes: less than the
// rounding of the query to bfloat16. Sums are integers and exact.
//
//   scores [token, row]  = K [token, dim] . Q^T [dim, row]              * scales of both
//   output [row, dim]   += weights * scale [row, token] . V [token, dim] * scale of the row
#include "attention_few_tiles.h"

namespace tokend {

#if defined(__AVX512BF16__) && defined(TOKEND_AMX)
namespace {

constexpr int64_t MOST_ROWS = TILE / 2;
constexpr int64_t DEPTH = 64;  // numbers in a row of a tile
constexpr float LARGEST = 127.0f * 256.0f;

// Tiles 0 1: scores; 2: queries; 3 4: K.   0 1 2 3: output; 4: weights; 5 6: V.
struct Tiles {
    TileShapes keys, values;

    Tiles(int64_t rows, int64_t columns) {
        for (int tile : {0, 1, 2}) keys.set(tile, TILE, int(columns) * 4);
        for (int tile : {3, 4}) keys.set(tile, TILE);
        for (int tile : {0, 1, 2, 3, 4}) values.set(tile, int(rows) * 2);
        for (int tile : {5, 6}) values.set(tile, TILE);
    }
    ~Tiles() { _tile_release(); }
};

struct Memory {
    int8_t* queries;   // tiles [head_dim / 64] of [16 fours of dims, columns]
    int8_t* values;    // [2, 16 fours of tokens, 64 dims]
    int8_t* copy;      // of the groups
    float* products;   // int32 [PIECE, columns]
    float* scores;     // int32, then float [columns, PIECE]
    int8_t* weights;   // [2 * rows, PIECE]: high parts of all rows, then low ones
    int32_t* sums;     // [2 * rows, 64]
    float* output;     // [rows, head_dim]

    Memory(Scratch& scratch, int64_t head_dim) {
        const int64_t copied = Groups<int8_t>::copy_size(head_dim) / 4;
        float* at = scratch.floats(TILE * head_dim / 4 + 2 * TILE * DEPTH + copied + 2 * PIECE * TILE + TILE * PIECE / 4 +
                                   TILE * DEPTH + MOST_ROWS * head_dim);
        const auto take = [&at](int64_t size) { return std::exchange(at, at + size); };
        queries = reinterpret_cast<int8_t*>(take(TILE * head_dim / 4));
        values = reinterpret_cast<int8_t*>(take(2 * TILE * DEPTH));
        copy = reinterpret_cast<int8_t*>(take(copied));
        products = take(PIECE * TILE);
        scores = take(PIECE * TILE);
        weights = reinterpret_cast<int8_t*>(take(TILE * PIECE / 4));
        sums = reinterpret_cast<int32_t*>(take(TILE * DEPTH));
        output = take(MOST_ROWS * head_dim);
    }
};

// 16 numbers times `factor`, at most LARGEST, in two halves.
TOKEND_INLINE void split(F<16> numbers, float factor, int8_t* high, int8_t* low) {
    const __m512i whole = _mm512_cvtps_epi32((__m512)(numbers * factor));
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(_mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8))));
}

// What numbers of which `most` is the largest size are multiplied by.
TOKEND_INLINE float factor_of(float most) { return most < LEAST_LARGEST ? 0.0f : LARGEST / most; }

struct Rows : Memory, FewRows<int8_t> {
    int64_t columns;  // both halves of all rows, in whole fours
    float query_scales[MOST_ROWS];

    Rows(const Piece& p, const Piece& following, Scratch& scratch)
        : Memory(scratch, p.head_dim), FewRows(p, following, DEPTH, copy), columns(round_up(2 * p.rows, 4)) {
        pack_queries();
    }

    void compute() {
        const Tiles tiles(rows, columns);
        tiles.keys.load();
        multiply_keys();
        for (int64_t token = begin; token < end; token += TILE) {
            ahead.fetch(head_dim / 32);
            for (int64_t column = 0; column < columns; column += 4)
                turn_four(products + token * columns + column, columns, scores + column * PIECE + token);
        }
        float factors[MOST_ROWS];
        for (int64_t row = 0; row < rows; row++) factors[row] = weigh_row(row);
        tiles.values.load();
        for (int64_t dim = 0; dim < head_dim; dim += DEPTH) {
            multiply_values(dim);
            for (int64_t row = 0; row < rows; row++) join_halves(row, dim, factors[row]);
        }
    }

  private:
    void pack_queries() {
        std::memset(queries, 0, TILE * head_dim);
        for (int64_t row = 0; row < rows; row++) {
            float* query = products;
            int8_t high[16], low[16];
            piece.turned_query(row, query);
            F<16> most = {}, odd = {};
            for (int64_t dim = 0; dim < head_dim; dim += 16) {
                const F<16> numbers = load<16>(query + dim);
                most = larger(most, maximum<16>(numbers, -numbers));
                odd += numbers * 0.0f;
            }
            const float largest = _mm512_reduce_max_ps((__m512)most), factor = factor_of(largest);
            // A query that is no number, and its scores with it.
            query_scales[row] = largest / LARGEST + sum_lanes<16>(odd);
            for (int64_t dim = 0; dim < head_dim; dim += 16) {
                split(load<16>(query + dim), factor, high, low);
                for (int64_t four = 0; four < 16; four += 4) {
                    int8_t* at = queries + (dim + four) / 4 * columns * 4;
                    std::copy_n(high + four, 4, at + row * 4);
                    std::copy_n(low + four, 4, at + (rows + row) * 4);
                }
            }
        }
    }

    void multiply_keys() {
        for (int64_t token = begin; token < end; token += 2 * TILE) {
            ahead.fetch(head_dim / 16);
            const int8_t *upper = groups.keys[token / TILE], *lower = groups.keys[token / TILE + 1];
            // The compiler does not know that tiles are read from memory.
            asm volatile("" ::: "memory");
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t dim = 0; dim < head_dim; dim += DEPTH) {
                _tile_loadd(2, queries + dim * columns, columns * 4);
                _tile_loadd(3, upper + dim, head_dim);
                _tile_loadd(4, lower + dim, head_dim);
                _tile_dpbssd(0, 3, 2);
                _tile_dpbssd(1, 4, 2);
            }
            _tile_stored(0, products + token * columns, columns * 4);
            _tile_stored(1, products + (token + TILE) * columns, columns * 4);
            asm volatile("" ::: "memory");
        }
    }

    // Scores of a row become weights times the scales of V; returns what one of their units is worth.
    float weigh_row(int64_t row) {
        float *at = scores + row * PIECE, *lower = scores + (rows + row) * PIECE;
        for (int64_t token = begin; token < end; token += 16) {
            const __m512i high = load_bytes<__m512i>(at + token), low = load_bytes<__m512i>(lower + token);
            const __m512 score = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
            store<16>(at + token, (F<16>)score * (load<16>(groups.key_scales + token) * query_scales[row]));
        }
        cap(at);
        F<16> most = {}, odd = {};
        weigh(row, at, [&](int64_t token, F<16> low, F<16> high) {
            low = scaled(low, groups.value_scales + token);
            high = scaled(high, groups.value_scales + token + 16);
            most = larger(larger(most, low), high);
            odd += low * 0.0f + high * 0.0f;
            store<16>(at + token, low);
            store<16>(at + token + 16, high);
        });
        total[row] += sum_lanes<16>(odd);
        const float largest = _mm512_reduce_max_ps((__m512)most), factor = factor_of(largest);
        for (int64_t token = begin; token < end; token += 16)
            split(load<16>(at + token), factor, weights + row * PIECE + token, weights + (rows + row) * PIECE + token);
        return largest / LARGEST;
    }

    // 64 dims of the output. V of 64 tokens is packed while the tiles take those before.
    void multiply_values(int64_t dim) {
        constexpr int64_t BYTES = 4 * DEPTH;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        pack(begin, dim);
        for (int64_t token = begin; token < end; token += DEPTH) {
            if (token + DEPTH < end) pack(token + DEPTH, dim);
            const int8_t* fours = values + token / DEPTH % 2 * TILE * BYTES;
            asm volatile("" ::: "memory");
            _tile_loadd(4, weights + token, PIECE);
            _tile_loadd(5, fours, BYTES);
            _tile_loadd(6, fours + 64, BYTES);
            _tile_dpbssd(0, 4, 5);
            _tile_dpbssd(1, 4, 6);
            _tile_loadd(5, fours + 128, BYTES);
            _tile_loadd(6, fours + 192, BYTES);
            _tile_dpbssd(2, 4, 5);
            _tile_dpbssd(3, 4, 6);
        }
        _tile_stored(0, sums, BYTES);
        _tile_stored(1, sums + 16, BYTES);
        _tile_stored(2, sums + 32, BYTES);
        _tile_stored(3, sums + 48, BYTES);
        asm volatile("" ::: "memory");
    }

    // Four neighbouring tokens side by side. The dims come in the order of unpacking:
    //   0-3 16-19 32-35 48-51   4-7 20-23 …   8-11 24-27 …   12-15 28-31 …
    TOKEND_INLINE void pack(int64_t token, int64_t dim) {
        int8_t* to = values + token / DEPTH % 2 * TILE * 4 * DEPTH;
        for (int64_t four = token; four < token + DEPTH; four += 4, to += 4 * DEPTH) {
            ahead.fetch(1);
            const int8_t* row = groups.values[four / TILE] + four % TILE * head_dim + dim;
            const auto a = load_bytes<__m512i>(row), b = load_bytes<__m512i>(row + head_dim);
            const auto c = load_bytes<__m512i>(row + 2 * head_dim), d = load_bytes<__m512i>(row + 3 * head_dim);
            const __m512i ab = _mm512_unpacklo_epi8(a, b), AB = _mm512_unpackhi_epi8(a, b);
            const __m512i cd = _mm512_unpacklo_epi8(c, d), CD = _mm512_unpackhi_epi8(c, d);
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(ab, cd));
            _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(ab, cd));
            _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi16(AB, CD));
            _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi16(AB, CD));
        }
    }

    void join_halves(int64_t row, int64_t dim, float unit) {
        const int32_t *high = sums + row * DEPTH, *low = sums + (rows + row) * DEPTH;
        for (int64_t part = 0; part < 4; part++) {
            const auto upper = load_bytes<__m512i>(high + part * 16), lower = load_bytes<__m512i>(low + part * 16);
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower));
            const F<16> numbers = (F<16>)sum * unit;
            float* to = output + row * head_dim + dim + part * 4;
            each<4>([&](auto lane) { _mm_storeu_ps(to + lane * 16, _mm512_extractf32x4_ps((__m512)numbers, lane)); });
        }
    }
};

}  // namespace

bool attend_in_int8_tiles(const Piece& piece, const Piece& following, const TokendPlan* plan, int64_t index,
                          Scratch& scratch) {
    // Above, the sums of 127 * 127 * 256 might not fit into 32 bits.
    if (piece.rows > MOST_ROWS || piece.head_dim % DEPTH != 0 || piece.head_dim > 256) return false;
    Rows few(piece, following, scratch);
    few.compute();
    for (int64_t row = 0; row < piece.rows; row++)
        leave_row(piece, plan, index, row, {few.output + row * piece.head_dim, few.best[row], few.total[row]});
    return true;
}

#else

bool attend_in_int8_tiles(const Piece&, const Piece&, const TokendPlan*, int64_t, Scratch&) { return false; }

#endif

}  // namespace tokend
