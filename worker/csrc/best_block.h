// The largest element of a part of a row. The place is looked for in the block that has it alone.
#pragma once

#include <limits>

#include "rows_common.h"

namespace tokend {

constexpr int64_t BLOCK = 1024;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Largest of up to BLOCK elements; *sum becomes NaN when one of them is.
template <class T>
TOKEND_INLINE float best_of_block(const T* x, int64_t size, float* sum) {
    constexpr int N = ROW_LANES;
    F<N> best[4], odd[4] = {};
    each<4>([&](auto j) { best[j] = splat<N>(NEVER); });
    const auto take = [&](int j, F<N> part) {
        best[j] = maximum<N>(part, best[j]);
        odd[j] += part == part ? F<N>{} : part;
    };
    int64_t at = 0;
    for (; at + 4 * N <= size; at += 4 * N) each<4>([&](auto j) { take(j, load<N>(x + at + j * N)); });
    for (; at + N <= size; at += N) take(0, load<N>(x + at));
    if (at < size) take(1, load_some<N>(x + at, size - at, NEVER));
    *sum += sum_lanes<N>((odd[0] + odd[1]) + (odd[2] + odd[3]));
    return max_lanes<N>(maximum<N>(maximum<N>(best[0], best[1]), maximum<N>(best[2], best[3])));
}

// The first of up to BLOCK elements that is the largest; some place where that is NaN.
template <class T>
TOKEND_INLINE int64_t place_in_block(const T* x, int64_t size, float largest) {
    int64_t at = 0;
    while (at < size - 1 && load<1>(x + at)[0] != largest) at++;
    return at;
}

}  // namespace tokend
