// Vector loads and stores for rows whose length is not a multiple of the vector's.
#pragma once

#include <algorithm>

#include "attention/attention.h"
#include "common/simd.h"

namespace tokend {

#if defined(__AVX512F__)
constexpr int ROW_LANES = 16;
#elif defined(__AVX2__)
constexpr int ROW_LANES = 8;
#else
constexpr int ROW_LANES = 4;
#endif

// The last `count` < N elements, the other lanes are `fill`.
template <int N, class T>
TOKEND_INLINE F<N> load_some(const T* from, int64_t count, float fill) {
    T padded[N];
    F<N> filled = splat<N>(fill);
    store<N>(padded, filled);
    std::copy_n(from, count, padded);
    return load<N>(padded);
}

template <int N, class T>
TOKEND_INLINE void store_some(T* to, int64_t count, F<N> value) {
    T padded[N];
    store<N>(padded, value);
    std::copy_n(padded, count, to);
}

// Calls body with a null pointer of the element type.
template <class Body>
inline void with_type(int64_t dtype, Body body) {
    switch (dtype) {
        case TOKEND_FLOAT32: return body(static_cast<float*>(nullptr));
        case TOKEND_BFLOAT16: return body(static_cast<bfloat16*>(nullptr));
        case TOKEND_FLOAT16: return body(static_cast<float16*>(nullptr));
    }
}

}  // namespace tokend
