// Rotates rows by blocks of a Hadamard matrix and rounds them to 8 bits.
//
// code = x * (127 / largest) to the nearest, ties to even.
#include "common/row_vectors.h"
#include "products/rotated/rotated_format.h"

#include <limits>
#include <vector>


namespace tokend {
namespace {

constexpr int N = ROW_LANES;
constexpr float SMALLEST = 0x1p-100f;  // below, a row counts as zeros: 127 / largest is finite

typedef Vec<N>::I Ints;

// Sums and differences of lanes that are DISTANCE apart:  a b  ->  a + b, a - b.
template <int DISTANCE>
TOKEND_INLINE F<N> butterfly(F<N> x) {
    return [&]<int... L>(std::integer_sequence<int, L...>) {
        const F<N> other = __builtin_shuffle(x, Ints{(L ^ DISTANCE)...});
        return x * F<N>{(L & DISTANCE ? -1.0f : 1.0f)...} + other;
    }(std::make_integer_sequence<int, N>());
}

// The fast Walsh-Hadamard transform of BLOCK numbers (Fino and Algazi, 1976): first between
// vectors, then within each.
template <int BLOCK>
TOKEND_INLINE void rotate_block(float* numbers, Ints& largest) {
    constexpr int COUNT = BLOCK / N;
    F<N> x[COUNT];
    each<COUNT>([&](auto i) { x[i] = load<N>(numbers + i * N); });
    each<4>([&](auto stage) {
        constexpr int DISTANCE = 1 << stage;
        if constexpr (DISTANCE < COUNT)
            each<COUNT / 2>([&](auto pair) {
                constexpr int FIRST = pair / DISTANCE * 2 * DISTANCE + pair % DISTANCE;
                const F<N> a = x[FIRST], b = x[FIRST + DISTANCE];
                x[FIRST] = a + b;
                x[FIRST + DISTANCE] = a - b;
            });
    });
    each<COUNT>([&](auto i) {
        F<N> y = butterfly<2>(butterfly<1>(x[i]));
        if constexpr (N >= 8) y = butterfly<4>(y);
        if constexpr (N >= 16) y = butterfly<8>(y);
        store<N>(numbers + i * N, y);
        const Ints magnitude = bit_cast<Ints>(y) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    });
}

template <int BLOCK>
TOKEND_FLATTEN uint32_t rotate_blocks(float* numbers, int64_t in_features) {
    Ints largest{};
    for (int64_t at = 0; at < in_features; at += BLOCK) rotate_block<BLOCK>(numbers + at, largest);
    int32_t most = 0;
    for (int lane = 0; lane < N; lane++) most = std::max(most, largest[lane]);
    return uint32_t(most);
}

TOKEND_FLATTEN int32_t round_row(const float* numbers, int64_t in_features, float factor, int8_t* codes) {
    typedef int8_t Bytes __attribute__((vector_size(N)));
    Ints sums{};
    for (int64_t at = 0; at < in_features; at += N) {
        const Ints rounded = nearest<N>(load<N>(numbers + at) * factor);
        sums += rounded;
        const Bytes bytes = __builtin_convertvector(rounded, Bytes);
        __builtin_memcpy(codes + at, &bytes, N);
    }
    int32_t sum = 0;
    for (int lane = 0; lane < N; lane++) sum += sums[lane];
    return sum;
}

template <class T>
TOKEND_FLATTEN void widen(const T* from, int64_t count, float* to) {
    for (int64_t at = 0; at < count; at += N) store<N>(to + at, load<N>(from + at));
}

}  // namespace

int64_t rotated_block(int64_t in_features) { return in_features % 64 ? 32 : 64; }

uint32_t rotate(float* numbers, int64_t in_features) {
    return rotated_block(in_features) == 64 ? rotate_blocks<64>(numbers, in_features)
                                            : rotate_blocks<32>(numbers, in_features);
}

RowFacts code_row(float* numbers, int64_t in_features, int8_t* codes) {
    const uint32_t bits = rotate(numbers, in_features);
    const float largest = bit_cast<float>(bits);
    const int64_t inputs = whole(in_features, DEPTH);
    if (bits >= 0x7f800000 || largest < SMALLEST) {
        std::fill_n(codes, inputs, int8_t(0));
        return {bits >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 0.0f, 0};
    }
    const int32_t sum = round_row(numbers, in_features, float(LARGEST_CODE) / largest, codes);
    std::fill(codes + in_features, codes + inputs, int8_t(0));
    return {largest / float(LARGEST_CODE), -WEIGHT_ZERO * sum};
}

RowFacts code_input(const TokendProduct& product, int64_t in_features, int64_t row, float* scratch, int8_t* codes) {
    const int64_t at = row * product.input_stride;
    if (product.input_dtype == 0)
        widen(static_cast<const float*>(product.input) + at, in_features, scratch);
    else
        widen(static_cast<const bfloat16*>(product.input) + at, in_features, scratch);
    return code_row(scratch, in_features, codes);
}

float* row_scratch(int64_t in_features) {
    struct alignas(64) Line {
        float numbers[16];
    };
    static thread_local std::vector<Line> lines;
    const size_t needed = size_t(whole(in_features, 16) / 16);
    if (lines.size() < needed) lines.resize(needed);
    return lines.data()->numbers;
}

}  // namespace tokend

extern "C" int64_t tokend_code_bytes(int64_t num_rows, int64_t in_features) {
    return tokend::CodesLayout(num_rows, in_features).bytes();
}

extern "C" void tokend_code_rows(const TokendProduct* product, int64_t in_features, void* codes) {
    const tokend::CodesLayout layout(product->num_rows, in_features);
#pragma omp parallel for schedule(static) if (product->num_rows * in_features > tokend::PARALLEL_CODES)
    for (int64_t row = 0; row < product->num_rows; row++)
        layout.facts(codes)[row] = tokend::code_input(*product, in_features, row, tokend::row_scratch(in_features),
                                                      layout.codes(codes, row));
}
