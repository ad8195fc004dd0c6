// The activation of the MLP: silu or GELU of one half of a row, times the other half; or of the
// whole row, without a gate.
//
// All functions but the exact GELU, the squared ReLU and the sigmoid itself are x * sigmoid(y): y = x for silu, 0.5 (1 + tanh u) = sigmoid(2 u)
// for GELU in its tanh form, and
// y = 1.702 x for the clamped SwiGLU of gpt-oss (OpenAI, gpt-oss model card, section 2.3).
#include "common/row_vectors.h"
#include "layers/row_parts.h"
#include "layers/rows.h"

namespace tokend {
namespace {

constexpr int N = ROW_LANES;
// Below this, some microseconds of one thread, waking other threads costs more than it saves.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 13;
// Elements that a thread takes at a time.
constexpr int64_t SPAN = 512;

// The distribution function of the normal distribution, 0.5 erfc(-x / sqrt 2): for x < 0 by the
// polynomial 7.1.26 of Abramowitz and Stegun, else 1 minus that of -x. Error below 1e-7.
TOKEND_INLINE F<N> normal_cdf(F<N> x) {
    const F<N> size = (x < F<N>{} ? -x : x) * 0.70710678118654752f;
    const F<N> one = splat<N>(1.0f), t = one / (one + 0.3275911f * size);
    F<N> p = splat<N>(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const F<N> tail = 0.5f * p * t * exp_nonpositive<N>(-size * size);
    return x < F<N>{} ? tail : one - tail;
}

constexpr float LIMIT = 7.0f;

// NaN stays NaN.
TOKEND_INLINE F<N> at_most_limit(F<N> x) { return x > LIMIT ? splat<N>(LIMIT) : x; }

template <int64_t KIND>
TOKEND_INLINE F<N> activated(F<N> x) {
    if constexpr (KIND == TOKEND_SILU) return x * sigmoid<N>(x);
    if constexpr (KIND == TOKEND_SIGMOID_GATE) return sigmoid<N>(x);
    if constexpr (KIND == TOKEND_GELU) return x * normal_cdf(x);
    if constexpr (KIND == TOKEND_RELU_SQUARED) {
        const F<N> positive = x < F<N>{} ? F<N>{} : x;  // NaN stays NaN
        return positive * positive;
    }
    if constexpr (KIND == TOKEND_SWIGLU_OAI) {
        const F<N> clamped = at_most_limit(x);
        return clamped * sigmoid<N>(1.702f * clamped);
    }
    constexpr float TWICE_SQRT_2_OVER_PI = 1.5957691216057308f;
    return x * sigmoid<N>(TWICE_SQRT_2_OVER_PI * (x + 0.044715f * (x * x * x)));
}

// What the activation is multiplied by.
template <int64_t KIND>
TOKEND_INLINE F<N> factor(F<N> up) {
    if constexpr (KIND != TOKEND_SWIGLU_OAI) return up;
    return (up < -LIMIT ? splat<N>(-LIMIT) : at_most_limit(up)) + 1.0f;
}

// up: null if it is not gated.
template <int64_t KIND, class T, class To>
TOKEND_FLATTEN void gate_span(const T* x, const T* up, int64_t size, To* out) {
    int64_t at = 0;
    for (; at + N <= size; at += N) {
        F<N> value = activated<KIND>(load<N>(x + at));
        if (up) value *= factor<KIND>(load<N>(up + at));
        store<N>(out + at, value);
    }
    if (at < size) {
        const int64_t rest = size - at;
        F<N> value = activated<KIND>(load_some<N>(x + at, rest, 0.0f));
        if (up) value *= factor<KIND>(load_some<N>(up + at, rest, 0.0f));
        store_some<N>(out + at, rest, value);
    }
}

template <int64_t KIND, class T>
void gate_rows(const TokendGateCall* gate) {
    const int64_t size = gate->size, spans = (size + SPAN - 1) / SPAN;
    const T* x = static_cast<const T*>(gate->x);
    T* out = static_cast<T*>(gate->out);
#pragma omp parallel for schedule(static) if (gate->num_rows * size > PARALLEL_ELEMENTS)
    for (int64_t index = 0; index < gate->num_rows * spans; index++) {
        const int64_t row = index / spans, from = index % spans * SPAN;
        const T* half = x + row * (gate->is_gated ? 2 : 1) * size + from;
        const T* up = gate->is_gated ? half + size : nullptr;
        gate_span<KIND>(half, up, std::min(SPAN, size - from), out + row * size + from);
    }
}

// Calls body with a null pointer of the element type, and the kind.
template <class Body>
void with_kind(int64_t dtype, int64_t kind, Body body) {
    with_type(dtype, [&](auto* type) {
        switch (kind) {
            case TOKEND_SILU: return body(type, std::integral_constant<int64_t, TOKEND_SILU>());
            case TOKEND_GELU_TANH: return body(type, std::integral_constant<int64_t, TOKEND_GELU_TANH>());
            case TOKEND_SWIGLU_OAI: return body(type, std::integral_constant<int64_t, TOKEND_SWIGLU_OAI>());
            case TOKEND_SIGMOID_GATE: return body(type, std::integral_constant<int64_t, TOKEND_SIGMOID_GATE>());
            case TOKEND_RELU_SQUARED: return body(type, std::integral_constant<int64_t, TOKEND_RELU_SQUARED>());
            case TOKEND_GELU: return body(type, std::integral_constant<int64_t, TOKEND_GELU>());
        }
    });
}

// out = compute(x, out), vector by vector.
template <class T, class Compute>
TOKEND_FLATTEN void map_span(const T* x, int64_t size, T* out, Compute compute) {
    for (int64_t at = 0; at < size; at += N) {
        const int64_t count = std::min<int64_t>(N, size - at);
        if (count == N) {
            store<N>(out + at, compute(load<N>(x + at), load<N>(out + at)));
        } else {
            store_some<N>(out + at, count, compute(load_some<N>(x + at, count, 0.0f), load_some<N>(out + at, count, 0.0f)));
        }
    }
}

}  // namespace

void scale_row(int64_t dtype, int64_t size, double factor, const void* x, void* out) {
    with_type(dtype, [&]<class T>(T*) {
        map_span(static_cast<const T*>(x), size, static_cast<T*>(out), [&](F<N> value, F<N>) {
            return value * float(factor);
        });
    });
}

void accumulate_row(int64_t dtype, int64_t size, const void* x, void* out) {
    with_type(dtype, [&]<class T>(T*) {
        map_span(static_cast<const T*>(x), size, static_cast<T*>(out), [](F<N> value, F<N> sum) { return sum + value; });
    });
}

void gate_row(int64_t kind, int64_t is_gated, int64_t dtype, int64_t size, const void* x, void* out) {
    with_kind(dtype, kind, [&]<class T>(T*, auto known) {
        const T* half = static_cast<const T*>(x);
        gate_span<known, T, T>(half, is_gated ? half + size : nullptr, size, static_cast<T*>(out));
    });
}

}  // namespace tokend

extern "C" void tokend_gate(const TokendGateCall* gate) {
    tokend::with_kind(gate->dtype, gate->kind, [&](auto* type, auto kind) {
        tokend::gate_rows<kind, std::remove_pointer_t<decltype(type)>>(gate);
    });
}
