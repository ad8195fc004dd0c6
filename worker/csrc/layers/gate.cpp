// The activation of the MLP: silu or GELU (tanh form) of one half of a row, times the other half;
// or of the whole row, without a gate.
//
// Both functions are x * sigmoid(y): y = x for silu, and 0.5 (1 + tanh u) = sigmoid(2 u) for GELU.
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

// e = exp(-|y|) does not overflow: 1 / (1 + e) for y >= 0, else e / (1 + e).
TOKEND_INLINE F<N> sigmoid(F<N> y) {
    const F<N> one = splat<N>(1.0f);
    const F<N> e = exp_nonpositive<N>(y < F<N>{} ? y : -y);
    return (y < F<N>{} ? e : one) / (one + e);
}

template <int64_t KIND>
TOKEND_INLINE F<N> activated(F<N> x) {
    if constexpr (KIND == TOKEND_SILU) return x * sigmoid(x);
    constexpr float TWICE_SQRT_2_OVER_PI = 1.5957691216057308f;
    return x * sigmoid(TWICE_SQRT_2_OVER_PI * (x + 0.044715f * (x * x * x)));
}

// up: null if it is not gated.
template <int64_t KIND, class T, class To>
TOKEND_FLATTEN void gate_span(const T* x, const T* up, int64_t size, To* out) {
    int64_t at = 0;
    for (; at + N <= size; at += N) {
        F<N> value = activated<KIND>(load<N>(x + at));
        if (up) value *= load<N>(up + at);
        store<N>(out + at, value);
    }
    if (at < size) {
        const int64_t rest = size - at;
        F<N> value = activated<KIND>(load_some<N>(x + at, rest, 0.0f));
        if (up) value *= load_some<N>(up + at, rest, 0.0f);
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
void with_kind(const TokendGateCall* gate, Body body) {
    with_type(gate->dtype, [&](auto* type) {
        if (gate->kind == TOKEND_SILU)
            body(type, std::integral_constant<int64_t, TOKEND_SILU>());
        else
            body(type, std::integral_constant<int64_t, TOKEND_GELU_TANH>());
    });
}

}  // namespace

void gate_row(int64_t kind, int64_t is_gated, int64_t dtype, int64_t size, const void* x, void* out) {
    with_type(dtype, [&]<class T>(T*) {
        const T* half = static_cast<const T*>(x);
        const auto gate = kind == TOKEND_SILU ? gate_span<TOKEND_SILU, T, T> : gate_span<TOKEND_GELU_TANH, T, T>;
        gate(half, is_gated ? half + size : nullptr, size, static_cast<T*>(out));
    });
}

}  // namespace tokend

extern "C" void tokend_gate(const TokendGateCall* gate) {
    tokend::with_kind(gate, [&](auto* type, auto kind) {
        tokend::gate_rows<kind, std::remove_pointer_t<decltype(type)>>(gate);
    });
}
