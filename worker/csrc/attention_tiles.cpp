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

// Tiles 0 1: scores; 2: queries; 3 4: K or V; 5: weights; 6 7: output.
struct Tiles {
    explicit Tiles(int64_t rows) {
        TileShapes shapes;
        for (int tile : {0, 1, 2}) shapes.set(tile, TILE, int(rows) * 4);
        for (int tile : {3, 4}) shapes.set(tile, TILE);
        for (int tile : {5, 6, 7}) shapes.set(tile, int(rows));
        shapes.load();
    }
    ~Tiles() { _tile_release(); }
};

TOKEND_INLINE void fetch(const void* row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(row) + at, 0, 2);
}

// K and V rows of a chunk, those outside the piece a row of zeros, and the scales of int8 ones.
template <class C>
struct Chunk {
    int64_t start, from, to;
    const C* keys[CHUNK];
    const C* values[CHUNK];
    alignas(64) float key_scales[QUANTISED<C> ? CHUNK : 1];
    alignas(64) float value_scales[QUANTISED<C> ? CHUNK : 1];

    void locate(const Piece& piece, int64_t token, const C* zeros) {
        start = token / CHUNK * CHUNK;
        from = std::max(start, piece.begin);
        to = std::min(start + CHUNK, piece.end);
        if (from > start || to < start + CHUNK) {
            std::fill_n(keys, CHUNK, zeros);
            std::fill_n(values, CHUNK, zeros);
        }
        piece.locate(from, to, keys + (from - start), values + (from - start));
    }

    // When they are needed, not when they are located: the pages are on their way till then.
    void load_scales(const Piece& piece) {
        if constexpr (QUANTISED<C>) {
            std::fill_n(key_scales, CHUNK, 0.0f);
            std::fill_n(value_scales, CHUNK, 0.0f);
            piece.scales(from, to, key_scales + (from - start), value_scales + (from - start));
        }
    }
};

template <class C>
struct FewRows {
    const Piece& piece;
    int64_t head_dim, rows;
    float log_scale;
    float best[TILE], total[TILE];
    float* output;      // [rows, head_dim], in the order of the products
    uint32_t* queries;  // tiles [head_dim / 32]
    uint32_t* keys;     // [2 * TILE, head_dim / 2] words
    uint32_t* values;   // [CHUNK / 2, head_dim] words
    C* zeros;           // [head_dim]
    C* clean;           // [2, head_dim]
    alignas(64) float products[CHUNK * TILE];  // [token, row]
    alignas(64) float scores[TILE * CHUNK];    // [row, token]
    alignas(64) uint32_t weights[TILE * CHUNK / 2];

    FewRows(const Piece& p, Scratch& scratch) : piece(p), head_dim(p.head_dim), rows(p.rows) {
        float* at = scratch.floats(TILE * head_dim + TILE * head_dim / 2 + TILE * head_dim + CHUNK / 2 * head_dim + 3 * head_dim);
        const auto take = [&at](int64_t size) { return std::exchange(at, at + size); };
        const auto words = [&](int64_t size) { return reinterpret_cast<uint32_t*>(take(size)); };
        output = take(TILE * head_dim);
        queries = words(TILE * head_dim / 2);
        keys = words(TILE * head_dim);
        values = words(CHUNK / 2 * head_dim);
        zeros = reinterpret_cast<C*>(take(head_dim));
        clean = reinterpret_cast<C*>(take(2 * head_dim));
        std::memset(static_cast<void*>(zeros), 0, head_dim * sizeof(C));
        std::fill_n(output, rows * head_dim, 0.0f);
        std::fill_n(best, TILE, NO_SCORE);
        std::fill_n(total, TILE, 0.0f);
        log_scale = piece.scale * LOG2_E;
        uint32_t* pairs = values;  // [TILE, head_dim / 2], free as yet
        std::fill_n(pairs, TILE * head_dim / 2, 0u);
        for (int64_t row = 0; row < rows; row++) {
            float* query = products;
            piece.turned_query(row, query);
            pair_query<C>(query, head_dim, pairs + row * head_dim / 2);
        }
        for (int64_t step = 0; step < head_dim / INNER; step++)
            transpose(pairs + step * TILE, head_dim / 2, queries + step * TILE_WORDS, TILE);
    }

    void compute(const Piece& following) {
        Chunk<C> chunks[2];
        chunks[0].locate(piece, piece.begin, zeros);
        for (int64_t index = 0;; index++) {
            Chunk<C>&now = chunks[index % 2], &next = chunks[(index + 1) % 2];
            const bool is_last = now.to == piece.end;
            const Piece& source = is_last ? following : piece;
            next.locate(source, is_last ? source.begin : now.to, zeros);
            attend(now, next);
            if (is_last) return;
        }
    }

  private:
    void attend(Chunk<C>& now, const Chunk<C>& next) {
        float rescale[TILE];
        now.load_scales(piece);
        multiply_keys(now, next);
        for (int64_t token = 0; token < CHUNK; token += TILE)
            for (int64_t row = 0; row < rows; row += 4) turn_four(products + token * TILE + row, scores + row * CHUNK + token);
        if constexpr (QUANTISED<C>) scale_scores(now);
        if (piece.soft_cap > 0.0f) cap();
        const uint64_t broken = pack_values(now, next);
        for (int64_t row = 0; row < rows; row++) {
            const int64_t seen = std::min(now.to, piece.limit(row)) - now.start;
            const int64_t first = std::max(now.from, piece.limit(row) - piece.window) - now.start;
            rescale[row] = seen <= first ? skip_row(row) : weigh_row(row, first, seen, now);
            if (seen > first && (broken & mask(first, seen)) != 0) total[row] = NAN;
        }
        for (int64_t row = 0; row < rows; row++) {
            if (rescale[row] == 1.0f) continue;
            for (float* at = output + row * head_dim; at < output + (row + 1) * head_dim; at += 16)
                store<16>(at, load<16>(at) * rescale[row]);
        }
        multiply_values(now);
    }

    // Bits [first, seen).
    static uint64_t mask(int64_t first, int64_t seen) { return ~uint64_t(0) >> (64 - (seen - first)) << first; }

    void multiply_keys(const Chunk<C>& now, const Chunk<C>& next) {
        const int64_t row_bytes = head_dim * 2;
        for (int64_t token = 0; token < CHUNK; token += 2 * TILE) {
            for (int64_t each = token; each < token + 2 * TILE; each++) fetch(next.keys[each], head_dim * sizeof(C));
            if (now.start + token + 2 * TILE <= now.from || now.start + token >= now.to) continue;
            const void* upper = key_tile(now.keys + token, keys);
            const void* lower = key_tile(now.keys + token + TILE, keys + TILE * head_dim / 2);
            // The compiler does not know that tiles are read from memory.
            asm volatile("" ::: "memory");
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t step = 0; step < head_dim / INNER; step++) {
                _tile_loadd(2, queries + step * TILE_WORDS, 64);
                _tile_loadd(3, static_cast<const char*>(upper) + step * 64, row_bytes);
                _tile_loadd(4, static_cast<const char*>(lower) + step * 64, row_bytes);
                _tile_dpbf16ps(0, 3, 2);
                _tile_dpbf16ps(1, 4, 2);
            }
            _tile_stored(0, products + token * TILE, 64);
            _tile_stored(1, products + (token + TILE) * TILE, 64);
            asm volatile("" ::: "memory");
        }
    }

    // Sixteen rows of K without a gap, in the page or in `copy`.
    const void* key_tile(const C* const* tokens, uint32_t* copy) const {
        if constexpr (!QUANTISED<C>) {
            bool whole = true;
            for (int token = 0; token + 1 < TILE; token++) whole &= tokens[token + 1] == tokens[token] + head_dim;
            if (whole) return tokens[0];
        }
        for (int token = 0; token < TILE; token++) pair_dims(tokens[token], head_dim, copy + token * head_dim / 2);
        return copy;
    }

    // Four columns of 16 rows become four rows.
    static TOKEND_INLINE void turn_four(const float* from, float* to) {
        __m512 fours[4];
        each<4>([&](auto i) {
            __m512 four = _mm512_castps128_ps512(_mm_load_ps(from + i * TILE));
            four = _mm512_insertf32x4(four, _mm_load_ps(from + (i + 4) * TILE), 1);
            four = _mm512_insertf32x4(four, _mm_load_ps(from + (i + 8) * TILE), 2);
            fours[i] = _mm512_insertf32x4(four, _mm_load_ps(from + (i + 12) * TILE), 3);
        });
        const __m512d ab = (__m512d)_mm512_unpacklo_ps(fours[0], fours[1]), AB = (__m512d)_mm512_unpackhi_ps(fours[0], fours[1]);
        const __m512d cd = (__m512d)_mm512_unpacklo_ps(fours[2], fours[3]), CD = (__m512d)_mm512_unpackhi_ps(fours[2], fours[3]);
        _mm512_store_ps(to, (__m512)_mm512_unpacklo_pd(ab, cd));
        _mm512_store_ps(to + CHUNK, (__m512)_mm512_unpackhi_pd(ab, cd));
        _mm512_store_ps(to + 2 * CHUNK, (__m512)_mm512_unpacklo_pd(AB, CD));
        _mm512_store_ps(to + 3 * CHUNK, (__m512)_mm512_unpackhi_pd(AB, CD));
    }

    void scale_scores(const Chunk<C>& now) {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t token = 0; token < CHUNK; token += 16) {
                float* at = scores + row * CHUNK + token;
                store<16>(at, load<16>(at) * load<16>(now.key_scales + token));
            }
    }

    void cap() {
        for (float* at = scores; at < scores + rows * CHUNK; at += 16)
            store<16>(at, capped<16>(load<16>(at), piece.scale, piece.soft_cap));
    }

    // Puts neighbouring tokens of V side by side; returns those that are not finite, where not
    // all rows see all.
    uint64_t pack_values(const Chunk<C>& now, const Chunk<C>& next) {
        uint64_t broken = 0;
        const bool mends = !QUANTISED<C> && !piece.all_see(now.from, now.to);
        for (int64_t token = 0; token < CHUNK; token += 2) {
            fetch(next.values[token], head_dim * sizeof(C));
            fetch(next.values[token + 1], head_dim * sizeof(C));
            const C *a = now.values[token], *b = now.values[token + 1];
            if constexpr (!QUANTISED<C>) {
                if (mends) {
                    // Zero times NaN is NaN: it must not reach rows that do not see the token.
                    broken |= uint64_t(is_broken(a, head_dim, clean)) << token;
                    broken |= uint64_t(is_broken(b, head_dim, clean + head_dim)) << (token + 1);
                    a = clean;
                    b = clean + head_dim;
                }
            }
            pair_tokens(a, b, head_dim, values + token / 2 * head_dim);
        }
        return broken;
    }

    // A row that sees nothing of the chunk.
    float skip_row(int64_t row) {
        std::fill_n(weights + row * CHUNK / 2, CHUNK / 2, 0u);
        return 1.0f;
    }

    // Online softmax of a row over tokens [first, seen) of the chunk: scores become weights.
    float weigh_row(int64_t row, int64_t first, int64_t seen, const Chunk<C>& now) {
        const float* at = scores + row * CHUNK;
        const uint64_t sees = mask(first, seen);
        F<16> score[4];
        each<4>([&](auto i) {
            score[i] = (F<16>)_mm512_mask_loadu_ps((__m512)splat<16>(NO_SCORE), __mmask16(sees >> i * 16), at + i * 16);
        });
        const F<16> before = splat<16>(best[row]);
        const float most = max_lanes<16>(larger(larger(score[0], score[1]), larger(score[2], score[3])));
        const F<16> largest = maximum<16>(before, splat<16>(most));
        const Weigher weight(before, largest, log_scale);
        F<16> sum;
        each<4>([&](auto i) {
            score[i] = weight(score[i]);
            sum = i == 0 ? score[0] : sum + score[i];
        });
        if constexpr (QUANTISED<C>)
            each<4>([&](auto i) {
                const F<16> scaled = score[i] * load<16>(now.value_scales + i * 16);
                score[i] = score[i] == F<16>{} ? F<16>{} : scaled;
            });
        each<2>([&](auto half) {
            const auto words = (__m512i)_mm512_cvtne2ps_pbh((__m512)score[half * 2 + 1], (__m512)score[half * 2]);
            _mm512_store_si512(weights + row * CHUNK / 2 + half * 16, words);
        });
        total[row] = multiply_add<16>(splat<16>(total[row]), weight.rescale, sum_pairs(sum))[0];
        best[row] = largest[0];
        return weight.rescale[0];
    }

    // Neighbours first, as the columns of attention_bf16.cpp are summed.
    static TOKEND_INLINE F<16> sum_pairs(F<16> v) {
        __m512 sum = (__m512)v;
        sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
        sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
        sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1));
        return (F<16>)_mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4e));
    }

    void multiply_values(const Chunk<C>& now) {
        const int64_t row_bytes = head_dim * 4, halves = now.to - now.start > CHUNK / 2 ? 2 : 1;
        asm volatile("" ::: "memory");
        for (int64_t dim = 0; dim < head_dim; dim += 2 * TILE) {
            _tile_loadd(6, output + dim, row_bytes);
            _tile_loadd(7, output + dim + TILE, row_bytes);
            for (int64_t half = 0; half < halves; half++) {
                const uint32_t* words = values + half * TILE * head_dim + dim;
                _tile_loadd(5, weights + half * 16, CHUNK * 2);
                _tile_loadd(3, words, row_bytes);
                _tile_loadd(4, words + TILE, row_bytes);
                _tile_dpbf16ps(6, 5, 3);
                _tile_dpbf16ps(7, 5, 4);
            }
            _tile_stored(6, output + dim, row_bytes);
            _tile_stored(7, output + dim + TILE, row_bytes);
        }
        asm volatile("" ::: "memory");
    }
};

template <class C>
void attend(const Piece& piece, const Piece& following, const TokendPlan* plan, int64_t index, Scratch& scratch) {
    FewRows<C> few(piece, scratch);
    {
        const Tiles tiles(piece.rows);
        few.compute(following);
    }
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
