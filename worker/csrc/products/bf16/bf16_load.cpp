// Lays out the rows of a dense weight of bfloat16, and takes some of them out again.
#include <algorithm>
#include <cstring>

#include "products/bf16/bf16_format.h"

namespace tokend {
namespace {

// Below this many bytes one thread is done before others wake.
constexpr int64_t PARALLEL_BYTES = 1 << 16;

// Words of two inputs of up to 16 outputs, a line of a panel each:
//
//   output 0    a b c …            line 0    a A …
//   output 1    A B C …     ->     line 1    b B …
void pack_panel(int64_t in_features, int64_t stride, const bfloat16* dense, int64_t num_outputs, uint8_t* to) {
    for (int64_t at = 0; at < in_features; at += STEP_INPUTS, to += PAIR_STEP_BYTES)
        for (int64_t line = 0; line < STEP_LINES; line++) {
            uint32_t words[PANEL_OUTPUTS] = {};
            const int64_t input = at + 2 * line, count = std::clamp<int64_t>(in_features - input, 0, 2);
            if (count == 2)
                for (int64_t output = 0; output < num_outputs; output++)
                    std::memcpy(words + output, dense + output * stride + input, 4);
            else if (count == 1)
                for (int64_t output = 0; output < num_outputs; output++)
                    words[output] = dense[output * stride + input].bits;
            std::memcpy(to + line * LINE_BYTES, words, LINE_BYTES);
        }
}

void take_row(const Bf16Layout& layout, const TokendBf16Shape& weight, int64_t id, bfloat16* to) {
    const uint8_t* from = layout.column(weight, id);
    for (int64_t at = 0; at < weight.in_features; at += STEP_INPUTS, from += PAIR_STEP_BYTES) {
        uint32_t words[STEP_LINES];
        for (int64_t line = 0; line < STEP_LINES; line++) std::memcpy(words + line, from + line * LINE_BYTES, 4);
        std::memcpy(to + at, words, size_t(std::min(STEP_INPUTS, weight.in_features - at) * 2));
    }
}

}  // namespace
}  // namespace tokend

using namespace tokend;

extern "C" int64_t tokend_bf16_bytes(const TokendBf16Shape* weight) { return Bf16Layout(*weight).bytes(); }

extern "C" void tokend_bf16_pack(const TokendBf16Shape* weight, int64_t stride, const void* dense) {
    const Bf16Layout layout(*weight);
    const auto* rows = static_cast<const bfloat16*>(dense);
#pragma omp parallel for schedule(static) if (layout.bytes() > PARALLEL_BYTES)
    for (int64_t panel = 0; panel < 2 * layout.num_pairs; panel++) {
        const int64_t first = panel * PANEL_OUTPUTS;
        const int64_t count = std::clamp<int64_t>(weight->out_features - first, 0, PANEL_OUTPUTS);
        pack_panel(weight->in_features, stride, rows + first * stride, count, layout.column(*weight, first));
    }
}

extern "C" int64_t tokend_bf16_rows(const TokendBf16Shape* weight, int64_t num_ids, const int64_t* ids, void* numbers) {
    const Bf16Layout layout(*weight);
    for (int64_t place = 0; place < num_ids; place++)
        if (ids[place] < 0 || ids[place] >= weight->out_features) return place;
    auto* to = static_cast<bfloat16*>(numbers);
#pragma omp parallel for schedule(static) if (num_ids * weight->in_features * 2 > PARALLEL_BYTES)
    for (int64_t place = 0; place < num_ids; place++)
        take_row(layout, *weight, ids[place], to + place * weight->in_features);
    return num_ids;
}
