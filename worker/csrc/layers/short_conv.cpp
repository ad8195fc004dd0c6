// Gated short convolutions: the inputs of a step in float32, their convolution, the windows.
#include "layers/short_conv.h"

#include "common/team.h"
#include "layers/recurrence_parts.h"

namespace tokend {
namespace {

// Channels that a thread takes at a time.
constexpr int64_t SPAN = 512;

// out = a * b
template <class A, class B, class Out>
TOKEND_FLATTEN void multiply(const A* a, const B* b, int64_t size, Out* out) {
    for (int64_t at = 0; at < size; at += N) {
        const int64_t count = std::min<int64_t>(N, size - at);
        store_part(out + at, count, load_part(a + at, count) * load_part(b + at, count));
    }
}

template <class T>
void run_layer(const TokendShortConv& layer, const TokendRecurrenceRun& run) {
    const int64_t channels = layer.channels, spans = (channels + SPAN - 1) / SPAN;
    const Taps taps{layer.num_taps, channels, layer.taps, layer.bias};
    const T* rows = static_cast<const T*>(run.rows);
    float* inputs = static_cast<float*>(run.scratch);  // [num_tokens, channels]
    in_team(run.num_tokens * channels * layer.num_taps > PARALLEL_ELEMENTS, [&] {
#pragma omp for schedule(static)
        for (int64_t index = 0; index < run.num_tokens * spans; index++) {
            const int64_t token = index / spans, first = index % spans * SPAN;
            const T* row = rows + token * run.row_stride + first;
            multiply(row, row + 2 * channels, std::min(SPAN, channels - first), inputs + token * channels + first);
        }
#pragma omp for schedule(static)
        for (int64_t index = 0; index < run.num_tokens * spans; index++) {
            const int64_t token = index / spans, first = index % spans * SPAN, size = std::min(SPAN, channels - first);
            const int64_t sequence =
                std::upper_bound(run.query_start, run.query_start + run.num_seqs + 1, token) - run.query_start - 1;
            const SequenceTokens tokens(run, sequence);
            float convolved[SPAN];
            convolve_token<false>(
                taps, tokens, tokens.own + token - tokens.row, inputs, channels, inputs_before(run, sequence, 0), first, size,
                convolved
            );
            multiply(
                rows + token * run.row_stride + channels + first, convolved, size,
                static_cast<T*>(run.out) + token * channels + first
            );
        }
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < run.num_seqs * spans; index++) {
            const int64_t first = index % spans * SPAN;
            write_inputs(
                run, inputs, channels, 0, layer.num_taps - 1, channels, index / spans, first,
                std::min(first + SPAN, channels)
            );
        }
    });
}

}  // namespace
}  // namespace tokend

extern "C" int64_t tokend_short_conv_bytes(const void* layer, int64_t num_tokens) {
    return num_tokens * static_cast<const TokendShortConv*>(layer)->channels * int64_t(sizeof(float));
}

extern "C" void tokend_short_conv_run(const void* layer, const TokendRecurrenceRun* run) {
    tokend::with_type(run->dtype, [&](auto* type) {
        tokend::run_layer<std::remove_pointer_t<decltype(type)>>(*static_cast<const TokendShortConv*>(layer), *run);
    });
}
