// One head of one token: read, rotated and written, in any element type.
//
// Activations have three types and pages four. Work per row goes through floats here, so that only
// work per page is compiled for all pairs of types.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/attention.h"
#include "common/simd.h"

namespace tokend {

// Calls body with a null pointer of the C++ type of an activation.
template <class Body>
TOKEND_INLINE void with_type(int64_t dtype, Body body) {
    switch (dtype) {
        case TOKEND_FLOAT32: return body(static_cast<float*>(nullptr));
        case TOKEND_BFLOAT16: return body(static_cast<bfloat16*>(nullptr));
        case TOKEND_FLOAT16: return body(static_cast<float16*>(nullptr));
    }
}

// `row` of `head_dim` elements, a multiple of 8, that begins at element `at`.
inline void read_row(int64_t dtype, const void* base, int64_t at, int64_t head_dim, float* row) {
    with_type(dtype, [&]<class T>(T*) {
        const T* from = static_cast<const T*>(base) + at;
        for (int64_t dim = 0; dim < head_dim; dim += 8) store<8>(row + dim, load<8>(from + dim));
    });
}

inline void write_row(int64_t dtype, const float* row, int64_t head_dim, void* base, int64_t at) {
    with_type(dtype, [&]<class T>(T*) {
        T* to = static_cast<T*>(base) + at;
        for (int64_t dim = 0; dim < head_dim; dim += 8) store<8>(to + dim, load<8>(row + dim));
    });
}

// Rounds a row to the element type.
inline void round_row(int64_t dtype, int64_t head_dim, float* row) {
    with_type(dtype, [&]<class T>(T*) {
        T rounded[8];
        if constexpr (std::is_same_v<T, float>) return;
        for (int64_t dim = 0; dim < head_dim; dim += 8) {
            store<8>(rounded, load<8>(row + dim));
            store<8>(row + dim, load<8>(rounded));
        }
    });
}

// Dimension i is rotated together with i + head_dim / 2 (worker/models/rotary.py).
//   rotation  | cosines | sines |
template <int N>
inline void rotate_halves(const float* __restrict rotation, int64_t half, float* __restrict row) {
    const float *cosines = rotation, *sines = rotation + half;
    float *first = row, *second = row + half;
    for (int64_t dim = 0; dim < half; dim += N) {
        const F<N> a = load<N>(first + dim), b = load<N>(second + dim);
        const F<N> cosine = load<N>(cosines + dim), sine = load<N>(sines + dim);
        store<N>(first + dim, a * cosine - b * sine);
        store<N>(second + dim, b * cosine + a * sine);
    }
}

inline void rotate_row(const float* rotation, int64_t head_dim, float* row) {
    const int64_t half = head_dim / 2;
    if (half % 16 == 0) rotate_halves<16>(rotation, half, row);
    else rotate_halves<4>(rotation, half, row);
}

// Below this the largest element counts as zero, because its inverse is not finite.
constexpr float LEAST_LARGEST = 0x1p-100f;

// Parts of an int8 row with their own scale: of 128 numbers, if the row is a multiple of 128.
constexpr int64_t SCALED_DIMS = 128;
constexpr int64_t MOST_SCALES = 4;

inline int64_t num_scales(int64_t head_dim) {
    const int64_t parts = head_dim / SCALED_DIMS;
    return head_dim % SCALED_DIMS == 0 && parts <= MOST_SCALES ? parts : 1;
}

// Symmetric int8 with one scale; returns the scale, largest / 127, or NaN if an element is not
// finite.
inline float quantise_row(const float* row, int64_t head_dim, int8_t* to) {
    F<8> largest = {}, nonfinite = {};
    for (int64_t dim = 0; dim < head_dim; dim += 8) {
        const F<8> value = load<8>(row + dim);
        largest = maximum<8>(largest, maximum<8>(value, -value));
        nonfinite += value * 0.0f;
    }
    const float most = max_lanes<8>(largest);
    if (sum_lanes<8>(nonfinite) != 0.0f || most < LEAST_LARGEST) {
        std::fill_n(to, head_dim, int8_t(0));
        return sum_lanes<8>(nonfinite) != 0.0f ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    }
    const float inverse = 127.0f / most;
    for (int64_t dim = 0; dim < head_dim; dim += 8) {
        const auto whole = nearest<8>(load<8>(row + dim) * inverse);
        const auto bytes = __builtin_convertvector(whole, Vec<8>::B);
        __builtin_memcpy(to + dim, &bytes, sizeof(bytes));
    }
    return most / 127.0f;
}

// Scales of the int8 rows of one KV head in one page, ordered by part.
template <class Page>
TOKEND_INLINE auto page_scales(Page* page, int64_t block_size, int64_t head_dim) {
    using Scale = std::conditional_t<std::is_const_v<Page>, const float, float>;
    return reinterpret_cast<Scale*>(page + block_size * head_dim);
}

// Writes a row into a page of one KV head, `offset` tokens from its beginning.
template <class C>
TOKEND_INLINE void write_to_page(const float* row, int64_t head_dim, int64_t block_size, int64_t offset, C* page) {
    C* to = page + offset * head_dim;
    if constexpr (std::is_same_v<C, int8_t>) {
        // A row with NaN or infinity becomes NaN as a whole, so that sequences that read it are
        // detected.
        float* scales = page_scales(page, block_size, head_dim) + offset;
        const int64_t parts = num_scales(head_dim), dims = head_dim / parts;
        bool nonfinite = false;
        for (int64_t part = 0; part < parts; part++) {
            const float scale = quantise_row(row + part * dims, dims, to + part * dims);
            scales[part * block_size] = scale;
            nonfinite |= scale != scale;
        }
        for (int64_t part = 0; part < parts && nonfinite; part++) {
            scales[part * block_size] = std::numeric_limits<float>::quiet_NaN();
            std::fill_n(to + part * dims, dims, int8_t(0));
        }
    } else {
        for (int64_t dim = 0; dim < head_dim; dim += 8) store<8>(to + dim, load<8>(row + dim));
    }
}

}  // namespace tokend
