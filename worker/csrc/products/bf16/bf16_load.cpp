// Lays out the rows of a dense weight of bfloat16, and takes some of them out again.
#include <algorithm>
#include <cstring>

#include "products/bf16/bf16_format.h"

namespace tokend {
namespace {

// Below this many bytes one thread is done before others wake.
constexpr int64_t PARALLEL_BYTES = 1 << 16;

// Where rows of a dense weight are: row i is row order[i] at `dense`, or row i without an order.
struct DenseRows {
    const bfloat16* dense;
    int64_t stride;
    const int64_t* order;

    const bfloat16* row(int64_t index) const { return dense + (order ? order[index] : index) * stride; }
};

// Words of two inputs of up to 16 outputs, a line of a panel each. Only their places are written:
//
//   output 0    a b c …            line 0    a A …
//   output 1    A B C …     ->     line 1    b B …
void pack_panel(int64_t in_features, const bfloat16* const* rows, int64_t num_outputs, uint8_t* to) {
    for (int64_t at = 0; at < in_features; at += STEP_INPUTS, to += PAIR_STEP_BYTES)
        for (int64_t line = 0; line < STEP_LINES; line++) {
            const int64_t input = at + 2 * line, count = std::clamp<int64_t>(in_features - input, 0, 2);
            uint8_t* word = to + line * LINE_BYTES;
            if (count == 2)
                for (int64_t output = 0; output < num_outputs; output++, word += 4)
                    std::memcpy(word, rows[output] + input, 4);
            else if (count == 1)
                for (int64_t output = 0; output < num_outputs; output++, word += 4)
                    std::memcpy(word, rows[output] + input, 2);
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

extern "C" void tokend_bf16_pack(
    const TokendBf16Shape* weight, int64_t first, int64_t num_rows, int64_t stride, const void* dense, const int64_t* order) {
    const Bf16Layout layout(*weight);
    const DenseRows source = {static_cast<const bfloat16*>(dense), stride, order};
    const int64_t end = first + num_rows, first_panel = first / PANEL_OUTPUTS;
    const int64_t end_panel = whole(end, PANEL_OUTPUTS) / PANEL_OUTPUTS;
#pragma omp parallel for schedule(static) if (num_rows * weight->in_features * 2 > PARALLEL_BYTES)
    for (int64_t panel = first_panel; panel < end_panel; panel++) {
        const int64_t from = std::max(first, panel * PANEL_OUTPUTS);
        const int64_t count = std::min(end, (panel + 1) * PANEL_OUTPUTS) - from;
        const bfloat16* rows[PANEL_OUTPUTS];
        for (int64_t index = 0; index < count; index++) rows[index] = source.row(from - first + index);
        pack_panel(weight->in_features, rows, count, layout.column(*weight, from));
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
