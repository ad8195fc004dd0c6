// Products with FP8 weights: parts of a pair of panels are unpacked to bfloat16 and multiplied as such.
#include "products/bf16/bf16_sums.h"
#include "products/fp8/fp8_format.h"

namespace tokend {
namespace {

// The prefetch distance of codes in bytes.
constexpr int64_t FP8_FETCH_AHEAD = 4096;

// Two lines of codes to two lines of bfloat16. Its exponent is that of the code plus 120; codes with an
// exponent of 0 are 2^-9 times their fraction, which bfloat16 has as normal numbers.
#if defined(__AVX2__)

// As many bytes as a vector has, in lanes of 16.
#if defined(__AVX512BW__)
struct Bytes {
    typedef __m512i V;
    typedef __mmask64 Mask;
    static TOKEND_INLINE V all(int byte) { return _mm512_set1_epi8(char(byte)); }
    static TOKEND_INLINE V table(const uint8_t (&bytes)[16]) { return _mm512_broadcast_i32x4(load_bytes<__m128i>(bytes)); }
    static TOKEND_INLINE V look_up(V table, V index) { return _mm512_shuffle_epi8(table, index); }
    static TOKEND_INLINE V up(V words) { return _mm512_slli_epi16(words, 4); }
    static TOKEND_INLINE V down(V words) { return _mm512_srli_epi16(words, 4); }
    static TOKEND_INLINE Mask without(V bytes, int bits) { return _mm512_testn_epi8_mask(bytes, all(bits)); }
    static TOKEND_INLINE bool any(Mask mask) { return mask != 0; }
    static TOKEND_INLINE V choose(Mask mask, V yes, V no) { return _mm512_mask_mov_epi8(no, mask, yes); }
    static TOKEND_INLINE V first(V low, V high) { return _mm512_unpacklo_epi8(low, high); }
    static TOKEND_INLINE V second(V low, V high) { return _mm512_unpackhi_epi8(low, high); }
};
#else
struct Bytes {
    typedef __m256i V;
    typedef __m256i Mask;
    static TOKEND_INLINE V all(int byte) { return _mm256_set1_epi8(char(byte)); }
    static TOKEND_INLINE V table(const uint8_t (&bytes)[16]) { return _mm256_broadcastsi128_si256(load_bytes<__m128i>(bytes)); }
    static TOKEND_INLINE V look_up(V table, V index) { return _mm256_shuffle_epi8(table, index); }
    static TOKEND_INLINE V up(V words) { return _mm256_slli_epi16(words, 4); }
    static TOKEND_INLINE V down(V words) { return _mm256_srli_epi16(words, 4); }
    static TOKEND_INLINE Mask without(V bytes, int bits) { return _mm256_cmpeq_epi8(bytes & all(bits), V{}); }
    static TOKEND_INLINE bool any(Mask mask) { return !_mm256_testz_si256(mask, mask); }
    static TOKEND_INLINE V choose(Mask mask, V yes, V no) { return _mm256_blendv_epi8(no, yes, mask); }
    static TOKEND_INLINE V first(V low, V high) { return _mm256_unpacklo_epi8(low, high); }
    static TOKEND_INLINE V second(V low, V high) { return _mm256_unpackhi_epi8(low, high); }
};
#endif

class UnpackFp8 {
  public:
    UnpackFp8() {
        for (int i = 0; i < 16; i++) high_[i] = uint8_t(i / 8 * 128 + 60 + i % 8);  // sign, half the exponent
        for (int fraction = 1; fraction < 8; fraction++) {
            const uint32_t bits = bit_cast<uint32_t>(float(fraction) * 0x1p-9f);
            small_high_[fraction] = uint8_t(bits >> 24), small_low_[fraction] = uint8_t(bits >> 16);
        }
    }
    TOKEND_INLINE void operator()(const uint8_t* from, uint8_t* to) const {
        typedef Bytes B;
        constexpr int64_t SIZE = sizeof(B::V);
        for (int64_t at = 0; at < LINE_BYTES; at += SIZE) {
            const B::V codes = load_bytes<B::V>(from + at);
            B::V high = B::look_up(B::table(high_), B::down(codes) & B::all(15));
            B::V low = B::up(codes) & B::all(-16);
            const B::Mask small = B::without(codes, 0x78);
            if (__builtin_expect(B::any(small), 0)) {  // few weights are that small
                const B::V fraction = codes & B::all(7), sign = codes & B::all(-128);
                high = B::choose(small, B::look_up(B::table(small_high_), fraction) | sign, high);
                low = B::choose(small, B::look_up(B::table(small_low_), fraction), low);
            }
            const B::V first = B::first(low, high), second = B::second(low, high);
            __builtin_memcpy(to + at, &first, SIZE);
            __builtin_memcpy(to + LINE_BYTES + at, &second, SIZE);
        }
    }

  private:
    alignas(16) uint8_t high_[16], small_high_[16] = {}, small_low_[16] = {};
};

#else

struct UnpackFp8 {
    TOKEND_INLINE void operator()(const uint8_t* from, uint8_t* to) const {
        typedef Vec<ROW_LANES>::U U;
        for (int line = 0; line < 2; line++)
            for (int64_t at = 0; at < PANEL_OUTPUTS; at += ROW_LANES) {
                uint8_t codes[ROW_LANES * 2];
                for (int i = 0; i < ROW_LANES; i += 4)
                    __builtin_memcpy(codes + i * 2, from + (at + i) * 4 + line * 8, 8);
                const U words = load_words<ROW_LANES>(codes);
                const U both = number(words & 255) >> 16 | number(words >> 8);
                __builtin_memcpy(to + line * LINE_BYTES + at * 4, &both, sizeof(both));
            }
    }
    // Codes as bits of float32.
    template <class U>
    static TOKEND_INLINE U number(U codes) {
        typedef typename Vec<ROW_LANES>::I I;
        const U normal = ((codes & 127) + (120 << 3)) << 20;
        const F<ROW_LANES> small = __builtin_convertvector((I)(codes & 7), F<ROW_LANES>) * splat<ROW_LANES>(0x1p-9f);
        const U is_normal = (U)((codes & 127) > 7);
        return (normal & is_normal) | (bit_cast<U>(small) & ~is_normal) | (codes & 128) << 24;
    }
};

#endif

// A weight and the rows for it, as panel_product.h has them.
class Fp8Form {
  public:
    typedef float Sum;
    static constexpr bool ALWAYS_FETCH = true;
    typedef BiasedSums Finish;
    typedef BiasedSums::Columns Columns;

    Fp8Form(const TokendFp8Shape& weight, const RowsOfBf16& rows) : weight_(weight), layout_(weight), rows_(rows) {}

    int64_t num_pairs() const { return layout_.num_pairs; }
    int64_t pair_bytes() const { return layout_.pair_bytes(); }
    int64_t out_features() const { return weight_.out_features; }

    struct Strips {
        template <class Between>
        void operator()(const Fp8Form& form, int64_t pair, int64_t row, int64_t num_rows, float* sums, PairFetch fetch,
                        Between between) {
            const Fp8Layout& layout = form.layout_;
            const uint8_t* at = form.layout_.pair(form.weight_, pair);
            const float* scales = reinterpret_cast<const float*>(at);
            const int64_t of_group = PAIR_OUTPUTS / layout.scale_outputs;
            const int64_t group_steps = form.weight_.scale_inputs / STEP_INPUTS;
            at += layout.scale_bytes();
            std::fill_n(sums, num_rows * PAIR_OUTPUTS, 0.0f);
            const auto scales_of = [&](int64_t step) { return scales + step / group_steps * of_group; };
            const auto end_of = [&](int64_t step) {
                return std::min({step + FP8_PART_INPUTS / STEP_INPUTS, (step / group_steps + 1) * group_steps,
                                 layout.num_steps});
            };
            for (int64_t step = 0; step < layout.num_steps;) {
                const int64_t end = end_of(step);
                if (num_rows == 1 && !part_.by_tiles() && end < layout.num_steps && end_of(end) - end == end - step) {
                    const uint8_t* parts[2] = {at + step * FP8_STEP_BYTES, at + end * FP8_STEP_BYTES};
                    multiply_two(parts, end - step, form.rows_.first + row * form.rows_.stride + step * STEP_INPUTS);
                    add(part_sums_, scales_of(step), of_group == 1, 1, sums);
                    add(part_sums_ + PAIR_OUTPUTS, scales_of(end), of_group == 1, 1, sums);
                    step = end_of(end);
                    continue;
                }
                unpack(at + step * FP8_STEP_BYTES, end - step, fetch.lines);
                const Bf16Input* x = form.rows_.first + row * form.rows_.stride + step * STEP_INPUTS;
                part_(unpacked_, end - step, x, form.rows_.stride, num_rows, part_sums_, {}, between);
                add(part_sums_, scales_of(step), of_group == 1, num_rows, sums);
                step = end;
            }
        }

      private:
        TOKEND_FLATTEN void unpack(const uint8_t* from, int64_t num_steps, bool fetch) {
            for (int64_t two = 0; two < num_steps * STEP_LINES; two++, from += FP8_LINES_BYTES) {
                if (fetch) __builtin_prefetch(from + FP8_FETCH_AHEAD);
                unpack_(from, unpacked_ + two * 2 * LINE_BYTES);
            }
        }

        // The sums of a single row over two parts of the same length, one after the other in the row:
        // with the sums of one part, each product would wait for the one before.
        TOKEND_FLATTEN __attribute__((noinline)) void multiply_two(const uint8_t* const (&parts)[2], int64_t num_steps,
                                                                   const Bf16Input* x) {
            constexpr int N = ROW_LANES, VECTORS = int(PAIR_OUTPUTS) / N;
            const UnpackFp8 unpack = unpack_;
            const int64_t inputs = num_steps * STEP_INPUTS;
            const uint8_t* ahead = parts[0] + 2 * FP8_FETCH_AHEAD;
            F<N> total[2][VECTORS] = {};
            for (int64_t two = 0; two < num_steps * STEP_LINES / 2; two++, x += 4) {
                const int64_t from = two / (STEP_LINES / 2) * FP8_STEP_BYTES + two % (STEP_LINES / 2) * FP8_LINES_BYTES;
                // What two parts further has, in the order of addresses: loads take turns in four places.
                if (two % 2 == 0)
                    for (int i = 0; i < 8; i++, ahead += 64) __builtin_prefetch(ahead);
                alignas(64) uint8_t lines[2][2][2 * LINE_BYTES];
                each<2>([&](auto part) {
                    each<2>([&](auto panel) {
                        const uint8_t* codes = parts[part] + from + panel * FP8_PANEL_STEP_BYTES;
                        unpack(codes, lines[part][panel]);
                    });
                });
                each<2>([&](auto line) {
                    each<2>([&](auto part) {
                        each<VECTORS>([&](auto i) {
                            constexpr int OUTPUT = i * N;
                            const uint8_t* words = lines[part][OUTPUT / PANEL_OUTPUTS] + line * LINE_BYTES;
                            const Bf16Line weight(words + OUTPUT % PANEL_OUTPUTS * 4);
                            total[part][i] = weight.add(total[part][i], x + part * inputs + line * 2);
                        });
                    });
                });
            }
            each<2>([&](auto part) {
                each<VECTORS>(
                    [&](auto i) { store<N>(part_sums_ + part * PAIR_OUTPUTS + i * N, total[part][i]); });
            });
        }

        // sums += sums of a part * scales
        TOKEND_FLATTEN static void add(const float* part, const float* scales, bool one, int64_t num_rows, float* sums) {
            constexpr int N = ROW_LANES;
            for (int64_t at = 0; at < PAIR_OUTPUTS; at += N) {
                const F<N> scale = one ? splat<N>(scales[0]) : load<N>(scales + at);
                for (int64_t i = at; i < num_rows * PAIR_OUTPUTS; i += PAIR_OUTPUTS)
                    store<N>(sums + i, multiply_add<N>(load<N>(part + i), scale, load<N>(sums + i)));
            }
        }

        UnpackFp8 unpack_;
        Bf16Strips part_;
        alignas(64) uint8_t unpacked_[FP8_PART_INPUTS / STEP_INPUTS * PAIR_STEP_BYTES];
        alignas(64) float part_sums_[STRIP * PAIR_OUTPUTS];
    };

  private:
    const TokendFp8Shape& weight_;
    const Fp8Layout layout_;
    const RowsOfBf16 rows_;
};

}  // namespace

void multiply_fp8_part(const TokendFp8Shape& weight, const TokendProduct& product, const void* prepared,
                       const ProductPart& part) {
    multiply_part(Fp8Form(weight, rows_of_bf16(product, weight.in_features, prepared)), product, part);
}

}  // namespace tokend

using namespace tokend;

extern "C" void tokend_fp8_prepared_product(
    const TokendFp8Shape* weight, const TokendProduct* product, const void* prepared) {
    const Fp8Form form(*weight, rows_of_bf16(*product, weight->in_features, prepared));
    in_team(worth_threads(product->num_rows, weight->in_features, weight->out_features),
            [&] { multiply_share(form, *product); });
}

extern "C" void tokend_fp8_product(const TokendFp8Shape* weight, const TokendProduct* product) {
    with_prepared_rows(*product, weight->in_features, weight->out_features, [&](const void* prepared) {
        tokend_fp8_prepared_product(weight, product, prepared);
    });
}
