// Attention of a few bfloat16 query rows (a decode) over a short split of int8 pages by products
// of bytes.
//
// A query row is rounded to 15 bits, and a weight times the scale of its V to 16 bits, both stored
// as two bytes. Sums over the dims of a row and over the tokens of a split are exact integers. So
// only the rounding of a row depends on an order, and all KV heads of a block are read in memory
// order:
//
//   block   | K h0 | K h1 | … | V h0 | V h1 | … |
//            ---- first way -->  ---- second, after the softmax ---->
//
// Sixteen tokens are processed together, one lane per token for scores; for outputs a lane is a
// dim.
#include "attention/kv_split.h"
#include "attention/softmax.h"

namespace tokend {

#if defined(__AVX512VNNI__)
namespace {

constexpr int64_t DIMS = 64;        // of a row that are processed together: a cache line
constexpr int64_t MOST_DIMS = 512;  // of which sums fit
constexpr int64_t SPLIT_GROUPS = SHORT_SPLIT / TOKEN_GROUP;
// Runs by which the prefetch is ahead of the reads. A run is K or V of a token group under all heads of a task.
constexpr int64_t RUNS_AHEAD = 4;
// Lines that are prefetched with four lines of K, and of V; the rest while weights are computed.
constexpr int64_t KEY_LINES = 4, VALUE_LINES = 3;

// Four neighbours, for all lanes: a product of bytes adds four.
TOKEND_INLINE __m512i load_four(const void* from) { return _mm512_set1_epi32(load_bytes<int32_t>(from)); }

// Sixteen neighbouring dims of 16 rows of int8 become four vectors, a row in each lane of 32 bits.
TOKEND_INLINE void transpose_dims(const int8_t* rows, int64_t stride, __m512i (&to)[4]) {
    __m512i fours[4];
    each<4>([&](auto row) {
        const int8_t* at = rows + row * stride;
        __m512i four = _mm512_castsi128_si512(load_bytes<__m128i>(at));
        four = _mm512_inserti32x4(four, load_bytes<__m128i>(at + 4 * stride), 1);
        four = _mm512_inserti32x4(four, load_bytes<__m128i>(at + 8 * stride), 2);
        fours[row] = _mm512_inserti32x4(four, load_bytes<__m128i>(at + 12 * stride), 3);
    });
    const __m512i ab = _mm512_unpacklo_epi32(fours[0], fours[1]), AB = _mm512_unpackhi_epi32(fours[0], fours[1]);
    const __m512i cd = _mm512_unpacklo_epi32(fours[2], fours[3]), CD = _mm512_unpackhi_epi32(fours[2], fours[3]);
    to[0] = _mm512_unpacklo_epi64(ab, cd);
    to[1] = _mm512_unpackhi_epi64(ab, cd);
    to[2] = _mm512_unpacklo_epi64(AB, CD);
    to[3] = _mm512_unpackhi_epi64(AB, CD);
}

// A query row: scale * (128 * high + low), in groups of four dims.
struct QueryRow {
    int8_t* high;  // [head_dim]
    int8_t* low;   // [head_dim]
    float scale;
    int32_t high_start[MOST_SCALES], low_start[MOST_SCALES];  // of the sums over each part

    // Keys are multiplied as unsigned bytes with an offset of 128.
    void round(const float* query, int64_t head_dim, int64_t parts) {
        constexpr float LARGEST = 127 * 128;
        F<16> largest = {}, nonfinite = {};
        for (int64_t dim = 0; dim < head_dim; dim += 16) {
            const F<16> value = load<16>(query + dim);
            largest = maximum<16>(largest, maximum<16>(value, -value));
            nonfinite += value * 0.0f;
        }
        const float most = std::max(max_lanes<16>(largest), LEAST_LARGEST);
        scale = sum_lanes<16>(nonfinite) == 0.0f ? most / LARGEST : std::numeric_limits<float>::quiet_NaN();
        const float inverse = scale == scale ? LARGEST / most : 0.0f;
        const int64_t dims = head_dim / parts;
        for (int64_t part = 0; part < parts; part++) {
            __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
            for (int64_t dim = part * dims; dim < (part + 1) * dims; dim += 16) {
                // NaN becomes zero here; its scale is NaN.
                const auto value = _mm512_maskz_mov_ps(scale == scale ? 0xffff : 0, (__m512)load<16>(query + dim));
                const __m512i whole = (__m512i)nearest<16>((F<16>)value * inverse);
                const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
                const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7));
                _mm_store_si128((__m128i*)(high + dim), _mm512_cvtepi32_epi8(upper));
                _mm_store_si128((__m128i*)(low + dim), _mm512_cvtepi32_epi8(lower));
                high_sum = _mm512_add_epi32(high_sum, upper);
                low_sum = _mm512_add_epi32(low_sum, lower);
            }
            high_start[part] = -128 * _mm512_reduce_add_epi32(high_sum);
            low_start[part] = -128 * _mm512_reduce_add_epi32(low_sum);
        }
    }
};

// Prefetches lines of memory in the order in which they will be read.
class RunPrefetcher {
  public:
    RunPrefetcher(const int8_t* const* runs, int64_t run_bytes) : runs_(runs), run_bytes_(run_bytes) { next_run(); }

    // Not the compiler's builtin: a function that only prefetches counts as pure and is dropped.
    TOKEND_INLINE void fetch(int64_t lines) {
        for (int64_t line = 0; line < lines; line++) {
            asm volatile("prefetcht1 %0" : : "m"(*at_));
            at_ += 64;
            if (at_ >= end_) next_run();
        }
    }

  private:
    void next_run() {
        at_ = *runs_++;
        end_ = at_ + run_bytes_;
    }

    const int8_t* const* runs_;
    int64_t run_bytes_;
    const int8_t *at_, *end_;
};

// Rows of one KV head and their intermediate results.
struct Head {
    KVSplit split;
    QueryRow* queries;     // [rows]
    float* scores;         // [rows, SHORT_SPLIT], then weights
    uint8_t* weights;      // [parts, rows, 2, SHORT_SPLIT]: upper and lower bytes
    float* weight_scales;  // [parts, rows]
    int32_t* sums;         // [head_dim / DIMS, rows, 2, DIMS]
    float* best;           // [rows]
    float* total;          // [rows]
};

// One short split of all heads of a task.
class FewRowsTask {
  public:
    FewRowsTask(const KVSplit& first, int64_t heads, const KVSplit& following, Scratch& scratch)
        : step_(first.step), layer_(first.layer), head_dim_(first.head_dim), rows_(first.rows), heads_(heads),
          parts_(num_scales(head_dim_)), start_(first.begin / SHORT_SPLIT * SHORT_SPLIT),
          begin_((first.begin - start_) / TOKEN_GROUP * TOKEN_GROUP), end_(round_up(first.end - start_, TOKEN_GROUP)),
          prefetcher_(locate(first, following), heads * layer_->head_stride) {
        const auto room = [&](size_t bytes) { return (bytes + 63) / 64 * 16; };
        const int64_t of_head = room(rows_ * sizeof(QueryRow)) + room(2 * rows_ * head_dim_) + rows_ * SHORT_SPLIT +
                                room(2 * parts_ * rows_ * SHORT_SPLIT) + 3 * room(MOST_SCALES * rows_ * sizeof(float)) +
                                room(2 * rows_ * head_dim_ * sizeof(int32_t));
        float* at = scratch.floats(heads * (of_head + room(sizeof(Head))) + head_dim_);
        const auto take = [&](size_t bytes) { return std::exchange(at, at + room(bytes)); };
        all_ = reinterpret_cast<Head*>(take(heads * sizeof(Head)));
        row_ = take(head_dim_ * sizeof(float));
        for (int64_t number = 0; number < heads; number++) {
            Head& head = *new (all_ + number) Head{first.of_head(number), {}, {}, {}, {}, {}, {}, {}};
            head.queries = reinterpret_cast<QueryRow*>(take(rows_ * sizeof(QueryRow)));
            auto* bytes = reinterpret_cast<int8_t*>(take(2 * rows_ * head_dim_));
            head.scores = take(rows_ * SHORT_SPLIT * sizeof(float));
            head.weights = reinterpret_cast<uint8_t*>(take(2 * parts_ * rows_ * SHORT_SPLIT));
            head.weight_scales = take(MOST_SCALES * rows_ * sizeof(float));
            head.best = take(rows_ * sizeof(float));
            head.total = take(rows_ * sizeof(float));
            head.sums = reinterpret_cast<int32_t*>(take(2 * rows_ * head_dim_ * sizeof(int32_t)));
            std::fill_n(head.sums, 2 * rows_ * head_dim_, 0);
            for (int64_t row = 0; row < rows_; row++, bytes += 2 * head_dim_) {
                head.split.rotated_query(row, row_);
                head.queries[row].high = bytes;
                head.queries[row].low = bytes + head_dim_;
                head.queries[row].round(row_, head_dim_, parts_);
            }
        }
        const int64_t lines_of_scales = 2 * heads * (layer_->head_stride - TOKEN_GROUP * head_dim_) / 64;
        const int64_t left = heads * head_dim_ / 16 * (8 - KEY_LINES - VALUE_LINES) + lines_of_scales;
        weigh_lines_ = (end_ - begin_) / TOKEN_GROUP * left / (rows_ * heads);
    }

    void compute() {
        const int64_t groups = (end_ - begin_) / TOKEN_GROUP;
        for (int64_t group = 0; group < groups; group++)
            for (int64_t head = 0; head < heads_; head++) score(head, group);
        for (int64_t head = 0; head < heads_; head++) weigh(head);
        for (int64_t group = 0; group < groups; group++)
            for (int64_t head = 0; head < heads_; head++) add(head, group);
    }

    void write_results(const TokendAttentionSchedule* plan, int64_t index) {
        for (int64_t number = 0; number < heads_; number++) {
            const Head& head = all_[number];
            for (int64_t row = 0; row < rows_; row++) {
                finish(head, row, row_);
                write_result(head.split, plan, index, row, {row_, head.best[row], head.total[row]});
            }
        }
    }

  private:
    // Rows in the order of reads, followed by those of the next split.
    const int8_t* const* locate(const KVSplit& first, const KVSplit& following) {
        const int64_t groups = (end_ - begin_) / TOKEN_GROUP, block_size = step_->block_size;
        const auto scales_after = [&](const int8_t* rows, int64_t offset) {
            return rows + (block_size - offset) * head_dim_ + offset * int64_t(sizeof(float));
        };
        first.each_group<int8_t>(
            start_ + begin_, start_ + end_,
            [&](int64_t group, const int8_t* keys, const int8_t* values, int64_t offset) {
                runs_[group] = keys;
                runs_[groups + group] = values;
                scales_[group] = scales_after(keys, offset);
                scales_[groups + group] = scales_after(values, offset);
            });
        std::fill_n(runs_ + 2 * groups, RUNS_AHEAD + 1, runs_[2 * groups - 1]);
        const int64_t from = following.begin / TOKEN_GROUP * TOKEN_GROUP;
        following.each_group<int8_t>(
            from, std::min(following.end, from + (RUNS_AHEAD + 1) * TOKEN_GROUP),
            [&](int64_t group, const int8_t* keys, const int8_t*, int64_t) { runs_[2 * groups + group] = keys; });
        return runs_ + std::min(RUNS_AHEAD, 2 * groups);
    }

    // Scales of a part of the rows of a run, those of K or of V of a head.
    TOKEND_INLINE const float* scales_of(int64_t run, int64_t head, int64_t part) const {
        return reinterpret_cast<const float*>(scales_[run] + head * layer_->head_stride) + part * step_->block_size;
    }

    void score(int64_t head, int64_t group) {
        int64_t row = 0;
        for (; row + 4 <= rows_; row += 4) score_rows<4>(head, row, group);
        if (rows_ - row == 3) score_rows<3>(head, row, group);
        else if (rows_ - row == 2) score_rows<2>(head, row, group);
        else if (rows_ - row == 1) score_rows<1>(head, row, group);
    }

    template <int R>
    TOKEND_FLATTEN void score_rows(int64_t number, int64_t row, int64_t group) {
        const Head& head = all_[number];
        const int8_t* keys = runs_[group] + number * layer_->head_stride;
        const QueryRow* queries = head.queries + row;
        const int64_t dims = head_dim_ / parts_;
        F<16> scores[R];
        for (int64_t part = 0; part < parts_; part++) {
            __m512i high[R], low[R];
            each<R>([&](auto r) {
                high[r] = _mm512_set1_epi32(queries[r].high_start[part]);
                low[r] = _mm512_set1_epi32(queries[r].low_start[part]);
            });
            for (int64_t dim = part * dims; dim < (part + 1) * dims; dim += 16) {
                __m512i transposed[4];
                prefetcher_.fetch(row == 0 ? KEY_LINES : 0);
                transpose_dims(keys + dim, head_dim_, transposed);
                each<4>([&](auto i) {
                    const __m512i key = _mm512_xor_si512(transposed[i], _mm512_set1_epi8(-128));
                    each<R>([&](auto r) {
                        high[r] = _mm512_dpbusd_epi32(high[r], key, load_four(queries[r].high + dim + 4 * i));
                        low[r] = _mm512_dpbusd_epi32(low[r], key, load_four(queries[r].low + dim + 4 * i));
                    });
                });
            }
            const F<16> scale = load<16>(scales_of(group, number, part));
            each<R>([&](auto r) {
                const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r], 7), low[r]);
                const F<16> dot = (F<16>)_mm512_cvtepi32_ps(sum) * queries[r].scale;
                scores[r] = part == 0 ? dot * scale : multiply_add<16>(dot, scale, scores[r]);
            });
        }
        each<R>([&](auto r) {
            store<16>(head.scores + (row + r) * SHORT_SPLIT + begin_ + group * TOKEN_GROUP, scores[r]);
        });
    }

    // Converts scores to weights, and weights times the scales of V to bytes.
    void weigh(int64_t number) {
        const Head& head = all_[number];
        for (int64_t row = 0; row < rows_; row++) {
            prefetcher_.fetch(weigh_lines_);
            float* scores = head.scores + row * SHORT_SPLIT;
            const int64_t first = std::max(head.split.first(row), head.split.begin) - start_;
            const int64_t seen = std::min(head.split.limit(row), head.split.end) - start_;
            if (head.split.soft_cap > 0.0f)
                for (int64_t at = begin_; at < end_; at += 16)
                    store<16>(scores + at, capped<16>(load<16>(scores + at), head.split.scale, head.split.soft_cap));
            for (int64_t at = begin_; at < std::min(first, end_); at++) scores[at] = NO_SCORE;
            for (int64_t at = std::max(seen, begin_); at < end_; at++) scores[at] = NO_SCORE;
            F<16> most = splat<16>(NO_SCORE);
            for (int64_t at = begin_; at < end_; at += 16) most = larger(most, load<16>(scores + at));
            head.best[row] = _mm512_reduce_max_ps((__m512)most);
            const Weigher weight(splat<16>(head.best[row]), head.split.scale * LOG2_E);
            F<16> sum = {};
            for (int64_t at = begin_; at < end_; at += 16) {
                const F<16> of = weight(load<16>(scores + at));
                store<16>(scores + at, of);
                sum += of;
            }
            head.total[row] = sum_lanes<16>(sum);
            for (int64_t part = 0; part < parts_; part++) round_weights(number, row, part);
        }
    }

    void round_weights(int64_t number, int64_t row, int64_t part) const {
        const Head& head = all_[number];
        constexpr float LARGEST = 65535;
        const float* weights = head.scores + row * SHORT_SPLIT;
        alignas(64) float products[SHORT_SPLIT];
        F<16> most = {}, sum = {};  // NaN if a product is NaN
        int64_t run = (end_ - begin_) / TOKEN_GROUP;
        for (int64_t at = begin_; at < end_; at += TOKEN_GROUP) {
            const F<16> scale = load<16>(scales_of(run++, number, part));
            const F<16> product = scaled(load<16>(weights + at), scale);
            store<16>(products + at, product);
            most = larger(most, product);
            sum += product;
        }
        const float largest = std::max(_mm512_reduce_max_ps((__m512)most), LEAST_LARGEST);
        if (std::isnan(sum_lanes<16>(sum))) head.total[row] = std::numeric_limits<float>::quiet_NaN();
        head.weight_scales[part * rows_ + row] = largest / LARGEST;
        const F<16> inverse = splat<16>(LARGEST / largest);
        uint8_t* high = head.weights + (part * rows_ + row) * 2 * SHORT_SPLIT;
        for (int64_t at = begin_; at < end_; at += 16) {
            const __m512i whole = _mm512_cvtps_epi32((__m512)(load<16>(products + at) * inverse));
            _mm_store_si128((__m128i*)(high + at), _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
            _mm_store_si128((__m128i*)(high + SHORT_SPLIT + at), _mm512_cvtepi32_epi8(whole));
        }
    }

    void add(int64_t head, int64_t group) {
        int64_t row = 0;
        for (; row + 3 <= rows_; row += 3) add_rows<3>(head, row, group);
        if (rows_ - row == 2) add_rows<2>(head, row, group);
        else if (rows_ - row == 1) add_rows<1>(head, row, group);
    }

    template <int R>
    TOKEND_FLATTEN void add_rows(int64_t number, int64_t row, int64_t group) {
        const Head& head = all_[number];
        const int8_t* values = runs_[(end_ - begin_) / TOKEN_GROUP + group] + number * layer_->head_stride;
        const int64_t token = begin_ + group * TOKEN_GROUP;
        for (int64_t dim = 0; dim < head_dim_; dim += DIMS) {
            const int64_t part = dim * parts_ / head_dim_;
            int32_t* at = head.sums + (dim / DIMS * rows_ + row) * 2 * DIMS;
            const uint8_t* weights = head.weights + (part * rows_ + row) * 2 * SHORT_SPLIT + token;
            __m512i sums[2 * R][4];
            each<2 * R>([&](auto r) { each<4>([&](auto i) { sums[r][i] = _mm512_load_si512(at + r * DIMS + 16 * i); }); });
            each<4>([&](auto four) {
                prefetcher_.fetch(row == 0 ? VALUE_LINES : 0);
                const int8_t* from = values + dim + 4 * four * head_dim_;
                const auto a = load_bytes<__m512i>(from), b = load_bytes<__m512i>(from + head_dim_);
                const auto c = load_bytes<__m512i>(from + 2 * head_dim_), d = load_bytes<__m512i>(from + 3 * head_dim_);
                const __m512i ab = _mm512_unpacklo_epi8(a, b), AB = _mm512_unpackhi_epi8(a, b);
                const __m512i cd = _mm512_unpacklo_epi8(c, d), CD = _mm512_unpackhi_epi8(c, d);
                const __m512i words[4] = {_mm512_unpacklo_epi16(ab, cd), _mm512_unpackhi_epi16(ab, cd),
                                          _mm512_unpacklo_epi16(AB, CD), _mm512_unpackhi_epi16(AB, CD)};
                each<2 * R>([&](auto r) {
                    const __m512i weight = load_four(weights + r * SHORT_SPLIT + 4 * four);
                    each<4>([&](auto i) { sums[r][i] = _mm512_dpbusd_epi32(sums[r][i], weight, words[i]); });
                });
            });
            each<2 * R>([&](auto r) { each<4>([&](auto i) { _mm512_store_si512(at + r * DIMS + 16 * i, sums[r][i]); }); });
        }
    }

    // The output of a row, not yet divided by its total.
    //   sums, of each 64 dims:   0-3 16-19 32-35 48-51   4-7 20-23 …   8-11 …   12-15 …
    void finish(const Head& head, int64_t row, float* output) const {
        for (int64_t dim = 0; dim < head_dim_; dim += DIMS) {
            const int32_t* at = head.sums + (dim / DIMS * rows_ + row) * 2 * DIMS;
            const float scale = head.weight_scales[dim * parts_ / head_dim_ * rows_ + row];
            // Vector i has the dims 4 i … 4 i + 3 of every 16: a lane of 128 bits.
            for (int64_t i = 0; i < 4; i++) {
                const __m512i upper = _mm512_slli_epi32(_mm512_load_si512(at + 16 * i), 8);
                const __m512i sum = _mm512_add_epi32(upper, _mm512_load_si512(at + DIMS + 16 * i));
                const __m512 value = (__m512)((F<16>)_mm512_cvtepi32_ps(sum) * scale);
                each<4>([&](auto lane) {
                    _mm_store_ps(output + dim + 16 * lane + 4 * i, _mm512_extractf32x4_ps(value, lane));
                });
            }
        }
    }

    const TokendAttentionStep* step_;
    const TokendAttentionLayer* layer_;
    int64_t head_dim_, rows_, heads_, parts_;
    int64_t start_, begin_, end_;  // the cut before the split; from there, whole groups of it
    const int8_t* runs_[2 * SPLIT_GROUPS + RUNS_AHEAD + 1];  // 16 rows per entry: K, V, then the next split
    const int8_t* scales_[2 * SPLIT_GROUPS];
    Head* all_;
    float* row_;  // of head_dim numbers
    int64_t weigh_lines_;  // prefetched while the weights of a row are computed
    RunPrefetcher prefetcher_;
};

}  // namespace

bool attend_few_in_int8(const KVSplit& first, int64_t heads, const KVSplit& following,
                        const TokendAttentionSchedule* plan, int64_t index, Scratch& scratch) {
    const TokendAttentionLayer* layer = first.layer;
    if (layer->dtype != TOKEND_BFLOAT16 || layer->cache_dtype != TOKEND_INT8) return false;
    if (first.head_dim % DIMS != 0 || first.head_dim > MOST_DIMS) return false;
    if (first.step->block_size % TOKEN_GROUP != 0) return false;
    FewRowsTask task(first, heads, following, scratch);
    task.compute();
    task.write_results(plan, index);
    return true;
}

#else

bool attend_few_in_int8(const KVSplit&, int64_t, const KVSplit&, const TokendAttentionSchedule*, int64_t, Scratch&) {
    return false;
}

#endif

}  // namespace tokend
