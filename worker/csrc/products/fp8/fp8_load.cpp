// Lays out the rows of an FP8 weight, and takes some of them out again.
#include <algorithm>
#include <cstring>
#include <limits>

#include "products/fp8/fp8_format.h"

namespace tokend {
namespace {

// Below this many bytes one thread is done before others wake.
constexpr int64_t PARALLEL_BYTES = 1 << 16;

bool put_row(const Fp8Layout& layout, const TokendFp8Shape& weight, int64_t output, const uint8_t* codes,
             const float* scales) {
    float* scale = layout.scale(weight, output);
    for (int64_t group = 0; group < layout.num_groups; group++)
        scale[group * (PAIR_OUTPUTS / layout.scale_outputs)] = scales[group];
    uint8_t* to = layout.column(weight, output);
    bool has_nan = false;
    for (int64_t step = 0; step < layout.num_steps; step++, to += FP8_STEP_BYTES, codes += STEP_INPUTS) {
        for (int64_t line = 0; line < STEP_LINES; line++) std::memcpy(to + layout.line_at(line), codes + 2 * line, 2);
        for (int64_t i = 0; i < STEP_INPUTS; i++) has_nan |= (codes[i] & 0x7f) == 0x7f;
    }
    return has_nan;
}

float number_of(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    float number = exponent == 0 ? float(fraction) * 0x1p-9f
                                 : bit_cast<float>(int32_t(((code & 0x7f) + (120 << 3)) << 20));
    if ((code & 0x7f) == 0x7f) number = std::numeric_limits<float>::quiet_NaN();
    return code & 0x80 ? -number : number;
}

void take_row(const Fp8Layout& layout, const TokendFp8Shape& weight, int64_t id, float* to) {
    const uint8_t* from = layout.column(weight, id);
    const float* scales = layout.scale(weight, id);
    for (int64_t at = 0; at < weight.in_features; at += STEP_INPUTS, from += FP8_STEP_BYTES) {
        const float scale = scales[at / weight.scale_inputs * (PAIR_OUTPUTS / layout.scale_outputs)];
        for (int64_t i = 0; i < STEP_INPUTS; i++)
            *to++ = number_of(from[layout.line_at(i / 2) + i % 2]) * scale;
    }
}

}  // namespace
}  // namespace tokend

using namespace tokend;

extern "C" int64_t tokend_fp8_bytes(const TokendFp8Shape* weight) { return Fp8Layout(*weight).bytes(); }

extern "C" int64_t tokend_fp8_pack(const TokendFp8Shape* weight, int64_t first, int64_t num_rows, int64_t stride,
                                   const void* codes, const float* scales, const int64_t* order) {
    const Fp8Layout layout(*weight);
    int64_t num_nan = 0;
    // Outputs that share scales write the same floats: rows of a pair are one thread's.
    const int64_t first_pair = first / PAIR_OUTPUTS, end_pair = whole(first + num_rows, PAIR_OUTPUTS) / PAIR_OUTPUTS;
#pragma omp parallel for schedule(static) reduction(+ : num_nan) if (num_rows * weight->in_features > PARALLEL_BYTES)
    for (int64_t pair = first_pair; pair < end_pair; pair++) {
        const int64_t end = std::min(first + num_rows, (pair + 1) * PAIR_OUTPUTS);
        for (int64_t output = std::max(first, pair * PAIR_OUTPUTS); output < end; output++) {
            const int64_t row = order ? order[output - first] : output - first;
            num_nan += put_row(layout, *weight, output, static_cast<const uint8_t*>(codes) + row * stride,
                               scales + row * layout.num_groups);
        }
    }
    return num_nan > 0;
}

extern "C" int64_t tokend_fp8_rows(const TokendFp8Shape* weight, int64_t num_ids, const int64_t* ids, float* numbers) {
    const Fp8Layout layout(*weight);
    for (int64_t place = 0; place < num_ids; place++)
        if (ids[place] < 0 || ids[place] >= weight->out_features) return place;
#pragma omp parallel for schedule(static) if (num_ids * weight->in_features > PARALLEL_BYTES)
    for (int64_t place = 0; place < num_ids; place++)
        take_row(layout, *weight, ids[place], numbers + place * weight->in_features);
    return num_ids;
}
