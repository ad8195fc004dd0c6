// RMSNorm and LayerNorm of rows, into a buffer or onto a residual.
#include <cmath>

#include "common/row_vectors.h"
#include "layers/row_parts.h"
#include "layers/rows.h"

namespace tokend {
namespace {

constexpr int N = ROW_LANES;
// Below this, some microseconds of one thread, waking other threads costs more than it saves.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;

// The mean of term(x[i]) over a row.
template <class T, class Term>
TOKEND_INLINE double mean_of(const T* x, int64_t size, Term term) {
    // Four chains: additions wait for the one before.
    F<N> sums[4] = {};
    int64_t at = 0;
    for (; at + 4 * N <= size; at += 4 * N)
        each<4>([&](auto j) { sums[j] += term(load<N>(x + at + j * N)); });
    for (; at + N <= size; at += N) sums[0] += term(load<N>(x + at));
    if (at < size) {
        float terms[N];
        store<N>(terms, term(load_some<N>(x + at, size - at, 0.0f)));
        sums[1] += load_some<N>(terms, size - at, 0.0f);
    }
    return double(sum_lanes<N>((sums[0] + sums[1]) + (sums[2] + sums[3]))) / double(size);
}

template <bool ADD, bool CENTERED, class T, class To>
TOKEND_FLATTEN void norm_row(const T* x, int64_t size, const TokendRowNorm& norm, To* out) {
    float mean = 0.0f;
    if constexpr (CENTERED) mean = float(mean_of(x, size, [](F<N> part) { return part; }));
    const double square = mean_of(x, size, [&](F<N> part) {
        if constexpr (CENTERED) part -= splat<N>(mean);
        return part * part;
    });
    const F<N> scale = splat<N>(float(1.0 / std::sqrt(square + norm.eps)));
    int64_t at = 0;
    for (; at + N <= size; at += N) {
        F<N> value = load<N>(x + at);
        if constexpr (CENTERED) value -= splat<N>(mean);
        value = value * scale * load<N>(norm.weight + at);
        if (CENTERED && norm.bias) value += load<N>(norm.bias + at);
        if constexpr (ADD) value = load<N>(out + at) + value;
        store<N>(out + at, value);
    }
    if (at < size) {
        const int64_t rest = size - at;
        F<N> value = load_some<N>(x + at, rest, 0.0f);
        if constexpr (CENTERED) value -= splat<N>(mean);
        value = value * scale * load_some<N>(norm.weight + at, rest, 0.0f);
        if (CENTERED && norm.bias) value += load_some<N>(norm.bias + at, rest, 0.0f);
        if constexpr (ADD) value = load_some<N>(out + at, rest, 0.0f) + value;
        store_some<N>(out + at, rest, value);
    }
}

template <bool ADD, class T, class To>
void norm_row(const T* x, int64_t size, const TokendRowNorm& norm, To* out) {
    (norm.is_centered ? norm_row<ADD, true, T, To> : norm_row<ADD, false, T, To>)(x, size, norm, out);
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
        norm_row<ADD>(x + from, size, norm->norm, out + row * size);
    }
}

}  // namespace

void norm_row(int64_t dtype, int64_t size, const TokendRowNorm& norm, const void* x, void* out) {
    with_type(dtype, [&]<class T>(T*) {
        norm_row<false>(static_cast<const T*>(x), size, norm, static_cast<T*>(out));
    });
}

void add_norm_row(int64_t dtype, int64_t size, const TokendRowNorm& norm, const void* x, void* out) {
    with_type(dtype, [&]<class T>(T*) {
        norm_row<true>(static_cast<const T*>(x), size, norm, static_cast<T*>(out));
    });
}

}  // namespace tokend

extern "C" void tokend_norm(const TokendNormCall* norm) {
    tokend::with_type(norm->dtype, [&](auto* type) {
        tokend::norm_rows<false, std::remove_pointer_t<decltype(type)>>(norm);
    });
}

extern "C" void tokend_add_norm(const TokendNormCall* norm) {
    tokend::with_type(norm->dtype, [&](auto* type) {
        tokend::norm_rows<true, std::remove_pointer_t<decltype(type)>>(norm);
    });
}
