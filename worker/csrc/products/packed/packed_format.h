// The types of packed weights: what a block of each consists of, and where it is.
#pragma once

#include "common/simd.h"
#include "products/packed/file_blocks.h"
#include "products/packed/packed.h"
#include "products/panels.h"

namespace tokend {

enum class Scales {
    half,       // float16 a block
    half_low,   // float16 a block, float16 minimum
    super_low,  // 8 bits a block times float16 of the head, and the same for the minimum
    super_half, // signed 8 bits for 16 inputs times float16 of the head
    super_pair, // 4 bits for 16 inputs times float16 of the head, and the same for the minimum
    super_one,  // signed 8 bits a block times float16 of the head
    power,      // a power of two a block, 8 bits of exponent (E8M0)
    micro,      // 7 bits for 16 inputs: exponent and mantissa of E4M3
    group,      // float16 and zero of 8 bits in the head
    shared      // float16 in the head
};

// Which numbers the codes of a type with 4 bits stand for.
enum class Table { none, e2m1, iq4, nf4 };

template <int BITS_, int ZERO_, Scales SCALES_, int SUPER_ = 1, Table TABLE_ = Table::none>
struct Format {
    static constexpr bool IN_FILE_BLOCKS = false;
    static constexpr int BITS = BITS_;
    static constexpr int ZERO = ZERO_;
    static constexpr Scales SCALES = SCALES_;
    static constexpr int SUPER = SUPER_;  // blocks that share a head, or lie together in the file
    static constexpr Table TABLE = TABLE_;
    static constexpr bool HAS_TABLE = TABLE != Table::none;
    static constexpr int CODE_BITS = TABLE == Table::e2m1 ? 5 : HAS_TABLE ? 8 : BITS;  // of a code as it is multiplied
    static constexpr bool HAS_LOW = SCALES == Scales::half_low || SCALES == Scales::super_low ||
                                    SCALES == Scales::super_pair || SCALES == Scales::group;
    static constexpr int HALVES =
        SCALES == Scales::super_half || SCALES == Scales::super_pair || SCALES == Scales::micro ? 2 : 1;
    static constexpr bool HAS_FACTORS = SCALES == Scales::micro;  // of outputs, by which sums are multiplied
    static constexpr bool HAS_HEAD = SCALES == Scales::super_low || SCALES == Scales::super_half ||
                                     SCALES == Scales::super_pair || SCALES == Scales::super_one ||
                                     SCALES == Scales::group || SCALES == Scales::shared;

    static constexpr int CODE_BYTES = BITS * ROW;
    static constexpr int scale_bytes() {
        switch (SCALES) {
            case Scales::half: return PANEL * 2;
            case Scales::half_low: return PANEL * 4;
            case Scales::power:
            case Scales::super_one: return PANEL;
            case Scales::group:
            case Scales::shared: return 0;
            default: return PANEL * 2;
        }
    }
    static constexpr int head_bytes() {
        if (!HAS_HEAD) return 0;
        if (SCALES == Scales::group) return SUPER == 1 ? PANEL * 3 : PANEL * 4;  // whole lines
        return HAS_LOW ? PANEL * 4 : PANEL * 2;
    }
    static constexpr int BLOCK_BYTES = CODE_BYTES + scale_bytes();
    static constexpr int HEAD_BYTES = head_bytes();
    static constexpr int FACTOR_BYTES = HAS_FACTORS ? PANEL * 4 : 0;

    static constexpr int64_t head(int64_t block) {
        return FACTOR_BYTES + block / SUPER * (HEAD_BYTES + SUPER * BLOCK_BYTES);
    }
    static constexpr int64_t place(int64_t block) { return head(block) + HEAD_BYTES + block % SUPER * BLOCK_BYTES; }
    static constexpr int64_t panel_bytes(int64_t in_features) {
        return head(in_features / BLOCK);
    }
};

using Q4_0 = Format<4, 8, Scales::half>;
using Q4_1 = Format<4, 0, Scales::half_low>;
using Q5_0 = Format<5, 16, Scales::half>;
using Q5_1 = Format<5, 0, Scales::half_low>;
using Q8_0 = Format<8, 128, Scales::half>;
using Q4_K = Format<4, 0, Scales::super_low, 8>;
using Q5_K = Format<5, 0, Scales::super_low, 8>;
using Q6_K = Format<6, 32, Scales::super_half, 8>;
using MXFP4 = Format<4, 12, Scales::power, 1, Table::e2m1>;
using Q2_K = Format<2, 0, Scales::super_pair, 8>;
using Q3_K = Format<3, 4, Scales::super_half, 8>;
using IQ4_NL = Format<4, 128, Scales::half, 1, Table::iq4>;
using IQ4_XS = Format<4, 128, Scales::super_one, 8, Table::iq4>;
using INT4_32 = Format<4, 0, Scales::group, 1>;
using INT4_128 = Format<4, 0, Scales::group, 4>;
using INT8_32 = Format<8, 0, Scales::group, 1>;
using INT8_128 = Format<8, 0, Scales::group, 4>;
using NF4 = Format<4, 128, Scales::half, 1, Table::nf4>;
using TQ2_0 = Format<2, 1, Scales::shared, 8>;
using NVFP4 = Format<4, 12, Scales::micro, 2, Table::e2m1>;

// MXFP4 (OCP Microscaling Formats 1.0, section 5): a number is E2M1 times a power of two. Here it is
// twice E2M1, a whole number, times half the power; the table has 12 + twice E2M1.
alignas(16) constexpr uint8_t E2M1_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// The numbers of IQ4_NL and IQ4_XS (ggml), plus 128.
alignas(16) constexpr uint8_t IQ4_CODES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
// The numbers of NF4 (QLoRA, appendix E) times 112.03, rounded, plus 128: of all factors the one with the
// least error, 0.0038 at most and 0.0017 in the mean square, of numbers from -1 to 1.
alignas(16) constexpr uint8_t NF4_CODES[16] = {16, 50, 69, 84, 96, 107, 118, 128, 137, 146, 156, 166, 177, 191, 209, 240};
template <class Format>
constexpr const uint8_t (&TABLE_OF)[16] =
    Format::TABLE == Table::e2m1 ? E2M1_CODES : Format::TABLE == Table::iq4 ? IQ4_CODES : NF4_CODES;
constexpr int32_t LEAST_POWER = 0x00400000;  // the float 2^-127, of exponent 0

// NVFP4: a number is E2M1 times an unsigned E4M3, and times a float of the whole weight. E4M3 becomes a float16 of
// the same bits, which is 2^-8 of it; here half of it is needed.
constexpr float HALF_OF_E4M3 = 0x1p7f;

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
        case TOKEND_Q2_K: return body(Q2_K());
        case TOKEND_Q3_K: return body(Q3_K());
        case TOKEND_IQ4_NL: return body(IQ4_NL());
        case TOKEND_IQ4_XS: return body(IQ4_XS());
        case TOKEND_INT4_32: return body(INT4_32());
        case TOKEND_INT4_128: return body(INT4_128());
        case TOKEND_INT8_32: return body(INT8_32());
        case TOKEND_INT8_128: return body(INT8_128());
        case TOKEND_NF4: return body(NF4());
        case TOKEND_IQ1_S: return body(IQ1_S());
        case TOKEND_IQ1_M: return body(IQ1_M());
        case TOKEND_IQ2_XXS: return body(IQ2_XXS());
        case TOKEND_IQ2_XS: return body(IQ2_XS());
        case TOKEND_IQ2_S: return body(IQ2_S());
        case TOKEND_IQ3_XXS: return body(IQ3_XXS());
        case TOKEND_IQ3_S: return body(IQ3_S());
        case TOKEND_TQ1_0: return body(TQ1_0());
        case TOKEND_TQ2_0: return body(TQ2_0());
        case TOKEND_NVFP4: return body(NVFP4());
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
