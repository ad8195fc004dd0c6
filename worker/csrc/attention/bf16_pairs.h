// Shared by the kernels with products of bfloat16: rows of K and V in the layout of their products,
// and the arithmetic of the softmax.
//
// The layout is that of the tile unit. A product of tiles is c [16, 16] += a [16, 32] . b [32, 16].
// Neighbours along the inner dimension share a word of 32 bits:
//
//   a   16 rows of 16 words          b   16 rows (one word of the inner dimension) of 16 columns
//
// Scores are K . Q^T, so rows of K in a page are an `a`. Rows of an int8 page are converted in two
// halves of 32 dims, dim d beside d + 16, and the query has the same order.
//
// The softmax is that of a whole short split (drawn in attention.cpp): the largest score first, then
// weights, which become bfloat16, and products of all its tokens into one float32 sum.
#pragma once

#include "attention/kv_split.h"
#include "attention/softmax.h"

#if defined(__AVX512BF16__)

namespace tokend {

constexpr int64_t TILE = 16;        // rows, words in a row
constexpr int64_t TILE_WORDS = 256;
constexpr int64_t INNER = 32;       // numbers in a row of a tile; divides SCALED_DIMS

// Whether these kernels support the layer: whole tiles, and results not required in float32.
inline bool suits_bfloat16(const KVSplit& split) {
    const TokendAttentionLayer* layer = split.layer;
    return layer->dtype == TOKEND_BFLOAT16 && split.head_dim % INNER == 0 && split.rotary_dim % INNER == 0 &&
           (layer->cache_dtype == TOKEND_BFLOAT16 || layer->cache_dtype == TOKEND_INT8);
}

// ---- words of two numbers ------------------------------------------------------

TOKEND_INLINE __m512bh broadcast_pair(const void* from) {
    return (__m512bh)_mm512_set1_epi32(load_bytes<int32_t>(from));
}

// The upper halves of two vectors of floats: exact for numbers with at most 8 significant bits.
TOKEND_INLINE __m512i pair_exact(__m512 low, __m512 high) {
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    // upper & high | ~upper & (low >> 16)
    return _mm512_ternarylogic_epi32(upper, (__m512i)high, _mm512_srli_epi32((__m512i)low, 16), 0xca);
}

TOKEND_INLINE __m512 widen(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes<__m128i>(from)));
}

// Rounds two vectors of floats to the nearest bfloat16.
TOKEND_INLINE __m512i pair_rounded(__m512 low, __m512 high) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

TOKEND_INLINE void pair_dims(const int8_t* row, int64_t head_dim, uint32_t* words) {
    for (int64_t dim = 0; dim < head_dim; dim += INNER)
        _mm512_storeu_si512(words + dim / 2, pair_exact(widen(row + dim), widen(row + dim + 16)));
}

// The query of a row, rotated (token_rows.h) and rounded, in the order of the keys.
template <class C>
TOKEND_INLINE void pair_query(const KVSplit& split, int64_t row, uint32_t* words) {
    const int64_t token = split.token(row), head_dim = split.head_dim, half = split.rotary_dim / 2;
    const int64_t kept = head_dim - split.rotary_dim;
    const auto* query = static_cast<const bfloat16*>(split.layer->query) + token * split.layer->query_stride +
                        split.head(row) * head_dim;
    const float* rotation = split.layer->rotation + token * split.rotary_dim;
    auto* rotated = reinterpret_cast<bfloat16*>(words);
    std::copy_n(query, kept, rotated);
    auto *first = rotated + kept, *second = first + half;
    for (int64_t dim = 0; dim < half; dim += 16) {
        const F<16> a = load<16>(query + kept + dim), b = load<16>(query + kept + half + dim);
        const F<16> cosine = load<16>(rotation + dim), sine = load<16>(rotation + half + dim);
        store<16>(first + dim, a * cosine - b * sine);
        store<16>(second + dim, b * cosine + a * sine);
    }
    if constexpr (QUANTISED<C>) {
        for (int64_t dim = 0; dim < head_dim; dim += INNER) {
            const F<16> low = load<16>(rotated + dim), high = load<16>(rotated + dim + 16);
            _mm512_storeu_si512(words + dim / 2, pair_exact((__m512)low, (__m512)high));
        }
    }
}

// write_result for a bfloat16 output.
inline void write_bfloat16_result(const KVSplit& split, const TokendAttentionSchedule* plan, int64_t index, int64_t row,
                                  const RowResult& result) {
    if (split.tile->num_splits != 1) return write_result(split, plan, index, row, result);
    const int64_t at = split.token(row) * split.step->num_heads + split.head(row);
    auto* to = static_cast<bfloat16*>(split.layer->output) + at * split.value_dim;
    const float total = whole_total(split, row, result);
    for (int64_t dim = 0; dim < split.value_dim; dim += 16) store<16>(to + dim, load<16>(result.output + dim) / total);
}

// V of two neighbouring tokens, one word per dim; `head_dim` words. For bfloat16 every 32 dims are
// in the order of `value_dim`.
TOKEND_INLINE void pair_tokens(const int8_t* first, const int8_t* second, int64_t head_dim, uint32_t* words) {
    for (int64_t dim = 0; dim < head_dim; dim += 16)
        _mm512_storeu_si512(words + dim, pair_exact(widen(first + dim), widen(second + dim)));
}

TOKEND_INLINE void pair_tokens(const bfloat16* first, const bfloat16* second, int64_t head_dim, uint32_t* words) {
    for (int64_t dim = 0; dim < head_dim; dim += INNER) {
        const auto a = load_bytes<__m512i>(first + dim), b = load_bytes<__m512i>(second + dim);
        _mm512_storeu_si512(words + dim, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(words + dim + 16, _mm512_unpackhi_epi16(a, b));
    }
}

// Restores the order of dims of a row after the products.
//   bfloat16, of each 32:   0-3 8-11 16-19 24-27   4-7 12-15 20-23 28-31
template <class C>
TOKEND_INLINE void order_dims(float* row, int64_t head_dim) {
    if constexpr (!QUANTISED<C>) {
        for (float* at = row; at < row + head_dim; at += INNER) {
            const __m512 a = (__m512)load<16>(at), b = (__m512)load<16>(at + 16);
            const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
            const __m512i high = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
            store<16>(at, (F<16>)_mm512_permutex2var_ps(a, low, b));
            store<16>(at + 16, (F<16>)_mm512_permutex2var_ps(a, high, b));
        }
    }
}

// Whether a row has NaN or infinity; if so `clean` is a copy with zeros in their place.
inline bool has_nonfinite(const bfloat16* row, int64_t head_dim, bfloat16* clean) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    uint32_t any = 0;
    for (int64_t dim = 0; dim < head_dim; dim += INNER) {
        const auto values = load_bytes<__m512i>(row + dim);
        const __mmask32 nonfinite = _mm512_cmpeq_epi16_mask(_mm512_and_si512(values, exponent), exponent);
        _mm512_storeu_si512(clean + dim, _mm512_maskz_mov_epi16(~nonfinite, values));
        any |= nonfinite;
    }
    return any != 0;
}

// ---- 16 x 16 words ---------------------------------------------------------------

// Transposes 16 rows of words, `stride` words apart.
TOKEND_INLINE void load_columns(const void* base, int64_t stride, __m512i (&rows)[16]) {
    const auto* from = static_cast<const uint32_t*>(base);
    __m512i fours[16];
    // Four words of a row in each 128 bits: of rows 0, 4, 8, 12, then 1, 5, 9, 13, …
    each<4>([&](auto row) {
        each<4>([&](auto part) {
            const uint32_t* at = from + row * stride + part * 4;
            __m512i four = _mm512_castsi128_si512(load_bytes<__m128i>(at));
            four = _mm512_inserti32x4(four, load_bytes<__m128i>(at + 4 * stride), 1);
            four = _mm512_inserti32x4(four, load_bytes<__m128i>(at + 8 * stride), 2);
            fours[part * 4 + row] = _mm512_inserti32x4(four, load_bytes<__m128i>(at + 12 * stride), 3);
        });
    });
    each<4>([&](auto part) {
        const __m512i *a = fours + part * 4;
        const __m512i ab = _mm512_unpacklo_epi32(a[0], a[1]), AB = _mm512_unpackhi_epi32(a[0], a[1]);
        const __m512i cd = _mm512_unpacklo_epi32(a[2], a[3]), CD = _mm512_unpackhi_epi32(a[2], a[3]);
        rows[part * 4] = _mm512_unpacklo_epi64(ab, cd);
        rows[part * 4 + 1] = _mm512_unpackhi_epi64(ab, cd);
        rows[part * 4 + 2] = _mm512_unpacklo_epi64(AB, CD);
        rows[part * 4 + 3] = _mm512_unpackhi_epi64(AB, CD);
    });
}

// to[j][i] = from[i][j], rows `stride` words apart.
TOKEND_INLINE void transpose(const uint32_t* from, int64_t stride, uint32_t* to, int64_t to_stride) {
    __m512i rows[16];
    load_columns(from, stride, rows);
    each<16>([&](auto row) { _mm512_storeu_si512(to + row * to_stride, rows[row]); });
}

// ---- the tokens of a short split ---------------------------------------------------

// K and V of one short split in groups of 16 contiguous tokens; missing tokens are zeros.
template <class C>
struct TokenGroups {
    static constexpr int64_t SPLIT_GROUPS = SHORT_SPLIT / TILE;

    int64_t start, from, to;  // the cut before the short split, and its tokens
    const C* keys[SPLIT_GROUPS];
    const C* values[SPLIT_GROUPS];
    alignas(64) float key_scales[QUANTISED<C> ? MOST_SCALES * SHORT_SPLIT : 1];  // [part, SHORT_SPLIT]
    alignas(64) float value_scales[QUANTISED<C> ? MOST_SCALES * SHORT_SPLIT : 1];

    static constexpr int64_t copy_size(int64_t head_dim) { return 2 * SHORT_SPLIT * head_dim; }

    // Steps of 32 tokens with at least one token: [first_step, end_step).
    int64_t first_step() const { return (from - start) / INNER; }
    int64_t end_step() const { return (to - start + INNER - 1) / INNER; }

    // Tokens [begin, end) of one short split. `copy`: copy_size(head_dim) elements, for rows that are not
    // contiguous in a page.
    void locate(const KVSplit& split, int64_t begin, int64_t end, C* copy) {
        start = begin / SHORT_SPLIT * SHORT_SPLIT;
        from = begin;
        to = end;
        const int64_t first = first_step() * 2, last = end_step() * 2;
        if (split.step->block_size % TILE == 0) {
            // The groups at both ends may be incomplete.
            const int64_t whole = (from - start + TILE - 1) / TILE, whole_end = (to - start) / TILE;
            split.each_group<C>(start + whole * TILE, start + whole_end * TILE,
                                [&](int64_t group, const C* key_rows, const C* value_rows, int64_t) {
                                    keys[whole + group] = key_rows;
                                    values[whole + group] = value_rows;
                                });
            for (int64_t group = first; group < last; group++)
                if (group < whole || group >= whole_end) locate_group(split, group, copy);
        } else {
            for (int64_t group = first; group < last; group++) locate_group(split, group, copy);
        }
        if constexpr (QUANTISED<C>) {
            std::fill_n(key_scales, num_scales(split.head_dim) * SHORT_SPLIT, 0.0f);
            std::fill_n(value_scales, num_scales(split.head_dim) * SHORT_SPLIT, 0.0f);
            split.scales(from, to, SHORT_SPLIT, key_scales + (from - start), value_scales + (from - start));
        }
    }

  private:
    void locate_group(const KVSplit& split, int64_t group, C* copy) {
        const int64_t head_dim = split.head_dim, first = start + group * TILE;
        const int64_t low = std::clamp(from, first, first + TILE), high = std::clamp(to, first, first + TILE);
        const C *key_rows[TILE], *value_rows[TILE];
        C *key_copy = copy + group * 2 * TILE * head_dim, *value_copy = key_copy + TILE * head_dim;
        std::memset(static_cast<void*>(key_copy), 0, 2 * TILE * head_dim * sizeof(C));
        keys[group] = key_copy;
        values[group] = value_copy;
        split.locate(low, high, key_rows, value_rows);
        for (int64_t token = low; token < high; token++) {
            std::copy_n(key_rows[token - low], head_dim, key_copy + (token - first) * head_dim);
            std::copy_n(value_rows[token - low], head_dim, value_copy + (token - first) * head_dim);
        }
    }
};

// Prefetches rows a few lines at a time, in the order of use and some groups ahead of it, so that
// memory never waits for arithmetic: K and V of the split, then of the next one. Groups that cross
// pages are skipped.
//
// Lines go to the L2 cache; with `near`, also to the L1 cache one group before their use. Asking memory
// for lines of the L1 cache at once reads at half the rate on a Zen 4.
struct GroupPrefetcher {
    static constexpr int64_t LINES_PER_FETCH = 4;

    const char* parts[4 * SHORT_SPLIT / TILE];  // 16 rows per entry
    int64_t count = 0, index = 0, at = 0, size;
    int64_t distance;  // in groups
    bool near;

    GroupPrefetcher(const KVSplit& now, const KVSplit& following, int64_t groups, bool near_too)
        : size(TILE * now.head_dim * sizeof(bfloat16)), distance(groups), near(near_too) {
        if (now.step->block_size % TILE != 0) return;
        append(now);
        index = std::min(distance, count);
        if (following.tile != now.tile || following.begin != now.begin) append(following);
    }

    // Appends K and V of a split, or of the first SHORT_SPLIT tokens of a longer one.
    void append(const KVSplit& split) {
        const int64_t from = split.begin / TILE * TILE, end = next_cut(split.begin, SHORT_SPLIT, split.end);
        const int64_t groups = (end - from + TILE - 1) / TILE;
        const char** to = parts + count;
        split.each_group<bfloat16>(from, end, [&](int64_t group, const bfloat16* keys, const bfloat16* values, int64_t) {
            to[group] = reinterpret_cast<const char*>(keys);
            to[groups + group] = reinterpret_cast<const char*>(values);
        });
        count += 2 * groups;
    }

    // Prefetches `times` times LINES_PER_FETCH lines.
    TOKEND_INLINE void fetch(int64_t times) {
        for (int64_t i = 0; i < times && index < count; i++) {
            const char* lines = parts[index] + at;
            for (int64_t line = 0; line < LINES_PER_FETCH; line++) __builtin_prefetch(lines + line * 64, 0, 2);
            if (near) {
                const char* next = parts[index - distance + 1] + at;
                for (int64_t line = 0; line < LINES_PER_FETCH; line++) __builtin_prefetch(next + line * 64, 0, 3);
            }
            at += LINES_PER_FETCH * 64;
            if (at >= size) {
                at = 0;
                index++;
            }
        }
    }
};

// Sixteen rows of K as an `a`: in place, or converted into `copy`.
TOKEND_INLINE const void* key_tile(const bfloat16* rows, int64_t, uint32_t*) { return rows; }

TOKEND_INLINE const void* key_tile(const int8_t* rows, int64_t head_dim, uint32_t* copy) {
    for (int64_t row = 0; row < TILE; row++) pair_dims(rows + row * head_dim, head_dim, copy + row * head_dim / 2);
    return copy;
}

// Tokens of a short split whose V has NaN or infinity.
struct NonfiniteTokens {
    uint64_t bits[SHORT_SPLIT / 64] = {};

    bool any() const { return (bits[0] | bits[1] | bits[2] | bits[3]) != 0; }
    void set(int64_t token) { bits[token / 64] |= uint64_t(1) << token % 64; }
    bool has(int64_t token) const { return bits[token / 64] >> token % 64 & 1; }
};

// V of 32 tokens, `dims` dims from `dim` on, as a `b`: [16, dims] words. With `zero_nonfinite`, NaN
// and infinity are replaced by zero, because zero times NaN is NaN and must not reach rows that do
// not see the token.
template <class C>
TOKEND_INLINE void pack_values(const TokenGroups<C>& groups, int64_t step, int64_t head_dim, int64_t dim, int64_t dims,
                               bool zero_nonfinite, NonfiniteTokens& nonfinite, C* clean, uint32_t* words, auto fetch) {
    for (int64_t token = 0; token < INNER; token += 2, words += dims) {
        fetch(token);
        const C *first = groups.values[step * 2 + token / TILE] + token % TILE * head_dim + dim;
        const C *second = first + head_dim;
        if constexpr (!QUANTISED<C>) {
            if (zero_nonfinite) {
                if (has_nonfinite(first, dims, clean)) nonfinite.set(step * INNER + token);
                if (has_nonfinite(second, dims, clean + dims)) nonfinite.set(step * INNER + token + 1);
                first = clean;
                second = clean + dims;
            }
        }
        pair_tokens(first, second, dims, words);
    }
}

}  // namespace tokend

#endif
