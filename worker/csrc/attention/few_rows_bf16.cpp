// Attention of up to 16 query rows over a short split of bfloat16 pages: a decode. Products of bfloat16 by
// the tile unit, or by instructions that multiply a vector of pairs.
//
// Reading K and V is the limit, so the arithmetic must be cheap. The tile unit multiplies 16 rows of
// K in place; vectors take them transposed. V takes one instruction for two rows.
//
//   scores [row, token]  = Q [row, dim] . K^T [dim, token]
//   output [row, dim]   += weights [row, token] . V [token, dim]
//
// The sums equal those of many_rows_bf16.cpp bit by bit: a row has the same result in a decode and
// in any chunk of a prompt.
#include "attention/bf16_pairs.h"
#include "attention/kv_split.h"
#include "common/amx.h"

namespace tokend {

#if defined(__AVX512BF16__)
namespace {

// Adds neighbours first, in the order of the column sums of many_rows_bf16.cpp.
TOKEND_INLINE float sum_pairs(F<16> v) {
    __m512 sum = (__m512)v;
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
    sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1));
    return _mm512_cvtss_f32(_mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4e)));
}

// The softmax of a tile's rows over one short split.
struct FewRowsSoftmax {
    const KVSplit& split;
    const int64_t head_dim, rows;
    TokenGroups<bfloat16> groups;
    GroupPrefetcher prefetcher;
    int64_t begin, end;  // the computed tokens, in whole tiles
    float best[TILE], total[TILE];

    FewRowsSoftmax(const KVSplit& p, const KVSplit& following, int64_t distance, bool near, bfloat16* copy)
        : split(p), head_dim(p.head_dim), rows(p.rows), prefetcher(p, following, distance, near) {
        groups.locate(split, split.begin, split.end, copy);
        begin = (groups.from - groups.start) / INNER * INNER;
        end = round_up(groups.to - groups.start, INNER);
    }

    // A row sees tokens [first_seen, end_seen) of the split.
    int64_t first_seen(int64_t row) const { return std::max(groups.from, split.first(row)) - groups.start; }
    int64_t end_seen(int64_t row) const { return std::min(groups.to, split.limit(row)) - groups.start; }

    void cap(float* scores) const {
        if (split.soft_cap <= 0.0f) return;
        for (float* at = scores + begin; at < scores + end; at += 16)
            store<16>(at, capped<16>(load<16>(at), split.scale, split.soft_cap));
    }

    // Softmax of a row over the split; take(token, weights of 16 tokens, of the next 16).
    TOKEND_INLINE void weigh(int64_t row, float* scores, auto take) {
        for (int64_t token = begin; token < std::min(first_seen(row), end); token++) scores[token] = NO_SCORE;
        for (int64_t token = std::max(end_seen(row), begin); token < end; token++) scores[token] = NO_SCORE;
        F<16> most = splat<16>(NO_SCORE);
        for (int64_t token = begin; token < end; token += 16) most = larger(most, load<16>(scores + token));
        best[row] = _mm512_reduce_max_ps((__m512)most);
        const Weigher weight(splat<16>(best[row]), split.scale * LOG2_E);
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

constexpr int64_t DIMS = 64;  // of V that one pass takes
constexpr int64_t ROW_WORDS = SHORT_SPLIT / 2;

// Memory of one short split, part of the thread's.
struct FewRowsMemory {
    uint32_t* queries;  // [rows, head_dim / 2]; for the tile unit tiles [head_dim / 32]
    uint32_t* values;   // [2, TILE, 64] words: two steps of tokens
    bfloat16* clean;    // [2, 64]
    bfloat16* copy;     // of the groups
    float* products;    // [SHORT_SPLIT, columns], of the tile unit
    float* scores;      // [columns, SHORT_SPLIT]
    uint32_t* weights;  // [rows, ROW_WORDS]
    float* output;      // [rows, head_dim], in the order of the products

    FewRowsMemory(Scratch& scratch, int64_t head_dim) {
        const int64_t copied = TokenGroups<bfloat16>::copy_size(head_dim) / 2;
        float* at = scratch.floats(TILE * head_dim * 3 / 2 + 2 * TILE * DIMS + DIMS + copied + 2 * SHORT_SPLIT * TILE +
                                   TILE * ROW_WORDS);
        const auto take = [&at](int64_t size) { return std::exchange(at, at + size); };
        queries = reinterpret_cast<uint32_t*>(take(TILE * head_dim / 2));
        values = reinterpret_cast<uint32_t*>(take(2 * TILE * DIMS));
        clean = reinterpret_cast<bfloat16*>(take(DIMS));
        copy = reinterpret_cast<bfloat16*>(take(copied));
        products = take(SHORT_SPLIT * TILE);
        scores = take(SHORT_SPLIT * TILE);
        weights = reinterpret_cast<uint32_t*>(take(TILE * ROW_WORDS));
        output = take(TILE * head_dim);
    }
};

// What both kinds of products share; multiply_keys() fills scores, multiply_values() the output.
struct FewRowsBf16 : FewRowsMemory, FewRowsSoftmax {
    NonfiniteTokens nonfinite;

    FewRowsBf16(const KVSplit& p, const KVSplit& following, int64_t distance, bool near, Scratch& scratch)
        : FewRowsMemory(scratch, p.head_dim), FewRowsSoftmax(p, following, distance, near, copy) {}

    void weigh_all() {
        for (int64_t row = 0; row < rows; row++) {
            cap(scores + row * SHORT_SPLIT);
            weigh(row, scores + row * SHORT_SPLIT, [&](int64_t token, F<16> low, F<16> high) {
                const auto words = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
                _mm512_storeu_si512(weights + row * ROW_WORDS + token / 2, words);
            });
        }
    }

    // V of the step that begins at `token`, in one of two places in turn.
    TOKEND_INLINE const uint32_t* pack(int64_t token, int64_t dim, int64_t dims) {
        const int64_t step = token / INNER;
        uint32_t* words = values + step % 2 * TILE * DIMS;
        const bool zero_nonfinite = !split.all_see(groups.start + token, groups.start + token + INNER);
        const auto fetch = [&](int64_t) { prefetcher.fetch(1); };
        if (dims == DIMS) pack_values(groups, step, head_dim, dim, DIMS, zero_nonfinite, nonfinite, clean, words, fetch);
        else pack_values(groups, step, head_dim, dim, INNER, zero_nonfinite, nonfinite, clean, words, fetch);
        return words;
    }

    void write_results(const TokendAttentionSchedule* plan, int64_t index) {
        if (nonfinite.any()) set_nan();
        for (int64_t row = 0; row < rows; row++) {
            order_dims<bfloat16>(output + row * head_dim, head_dim);
            write_bfloat16_result(split, plan, index, row, {output + row * head_dim, best[row], total[row]});
        }
    }

  private:
    // Rows that see a token with nonfinite V become NaN.
    void set_nan() {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t token = first_seen(row); token < end_seen(row); token++)
                if (nonfinite.has(token)) total[row] = NAN;
    }
};

// Products by vectors of pairs: lanes are 16 tokens for scores, 16 dims for the output.
struct VectorRows : FewRowsBf16 {
    static constexpr int64_t DISTANCE = 5;

    VectorRows(const KVSplit& p, const KVSplit& following, Scratch& scratch)
        : FewRowsBf16(p, following, DISTANCE, true, scratch) {
        for (int64_t row = 0; row < rows; row++) pair_query<bfloat16>(split, row, queries + row * head_dim / 2);
    }

    void compute() {
        for (int64_t token = begin; token < end; token += TILE) {
            multiply_keys(token);
        }
        weigh_all();
        std::fill_n(output, rows * head_dim, 0.0f);
        for (int64_t token = begin; token < end; token += INNER) {
            int64_t dim = 0;
            for (; dim + DIMS <= head_dim; dim += DIMS) multiply_values<DIMS / 16>(token, dim);
            if (dim < head_dim) multiply_values<INNER / 16>(token, dim);
        }
    }

  private:
    // Calls body(first row, number of rows) with four rows at a time, then with the rest.
    TOKEND_INLINE void in_fours(auto body) {
        int64_t row = 0;
        for (; row + 4 <= rows; row += 4) body(row, std::integral_constant<int, 4>());
        if (rows - row == 3) body(row, std::integral_constant<int, 3>());
        if (rows - row == 2) body(row, std::integral_constant<int, 2>());
        if (rows - row == 1) body(row, std::integral_constant<int, 1>());
    }

    // Scores of 16 tokens.
    TOKEND_FLATTEN void multiply_keys(int64_t token) {
        for (int64_t row = 0; row < rows; row++) std::fill_n(scores + row * SHORT_SPLIT + token, 16, 0.0f);
        for (int64_t word = 0; word < head_dim / 2; word += TILE) {
            __m512i columns[16];
            // As many lines as are read, in two halves: a burst would delay the reads.
            prefetcher.fetch(TILE / GroupPrefetcher::LINES_PER_FETCH / 2);
            load_columns(groups.keys[token / TILE] + word * 2, head_dim / 2, columns);
            prefetcher.fetch(TILE / GroupPrefetcher::LINES_PER_FETCH / 2);
            in_fours([&](int64_t row, auto count) { add_scores<count>(row, token, columns, word); });
        }
    }

    template <int R>
    TOKEND_INLINE void add_scores(int64_t row, int64_t token, const __m512i (&columns)[16], int64_t word) {
        const uint32_t* query = queries + row * head_dim / 2 + word;
        float* to = scores + row * SHORT_SPLIT + token;
        __m512 sums[R];
        each<R>([&](auto r) { sums[r] = _mm512_loadu_ps(to + r * SHORT_SPLIT); });
        each<16>([&](auto w) {
            each<R>([&](auto r) {
                sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)columns[w], broadcast_pair(query + r * head_dim / 2 + w));
            });
        });
        each<R>([&](auto r) { _mm512_storeu_ps(to + r * SHORT_SPLIT, sums[r]); });
    }

    // Adds 32 tokens to V vectors of the output from `dim` on.
    template <int V>
    TOKEND_FLATTEN void multiply_values(int64_t token, int64_t dim) {
        const uint32_t* words = pack(token, dim, 16 * V);
        in_fours([&](int64_t row, auto count) { add_values<V, count>(row, token, words, output + row * head_dim + dim); });
    }

    template <int V, int R>
    TOKEND_INLINE void add_values(int64_t row, int64_t token, const uint32_t* words, float* to) {
        const uint32_t* weight = weights + row * ROW_WORDS + token / 2;
        __m512 sums[R][V];
        each<R>([&](auto r) { each<V>([&](auto v) { sums[r][v] = _mm512_loadu_ps(to + r * head_dim + 16 * v); }); });
        for (int64_t word = 0; word < TILE; word++) {
            each<V>([&](auto v) {
                const auto value = load_bytes<__m512bh>(words + word * 16 * V + 16 * v);
                each<R>([&](auto r) {
                    sums[r][v] = _mm512_dpbf16_ps(sums[r][v], broadcast_pair(weight + r * ROW_WORDS + word), value);
                });
            });
        }
        each<R>([&](auto r) { each<V>([&](auto v) { _mm512_storeu_ps(to + r * head_dim + 16 * v, sums[r][v]); }); });
    }
};

#if defined(TOKEND_AMX)

// Transposes four columns of 16 rows to four rows.
TOKEND_INLINE void transpose_four_columns(const float* from, int64_t stride, float* to) {
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
    _mm512_storeu_ps(to + SHORT_SPLIT, (__m512)_mm512_unpackhi_pd(ab, cd));
    _mm512_storeu_ps(to + 2 * SHORT_SPLIT, (__m512)_mm512_unpacklo_pd(AB, CD));
    _mm512_storeu_ps(to + 3 * SHORT_SPLIT, (__m512)_mm512_unpackhi_pd(AB, CD));
}

// Tiles 0 1: scores; 2: queries; 3 4: K.   0 1 2 3: output; 4: weights; 5 6: V.
struct FewRowsTiles {
    TileShapes keys, values;

    FewRowsTiles(int64_t rows, int64_t columns) {
        for (int tile : {0, 1, 2}) keys.set(tile, TILE, int(columns) * 4);
        for (int tile : {3, 4}) keys.set(tile, TILE);
        for (int tile : {0, 1, 2, 3, 4}) values.set(tile, int(rows));
        for (int tile : {5, 6}) values.set(tile, TILE);
    }
    ~FewRowsTiles() { _tile_release(); }
};

struct TileRows : FewRowsBf16 {
    int64_t columns;  // rows in whole fours

    // Fetches the next split while this one is computed.
    static constexpr int64_t DISTANCE = 2 * SHORT_SPLIT / TILE;

    TileRows(const KVSplit& p, const KVSplit& following, Scratch& scratch)
        : FewRowsBf16(p, following, DISTANCE, false, scratch), columns(round_up(p.rows, 4)) {
        uint32_t* pairs = reinterpret_cast<uint32_t*>(products);  // [TILE, head_dim / 2], unused
        std::fill_n(pairs, TILE * head_dim / 2, 0u);
        for (int64_t row = 0; row < rows; row++) pair_query<bfloat16>(split, row, pairs + row * head_dim / 2);
        for (int64_t step = 0; step < head_dim / INNER; step++)
            transpose(pairs + step * TILE, head_dim / 2, queries + step * TILE_WORDS, TILE);
    }

    void compute() {
        const FewRowsTiles tiles(rows, columns);
        tiles.keys.load();
        multiply_keys();
        for (int64_t token = begin; token < end; token += TILE) {
            prefetcher.fetch(head_dim / 16);
            for (int64_t row = 0; row < rows; row += 4)
                transpose_four_columns(products + token * columns + row, columns, scores + row * SHORT_SPLIT + token);
        }
        weigh_all();
        tiles.values.load();
        for (int64_t dim = 0; dim < head_dim; dim += DIMS) multiply_values(dim, std::min(DIMS, head_dim - dim));
    }

  private:
    void multiply_keys() {
        const int64_t row_bytes = head_dim * 2;
        for (int64_t token = begin; token < end; token += INNER) {
            prefetcher.fetch(head_dim / 8);
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
        const uint32_t* next = pack(begin, dim, dims);
        for (int64_t token = begin; token < end; token += INNER) {
            const uint32_t* words = next;
            if (token + INNER < end) next = pack(token + INNER, dim, dims);
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
};

#endif

template <class Kind>
void attend(const KVSplit& split, const KVSplit& following, const TokendAttentionSchedule* plan, int64_t index,
            Scratch& scratch) {
    Kind rows(split, following, scratch);
    rows.compute();
    rows.write_results(plan, index);
}

}  // namespace

bool attend_few_in_bfloat16(const KVSplit& split, const KVSplit& following, const TokendAttentionSchedule* plan,
                            int64_t index, Scratch& scratch) {
    if (!suits_bfloat16(split) || split.layer->cache_dtype != TOKEND_BFLOAT16) return false;
#if defined(TOKEND_AMX)
    if (tiles_allowed()) {
        attend<TileRows>(split, following, plan, index, scratch);
        return true;
    }
#endif
    attend<VectorRows>(split, following, plan, index, scratch);
    return true;
}

#else

bool attend_few_in_bfloat16(const KVSplit&, const KVSplit&, const TokendAttentionSchedule*, int64_t, Scratch&) {
    return false;
}

#endif

}  // namespace tokend
