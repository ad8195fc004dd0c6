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
    F<ROW_LANES> best[4], odd[4] = {};
    each<4>([&](auto j) { best[j] = splat<ROW_LANES>(NEVER); });
    const auto take = [&](int j, F<ROW_LANES> part) {
        best[j] = maximum<ROW_LANES>(part, best[j]);
        odd[j] += part == part ? F<ROW_LANES>{} : part;
    };
    int64_t at = 0;
    for (; at + 4 * ROW_LANES <= size; at += 4 * ROW_LANES) each<4>([&](auto j) { take(j, load<ROW_LANES>(x + at + j * ROW_LANES)); });
    for (; at + ROW_LANES <= size; at += ROW_LANES) take(0, load<ROW_LANES>(x + at));
    if (at < size) take(1, load_some<ROW_LANES>(x + at, size - at, NEVER));
    *sum += sum_lanes<ROW_LANES>((odd[0] + odd[1]) + (odd[2] + odd[3]));
    return max_lanes<ROW_LANES>(maximum<ROW_LANES>(maximum<ROW_LANES>(best[0], best[1]), maximum<ROW_LANES>(best[2], best[3])));
}

// The first of up to BLOCK elements that is the largest; some place where that is NaN.
template <class T>
TOKEND_INLINE int64_t place_in_block(const T* x, int64_t size, float largest) {
    int64_t at = 0;
    while (at < size - 1 && load<1>(x + at)[0] != largest) at++;
    return at;
}

}  // namespace tokend
