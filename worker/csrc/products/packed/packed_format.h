// The types of packed weights: what a block of each consists of, and where it is.
#pragma once

#include "common/simd.h"
#include "products/packed/packed.h"
#include "products/panels.h"

namespace tokend {

constexpr int PANEL = 32;         // outputs
constexpr int BLOCK = 32;         // inputs
constexpr int ROW = PANEL * 4;    // bytes of a row of codes
constexpr int SUPER_BLOCKS = 8;   // blocks that share a head, in the types that have heads

enum class Scales {
    half,       // float16 a block
    half_low,   // float16 a block, float16 minimum
    super_low,  // 8 bits a block times float16 of the head, and the same for the minimum
    super_half, // signed 8 bits for 16 inputs times float16 of the head
    power       // a power of two a block, 8 bits of exponent (E8M0)
};

template <int BITS_, int ZERO_, Scales SCALES_>
struct Format {
    static constexpr int BITS = BITS_;
    static constexpr int ZERO = ZERO_;
    static constexpr Scales SCALES = SCALES_;
    static constexpr bool HAS_TABLE = SCALES == Scales::power;
    static constexpr int CODE_BITS = HAS_TABLE ? 5 : BITS;  // of a code as it is multiplied
    static constexpr bool HAS_LOW = SCALES == Scales::half_low || SCALES == Scales::super_low;
    static constexpr int HALVES = SCALES == Scales::super_half ? 2 : 1;
    static constexpr bool HAS_HEAD = SCALES == Scales::super_low || SCALES == Scales::super_half;

    static constexpr int CODE_BYTES = BITS == 8 ? 8 * ROW : BITS == 6 ? 6 * ROW : BITS == 5 ? 5 * ROW : 4 * ROW;
    static constexpr int SCALE_BYTES = HAS_HEAD || HAS_TABLE ? PANEL : PANEL * 2;  // of one kind
    static constexpr int BLOCK_BYTES =
        CODE_BYTES + SCALE_BYTES * (SCALES == Scales::half || SCALES == Scales::power ? 1 : 2);
    static constexpr int HEAD_BYTES = !HAS_HEAD ? 0 : HAS_LOW ? PANEL * 4 : PANEL * 2;

    static constexpr int64_t head(int64_t block) {
        return block / SUPER_BLOCKS * (HEAD_BYTES + SUPER_BLOCKS * BLOCK_BYTES);
    }
    static constexpr int64_t place(int64_t block) {
        if (!HAS_HEAD) return block * BLOCK_BYTES;
        return head(block) + HEAD_BYTES + block % SUPER_BLOCKS * BLOCK_BYTES;
    }
    static constexpr int64_t panel_bytes(int64_t in_features) {
        return HAS_HEAD ? head(in_features / BLOCK) : place(in_features / BLOCK);
    }
};

using Q4_0 = Format<4, 8, Scales::half>;
using Q4_1 = Format<4, 0, Scales::half_low>;
using Q5_0 = Format<5, 16, Scales::half>;
using Q5_1 = Format<5, 0, Scales::half_low>;
using Q8_0 = Format<8, 128, Scales::half>;
using Q4_K = Format<4, 0, Scales::super_low>;
using Q5_K = Format<5, 0, Scales::super_low>;
using Q6_K = Format<6, 32, Scales::super_half>;
using MXFP4 = Format<4, 12, Scales::power>;

// MXFP4 (OCP Microscaling Formats 1.0, section 5): a number is E2M1 times a power of two. Here it is
// twice E2M1, a whole number, times half the power; the table has 12 + twice E2M1.
alignas(16) constexpr uint8_t E2M1_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int32_t LEAST_POWER = 0x00400000;  // the float 2^-127, of exponent 0

// Calls body(Format()) with the format of a type.
template <class Body>
void with_format(int64_t type, Body body) {
    switch (type) {
        case TOKEND_Q4_0: return body(Q4_0());
        case TOKEND_Q4_1: return body(Q4_1());
        case TOKEND_Q5_0: return body(Q5_0());
        case TOKEND_Q5_1: return body(Q5_1());
        case TOKEND_Q8_0: return body(Q8_0());
        case TOKEND_Q4_K: return body(Q4_K());
        case TOKEND_Q5_K: return body(Q5_K());
        case TOKEND_Q6_K: return body(Q6_K());
        case TOKEND_MXFP4: return body(MXFP4());
    }
}

inline int64_t num_panels(int64_t out_features) { return (out_features + PANEL - 1) / PANEL; }

// Rows of activations, rounded to 8 bits with a scale for 32 numbers.

// Row `row` of the product's input to in_features / 32 blocks.
void quantise_row(const TokendProduct& product, int64_t in_features, int64_t row, TokendQuantised* to);

// A part of tokend_quantised_product, by the calling thread alone.
void multiply_packed_part(const TokendPackedShape& weight, const TokendProduct& product, const TokendQuantised* rows,
                          const ProductPart& part);

}  // namespace tokend
