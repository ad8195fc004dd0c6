// One pass over rows of logits that finds NaN and infinities and the largest element.
#include <cmath>
#include <vector>

#include "common/row_vectors.h"
#include "layers/rows.h"
#include "sampling/best.h"

namespace tokend {
namespace {

constexpr int N = ROW_LANES;
constexpr int64_t PARALLEL_ELEMENTS = 1 << 17;

// x - x is 0 for a number and NaN for all else, and NaN stays NaN whatever is added.
template <class T>
TOKEND_FLATTEN bool has_nonfinite(const T* x, int64_t size) {
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

// maxima: [ceil(size / BLOCK)], becomes the largest element of each block.
template <class T>
TOKEND_FLATTEN void best_of_row(const T* x, int64_t size, float* maxima, float* best, int64_t* place) {
    float largest = NEVER, sum = 0.0f;
    int64_t block = 0;
    for (int64_t from = 0; from < size; from += BLOCK) {
        const float of_block = best_of_block(x + from, std::min(BLOCK, size - from), &sum);
        maxima[from / BLOCK] = of_block;
        if (of_block > largest) {
            largest = of_block;
            block = from;
        }
    }
    *best = largest + sum;
    *place = block + place_in_block(x + block, std::min(BLOCK, size - block), largest);
}

}  // namespace
}  // namespace tokend

extern "C" void tokend_find_nonfinite(int64_t dtype, int64_t num_groups, const int32_t* start, int64_t size,
                                   const void* x, uint8_t* nonfinite) {
    tokend::with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* rows = static_cast<const T*>(x);
#pragma omp parallel for schedule(static) if (start[num_groups] * size > tokend::PARALLEL_ELEMENTS)
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t count = start[group + 1] - start[group];
            nonfinite[group] = tokend::has_nonfinite(rows + start[group] * size, count * size);
        }
    });
}

extern "C" void tokend_find_best(int64_t dtype, int64_t num_rows, int64_t size, const void* x, float* best,
                                 int64_t* place, const TokendEdits* const* edits) {
    tokend::with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* rows = static_cast<const T*>(x);
#pragma omp parallel for schedule(static) if (num_rows * size > tokend::PARALLEL_ELEMENTS)
        for (int64_t row = 0; row < num_rows; row++) {
            static thread_local std::vector<float> maxima;
            maxima.resize((size + tokend::BLOCK - 1) / tokend::BLOCK);
            const T* scores = rows + row * size;
            tokend::best_of_row(scores, size, maxima.data(), best + row, place + row);
            if (edits != nullptr && edits[row] != nullptr && std::isfinite(best[row]))
                place[row] = tokend::best_place_of_edited(scores, size, place[row], maxima, *edits[row]);
        }
    });
}
