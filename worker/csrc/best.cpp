// One pass over rows that says which of them are numbers, and where their largest one is.
#include <cmath>
#include <limits>

#include "rows.h"
#include "rows_common.h"

namespace tokend {
namespace {

constexpr int N = ROW_LANES;
constexpr int64_t PARALLEL_ELEMENTS = 1 << 17;
// The place is looked for in the block that has the largest element, not in the row.
constexpr int64_t BLOCK = 1024;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// x - x is 0 for a number and NaN for all else, and NaN stays NaN whatever is added.
template <class T>
TOKEND_FLATTEN bool is_broken(const T* x, int64_t size) {
    F<N> sum = {};
    int64_t at = 0;
    for (; at + N <= size; at += N) {
        const F<N> part = load<N>(x + at);
        sum += part - part;
    }
    if (at < size) {
        const F<N> part = load_some<N>(x + at, size - at, 0.0f);
        sum += part - part;
    }
    return std::isnan(sum_lanes<N>(sum));
}

// Largest of up to BLOCK elements; *sum becomes NaN when one of them is.
template <class T>
TOKEND_INLINE float best_of_block(const T* x, int64_t size, float* sum) {
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

template <class T>
TOKEND_FLATTEN void best_of_row(const T* x, int64_t size, float* best, int64_t* place) {
    float largest = NEVER, sum = 0.0f;
    int64_t block = 0;
    for (int64_t from = 0; from < size; from += BLOCK) {
        const float of_block = best_of_block(x + from, std::min(BLOCK, size - from), &sum);
        if (of_block > largest) {
            largest = of_block;
            block = from;
        }
    }
    int64_t at = block;
    const int64_t end = std::min(size, block + BLOCK) - 1;
    while (at < end && load<1>(x + at)[0] != largest) at++;
    *best = largest + sum;
    *place = at;
}

}  // namespace
}  // namespace tokend

extern "C" void tokend_find_broken(int64_t dtype, int64_t num_groups, const int32_t* start, int64_t size,
                                   const void* x, uint8_t* broken) {
    tokend::with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* rows = static_cast<const T*>(x);
#pragma omp parallel for schedule(static) if (start[num_groups] * size > tokend::PARALLEL_ELEMENTS)
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t count = start[group + 1] - start[group];
            broken[group] = tokend::is_broken(rows + start[group] * size, count * size);
        }
    });
}

extern "C" void tokend_find_best(int64_t dtype, int64_t num_rows, int64_t size, const void* x, float* best,
                                 int64_t* place) {
    tokend::with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* rows = static_cast<const T*>(x);
#pragma omp parallel for schedule(static) if (num_rows * size > tokend::PARALLEL_ELEMENTS)
        for (int64_t row = 0; row < num_rows; row++)
            tokend::best_of_row(rows + row * size, size, best + row, place + row);
    });
}
