// Attention of up to 16 query rows over a piece of tokens with the tile unit: a decode.
//
// Reading K and V once is the limit, so what is done with them must be little: a tile of 16
// rows of K is multiplied as it lies in the page, and V takes one instruction for two rows.
//
//   scores [token, row]  = K [token, dim] . Q^T [dim, row]
//   output [row, dim]   += weights [row, token] . V [token, dim]
//
// The sums are those of attention_bf16.cpp, bit by bit: a row comes out the same in a decode
// and in any chunk of a prompt.
#include "attention_bf16.h"

#include "amx.h"
#include "attention_finish.h"
#include "attention_kernels.h"

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

template <class C>
struct FewRows {
    static constexpr int64_t ROW_WORDS = PIECE / 2;

    const Piece& piece;
    int64_t head_dim, rows, columns;  // columns: rows in whole fours
    uint32_t* queries;   // tiles [head_dim / 32]
    uint32_t* keys;      // [2 * TILE, head_dim / 2] words: int8 ones in the form of tiles
    uint32_t* values;    // [2, TILE, 64] words: two steps of tokens
    C* clean;            // [2, 64]
    C* copy;
    float* products;     // [PIECE, columns]
    float* scores;       // [columns, PIECE]
    uint32_t* weights;   // [rows, ROW_WORDS]
    float* output;       // [rows, head_dim], in the order of the products
    float best[TILE], total[TILE];
    Groups<C> groups;
    Groups<C> next;  // to be fetched ahead
    Broken broken;

    FewRows(const Piece& p, const Piece& following, Scratch& scratch)
        : piece(p), head_dim(p.head_dim), rows(p.rows), columns(round_up(p.rows, 4)) {
        const int64_t copied = Groups<C>::copy_size(head_dim) * sizeof(C) / 4;
        float* at = scratch.floats(TILE * head_dim * 5 / 2 + 2 * TILE * DIMS + 2 * DIMS + copied + 2 * PIECE * TILE +
                                   TILE * ROW_WORDS);
        const auto take = [&at](int64_t size) { return std::exchange(at, at + size); };
        const auto words = [&](int64_t size) { return reinterpret_cast<uint32_t*>(take(size)); };
        queries = words(TILE * head_dim / 2);
        keys = words(TILE * head_dim);
        values = words(2 * TILE * DIMS);
        clean = reinterpret_cast<C*>(take(2 * DIMS));
        copy = reinterpret_cast<C*>(take(copied));
        products = take(PIECE * TILE);
        scores = take(PIECE * TILE);
        weights = words(TILE * ROW_WORDS);
        output = take(TILE * head_dim);
        pack_queries();
        groups.locate(piece, piece.begin, piece.end, copy);
        next.from = next.to = 0;
        if (following.tile != piece.tile || following.begin != piece.begin) next.foresee(following);
    }

    void compute() {
        const Tiles tiles(rows, columns);
        tiles.keys.load();
        multiply_keys();
        const int64_t begin = groups.first_step() * INNER, end = groups.end_step() * INNER;
        for (int64_t token = begin; token < end; token += TILE)
            for (int64_t row = 0; row < rows; row += 4)
                turn_four(products + token * columns + row, columns, scores + row * PIECE + token);
        if constexpr (QUANTISED<C>) scale_scores(begin, end);
        if (piece.soft_cap > 0.0f) cap(begin, end);
        for (int64_t row = 0; row < rows; row++) weigh_row(row, begin, end);
        tiles.values.load();
        for (int64_t dim = 0; dim < head_dim; dim += DIMS) multiply_values(dim, std::min(DIMS, head_dim - dim));
        if (broken.any()) spoil();
    }

  private:
    static constexpr int64_t DIMS = 64;  // of V that one pass takes

    void pack_queries() {
        uint32_t* pairs = reinterpret_cast<uint32_t*>(products);  // [TILE, head_dim / 2], free as yet
        std::fill_n(pairs, TILE * head_dim / 2, 0u);
        for (int64_t row = 0; row < rows; row++) {
            piece.turned_query(row, scores);
            pair_query<C>(scores, head_dim, pairs + row * head_dim / 2);
        }
        for (int64_t step = 0; step < head_dim / INNER; step++)
            transpose(pairs + step * TILE, head_dim / 2, queries + step * TILE_WORDS, TILE);
    }

    void multiply_keys() {
        const int64_t row_bytes = head_dim * 2;
        for (int64_t step = groups.first_step(); step < groups.end_step(); step++) {
            next.fetch(next.keys, step, head_dim);
            const void* upper = key_tile(groups.keys[step * 2], head_dim, keys);
            const void* lower = key_tile(groups.keys[step * 2 + 1], head_dim, keys + TILE * head_dim / 2);
            // The compiler does not know that tiles are read from memory.
            asm volatile("" ::: "memory");
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t inner = 0; inner < head_dim / INNER; inner++) {
                _tile_loadd(2, queries + inner * TILE_WORDS, 64);
                _tile_loadd(3, static_cast<const char*>(upper) + inner * 64, row_bytes);
                _tile_loadd(4, static_cast<const char*>(lower) + inner * 64, row_bytes);
                _tile_dpbf16ps(0, 3, 2);
                _tile_dpbf16ps(1, 4, 2);
            }
            _tile_stored(0, products + step * INNER * columns, columns * 4);
            _tile_stored(1, products + (step * INNER + TILE) * columns, columns * 4);
            asm volatile("" ::: "memory");
        }
    }

    // Four columns of 16 rows become four rows.
    static TOKEND_INLINE void turn_four(const float* from, int64_t stride, float* to) {
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

    void scale_scores(int64_t begin, int64_t end) {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t token = begin; token < end; token += 16) {
                float* at = scores + row * PIECE + token;
                store<16>(at, load<16>(at) * load<16>(groups.key_scales + token));
            }
    }

    void cap(int64_t begin, int64_t end) {
        for (int64_t row = 0; row < rows; row++)
            for (float* at = scores + row * PIECE + begin; at < scores + row * PIECE + end; at += 16)
                store<16>(at, capped<16>(load<16>(at), piece.scale, piece.soft_cap));
    }

    // Of the tokens of the piece a row sees [first_seen, end_seen).
    int64_t first_seen(int64_t row) const {
        return std::max(groups.from, piece.limit(row) - piece.window) - groups.start;
    }
    int64_t end_seen(int64_t row) const { return std::min(groups.to, piece.limit(row)) - groups.start; }

    // Softmax of a row over the piece: scores become weights.
    void weigh_row(int64_t row, int64_t begin, int64_t end) {
        float* at = scores + row * PIECE;
        for (int64_t token = begin; token < std::min(first_seen(row), end); token++) at[token] = NO_SCORE;
        for (int64_t token = std::max(end_seen(row), begin); token < end; token++) at[token] = NO_SCORE;
        F<16> most = splat<16>(NO_SCORE);
        for (int64_t token = begin; token < end; token += 16) most = larger(most, load<16>(at + token));
        best[row] = _mm512_reduce_max_ps((__m512)most);
        const Weigher weight(splat<16>(best[row]), piece.scale * LOG2_E);
        F<16> sum = {};
        for (int64_t token = begin; token < end; token += INNER) {
            F<16> low = weight(load<16>(at + token)), high = weight(load<16>(at + token + 16));
            sum += low;
            sum += high;
            if constexpr (QUANTISED<C>) {
                low = scaled(low, groups.value_scales + token);
                high = scaled(high, groups.value_scales + token + 16);
            }
            const auto words = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            _mm512_storeu_si512(weights + row * ROW_WORDS + token / 2, words);
        }
        total[row] = sum_pairs(sum);
    }

    // A weight of zero takes nothing of a scale that is no number.
    static TOKEND_INLINE F<16> scaled(F<16> weight, const float* scales) {
        const F<16> product = weight * load<16>(scales);
        return weight == F<16>{} ? F<16>{} : product;
    }

    // Neighbours first, as the columns of attention_bf16.cpp are summed.
    static TOKEND_INLINE float sum_pairs(F<16> v) {
        __m512 sum = (__m512)v;
        sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
        sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
        sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1));
        return _mm512_cvtss_f32(_mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4e)));
    }

    // `dims` of the output, 64 or 32. V of a step is packed while the tiles take the one before.
    void multiply_values(int64_t dim, int64_t dims) {
        const int64_t last = groups.end_step() - 1;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        pack(groups.first_step(), dim, dims);
        for (int64_t step = groups.first_step(); step <= last; step++) {
            if (dim == 0) next.fetch(next.values, step, head_dim);
            if (step < last) pack(step + 1, dim, dims);
            const uint32_t* words = values + step % 2 * TILE * DIMS;
            asm volatile("" ::: "memory");
            _tile_loadd(4, weights + step * TILE, ROW_WORDS * 4);
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

    TOKEND_INLINE void pack(int64_t step, int64_t dim, int64_t dims) {
        const int64_t token = groups.start + step * INNER;
        uint32_t* words = values + step % 2 * TILE * DIMS;
        const bool mends = !piece.all_see(token, token + INNER);
        if (dims == DIMS) pack_values(groups, step, head_dim, dim, DIMS, mends, broken, clean, words);
        else pack_values(groups, step, head_dim, dim, INNER, mends, broken, clean, words);
    }

    // Those who see a token of which V is not finite.
    void spoil() {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t token = first_seen(row); token < end_seen(row); token++)
                if (broken.has(token)) total[row] = NAN;
    }
};

template <class C>
void attend(const Piece& piece, const Piece& following, const TokendPlan* plan, int64_t index, Scratch& scratch) {
    FewRows<C> few(piece, following, scratch);
    few.compute();
    for (int64_t row = 0; row < piece.rows; row++) {
        float* output = few.output + row * piece.head_dim;
        order_dims<C>(output, piece.head_dim);
        leave_row(piece, plan, index, row, {output, few.best[row], few.total[row]});
    }
}

}  // namespace

bool attend_in_tiles(const Piece& piece, const Piece& following, const TokendPlan* plan, int64_t index,
                     Scratch& scratch) {
    if (!suits_bfloat16(piece.layer, piece.head_dim) || !tiles_allowed()) return false;
    if (piece.layer->cache_dtype == TOKEND_INT8) attend<int8_t>(piece, following, plan, index, scratch);
    else attend<bfloat16>(piece, following, plan, index, scratch);
    return true;
}

#else

bool attend_in_tiles(const Piece&, const Piece&, const TokendPlan*, int64_t, Scratch&) { return false; }

#endif

}  // namespace tokend
