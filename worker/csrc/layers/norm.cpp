// RMSNorm of rows, into a buffer or onto a residual.
#include <cmath>

#include "common/row_vectors.h"
#include "layers/row_parts.h"
#include "layers/rows.h"

namespace tokend {
namespace {

constexpr int N = ROW_LANES;
// Below this, some microseconds of one thread, waking other threads costs more than it saves.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;

template <class T>
TOKEND_INLINE float sum_of_squares(const T* x, int64_t size) {
    // Four chains: additions wait for the one before.
    F<N> sums[4] = {};
    int64_t at = 0;
    for (; at + 4 * N <= size; at += 4 * N)
        each<4>([&](auto j) {
            const F<N> part = load<N>(x + at + j * N);
            sums[j] += part * part;
        });
    for (; at + N <= size; at += N) {
        const F<N> part = load<N>(x + at);
        sums[0] += part * part;
    }
    if (at < size) {
        const F<N> part = load_some<N>(x + at, size - at, 0.0f);
        sums[1] += part * part;
    }
    return sum_lanes<N>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <bool ADD, class T, class To>
TOKEND_FLATTEN void norm_row(const T* x, const float* weight, int64_t size, double eps, To* out) {
    const double mean = double(sum_of_squares(x, size)) / double(size);
    const F<N> scale = splat<N>(float(1.0 / std::sqrt(mean + eps)));
    int64_t at = 0;
    for (; at + N <= size; at += N) {
        F<N> value = load<N>(x + at) * scale * load<N>(weight + at);
        if constexpr (ADD) value = load<N>(out + at) + value;
        store<N>(out + at, value);
    }
    if (at < size) {
        const int64_t rest = size - at;
        F<N> value = load_some<N>(x + at, rest, 0.0f) * scale * load_some<N>(weight + at, rest, 0.0f);
        if constexpr (ADD) value = load_some<N>(out + at, rest, 0.0f) + value;
        store_some<N>(out + at, rest, value);
    }
}

// The element of x at which a row begins.
int64_t start_of(const TokendNormCall& norm, int64_t row) {
    return row / norm.group_size * norm.group_stride + row % norm.group_size * norm.size;
}

template <bool ADD, class T>
void norm_rows(const TokendNormCall* norm) {
    const int64_t size = norm->size, num_rows = norm->num_groups * norm->group_size;
    const T* x = static_cast<const T*>(norm->x);
    T* out = static_cast<T*>(norm->out);
#pragma omp parallel for schedule(static) if (num_rows * size > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t from = start_of(*norm, row);
        norm_row<ADD>(x + from, norm->weight, size, norm->eps, out + row * size);
    }
}

}  // namespace

void norm_row(int64_t dtype, int64_t size, const RowNorm& norm, const void* x, void* out) {
    with_type(dtype, [&]<class T>(T*) {
        norm_row<false, T>(static_cast<const T*>(x), norm.weight, size, norm.eps, static_cast<T*>(out));
    });
}

void add_norm_row(int64_t dtype, int64_t size, const RowNorm& norm, const void* x, void* out) {
    with_type(dtype, [&]<class T>(T*) {
        norm_row<true, T>(static_cast<const T*>(x), norm.weight, size, norm.eps, static_cast<T*>(out));
    });
}

}  // namespace tokend

extern "C" void tokend_rms_norm(const TokendNormCall* norm) {
    tokend::with_type(norm->dtype, [&](auto* type) {
        tokend::norm_rows<false, std::remove_pointer_t<decltype(type)>>(norm);
    });
}

extern "C" void tokend_add_rms_norm(const TokendNormCall* norm) {
    tokend::with_type(norm->dtype, [&](auto* type) {
        tokend::norm_rows<true, std::remove_pointer_t<decltype(type)>>(norm);
    });
}
