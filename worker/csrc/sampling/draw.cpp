// The keyed draw: argmax of logit / T - ln(-ln u), u from Philox words.
//
// Every token has a word, but logarithms are computed for few: with v = 1 - u,
//
//   -ln(-ln u) <= -ln v,   because -ln u >= 1 - u,
//   log2 v >= (bits of v as an integer) * 2^-23 - 127,
//
// so a few operations bound the score from above, and only a token whose bound
// passes the best score so far is computed, in float64.
#include "sampling/philox.h"
#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>


namespace tokend {
namespace {

#if defined(__AVX512F__)
constexpr int N = 16;
#elif defined(__AVX2__)
constexpr int N = 8;
#else
constexpr int N = 4;
#endif
// Tokens of one pass: each of N counters gives four words.
constexpr int64_t PASS = 4 * N;
constexpr float LN2 = 0.693147180559945f;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Bit i says whether a[i] > b[i]; false for NaN.
TOKEND_INLINE uint32_t greater_lanes(F<N> a, F<N> b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ));
#else
    uint32_t mask = 0;
    for (int lane = 0; lane < N; lane++) mask |= uint32_t(a[lane] > b[lane]) << lane;
    return mask;
#endif
}

// Words 0..3 of N counters -> N consecutive tokens per vector. Lanes hold counters in
// the order of first_counters, so that a 4 x 4 transposition in 128-bit lanes is enough.
TOKEND_INLINE void interleave(U<N> (&words)[4]) {
    const auto shuffle = [](U<N> a, U<N> b, auto index) {
        return [&]<int... L>(std::integer_sequence<int, L...>) {
            return __builtin_shuffle(a, b, typename Vec<N>::I{index(L)...});
        }(std::make_integer_sequence<int, N>());
    };
    const auto low = [](int i) constexpr { return i / 4 * 4 + i % 4 / 2 + i % 2 * N; };
    const auto high = [](int i) constexpr { return i / 4 * 4 + i % 4 / 2 + 2 + i % 2 * N; };
    const auto low_pairs = [](int i) constexpr { return i / 4 * 4 + i % 2 + i % 4 / 2 * N; };
    const auto high_pairs = [](int i) constexpr { return i / 4 * 4 + i % 2 + 2 + i % 4 / 2 * N; };
    const U<N> a = shuffle(words[0], words[1], low), b = shuffle(words[2], words[3], low);
    const U<N> c = shuffle(words[0], words[1], high), d = shuffle(words[2], words[3], high);
    words[0] = shuffle(a, b, low_pairs);
    words[1] = shuffle(a, b, high_pairs);
    words[2] = shuffle(c, d, low_pairs);
    words[3] = shuffle(c, d, high_pairs);
}

TOKEND_INLINE U<N> first_counters() {
    return [&]<int... L>(std::integer_sequence<int, L...>) {
        return U<N>{uint32_t(L % 4 * (N / 4) + L / 4)...};
    }(std::make_integer_sequence<int, N>());
}

// An upper bound, in float32, of the Gumbel noise of each word.
TOKEND_INLINE F<N> bound_noise(U<N> words) {
    using I = typename Vec<N>::I;
    // v * 2^31 to within rounding; halving first keeps the conversion signed.
    const F<N> v = __builtin_convertvector(I(~words >> 1), F<N>) + 0.25f;
    const F<N> log2_v = __builtin_convertvector(bit_cast<I>(v), F<N>) * 0x1p-23f - (127.0f + 31.0f);
    return log2_v * -LN2 + 1e-3f;
}

double score(float logit, float temperature, uint32_t word) {
    const double uniform = (double(word) + 0.5) * 0x1p-32;
    return double(logit) / double(temperature) - std::log(-std::log(uniform));
}

struct Best {
    double score = -std::numeric_limits<double>::infinity();
    int64_t token = 0;
};

// Updates `best` with tokens [from, from + PASS).
TOKEND_INLINE void draw_pass(const float* logits, int64_t from, RowParams params, Best& best) {
    const float temperature = params.temperature;
    F<N> scaled[4];
    uint32_t possible = 0;
    each<4>([&](auto j) {
        const F<N> logit = load<N>(logits + j * N);
        possible |= greater_lanes(logit, splat<N>(NEVER));
        scaled[j] = logit * (1.0f / temperature);
    });
    if (possible == 0) return;
    U<N> words[4] = {first_counters() + uint32_t(from / 4), U<N>{} + params.position, U<N>{} + params.choice, U<N>{}};
    philox_4x32_10<N>(words, uint32_t(params.seed), uint32_t(params.seed >> 32));
    interleave(words);
    each<4>([&](auto j) {
        // Margin for the rounding of the scaled logit.
        const F<N> magnitude = maximum<N>(scaled[j], -scaled[j]);
        const F<N> bound = scaled[j] + bound_noise(words[j]) + magnitude * 1e-6f;
        uint32_t mask = greater_lanes(bound, splat<N>(float(best.score)));
        for (; mask != 0; mask &= mask - 1) {
            const int lane = __builtin_ctz(mask);
            const double exact = score(logits[j * N + lane], temperature, words[j][lane]);
            if (exact > best.score) best = {exact, from + j * N + lane};
        }
    });
}

TOKEND_FLATTEN int64_t draw_row(const float* logits, int64_t vocab_size, RowParams params) {
    Best best;
    int64_t token = 0;
    for (; token + PASS <= vocab_size; token += PASS)
        draw_pass(logits + token, token, params, best);
    if (token < vocab_size) {
        float rest[PASS];
        std::fill_n(rest, PASS, NEVER);
        std::copy(logits + token, logits + vocab_size, rest);
        draw_pass(rest, token, params, best);
    }
    return best.token;
}

}  // namespace
}  // namespace tokend

extern "C" void tokend_draw(const float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows,
                            const int64_t* rows, const tokend::RowParams* params, int64_t* token_ids) {
#pragma omp parallel for schedule(dynamic, 1) if (num_rows * vocab_size > 65536)
    for (int64_t i = 0; i < num_rows; i++)
        token_ids[i] = tokend::draw_row(logits + rows[i] * row_stride, vocab_size, params[i]);
}
