// The C interface of packed weights (quantisation blocks) and products with them, and their
// memory layout.
//
// A weight [out, in] is cut into panels of 32 outputs; the last one is filled up with
// zeros. A panel holds all data that a product reads, by blocks of 32 inputs, in the order of the
// reads:
//
//   panel   [ block 0 | block 1 | … ]              types with a scale a block
//           [ factors | block 0 | block 1 | … ]    NVFP4: a float for each output, which multiplies its sum
//           [ head | block 0 … 7 | head | … ]      types with scales of scales (…_K, IQ4_XS), TQ2_0
//           [ head | block 0 … 3 | head | … ]      INT4_128, INT8_128; of INT4_32 a head for each block
//   block   [ codes | scales | minima ]            each for 32 outputs
//   codes   rows of 128 bytes = 32 outputs x 4 inputs of a byte each, so that 64 bytes
//           feed one instruction that multiplies bytes and adds four neighbours:
//           8 bits   row j (0 … 7)   inputs 4j … 4j+3
//           2 bits   row i (0 … 1)   bits 2(j%4) of a byte of row j/4
//           3 bits   … and one row more: bit j of a byte is the third bit of row j's
//           4 bits   row i (0 … 3)   low nibbles inputs 8i … 8i+3, high ones 8i+4 … 8i+7
//           5 bits   … and one row more: bit j of a byte is the fifth bit of row j's
//           6 bits   … and two rows more: bits 2(j%4) of a byte of row j/4
//
// Codes are unsigned; a type whose numbers are scale * (code - zero) with one zero for all keeps no
// minima. Codes of MXFP4, NVFP4, IQ4_NL, IQ4_XS and NF4 are places in a table of unsigned numbers, to which
// their zero applies.
//
// IQ1, IQ2, IQ3 and TQ1_0 stay in the blocks of the file (file_blocks.h).
//
// INT4 and INT8 are those of checkpoints whose groups of columns have a scale and a zero each; the
// number behind it is that of columns that share a head here, by which the group is divisible:
//
//   a block of `raw`   | scale, float16 | zero, a byte | 0 | codes of 32 columns | codes of 32 … |
//   codes of 32        4 bits: 16 bytes, columns 0 … 15 in the low halves; 8 bits: 32 bytes
#pragma once

#include <cstdint>

namespace tokend {

constexpr int PANEL = 32;       // outputs
constexpr int BLOCK = 32;       // inputs
constexpr int ROW = PANEL * 4;  // bytes of a row of codes

}  // namespace tokend

enum {
    TOKEND_Q4_0,
    TOKEND_Q4_1,
    TOKEND_Q5_0,
    TOKEND_Q5_1,
    TOKEND_Q8_0,
    TOKEND_Q4_K,
    TOKEND_Q5_K,
    TOKEND_Q6_K,
    TOKEND_MXFP4,
    TOKEND_Q2_K,
    TOKEND_Q3_K,
    TOKEND_IQ4_NL,
    TOKEND_IQ4_XS,
    TOKEND_INT4_32,
    TOKEND_INT4_128,
    TOKEND_INT8_32,
    TOKEND_INT8_128,
    TOKEND_NF4,
    TOKEND_IQ1_S,
    TOKEND_IQ1_M,
    TOKEND_IQ2_XXS,
    TOKEND_IQ2_XS,
    TOKEND_IQ2_S,
    TOKEND_IQ3_XXS,
    TOKEND_IQ3_S,
    TOKEND_TQ1_0,
    TOKEND_TQ2_0,
    TOKEND_NVFP4
};

extern "C" {

struct TokendPackedShape {
    int64_t type;
    int64_t out_features;
    int64_t in_features;  // whole blocks of the type
    void* packed;         // tokend_packed_bytes, aligned to 64
};

// 32 numbers of a row: number = code * scale.
struct TokendQuantised {
    int8_t codes[32];   // -127 … 127
    float scale;        // NaN if one of the numbers is NaN or infinite
    float total;        // scale * sum of the codes
    int32_t minus[2];   // the sums of codes 0 … 15 and 16 … 31, negated
};

struct TokendProduct {
    int64_t num_rows;
    int64_t input_dtype;  // 0 float32, 1 bfloat16; the same below
    int64_t input_stride;  // numbers from row to row; the same below
    const void* input;
    int64_t bias_dtype;
    const void* bias;  // [out], or null
    int64_t output_dtype;
    int64_t output_stride;
    void* output;
    int64_t adds;  // 1: adds to what the output holds
};

// Returns the bytes of a packed weight of this type; `packed` of the argument is not read.
__attribute__((visibility("default"))) int64_t tokend_packed_bytes(const TokendPackedShape* weight);

// Packs outputs first … first + num_rows - 1 from rows of blocks, as GGUF files have them: row order[i] of `raw`
// becomes output first + i, or row i where order is null. Factors of outputs become 1. The memory of the
// weight is zero at first. Runs on the calling thread.
__attribute__((visibility("default"))) void tokend_pack_blocks(
    const TokendPackedShape* weight, int64_t first, int64_t num_rows, const void* raw, const int64_t* order);

// Rounds dense rows (0 float32, 1 bfloat16, 2 float16) to a weight of type Q8_0, whose memory is
// zero at first.
__attribute__((visibility("default"))) void tokend_pack_dense(
    const TokendPackedShape* weight, int64_t dtype, int64_t stride, const void* dense);

// Unpacks rows to `numbers`, [num_ids, in] of dtype 0, 1 or 2. Returns num_ids, or the index of the
// first id that is not a row of the weight; then nothing was written.
__attribute__((visibility("default"))) int64_t tokend_unpack_rows(
    const TokendPackedShape* weight, int64_t num_ids, const int64_t* ids, int64_t dtype, void* numbers);

// Rounds the input rows [num_rows, in_features] of `product` to blocks [num_rows, in_features / 32].
__attribute__((visibility("default"))) void tokend_quantise_rows(
    const TokendProduct* product, int64_t in_features, TokendQuantised* rows);

// output (+)= input @ weight^T + bias.
__attribute__((visibility("default"))) void tokend_packed_product(
    const TokendPackedShape* weight, const TokendProduct* product);

// The same with rows that are quantised already: the input of `product` is not read. May be called
// by every thread of a team (team.h).
__attribute__((visibility("default"))) void tokend_quantised_product(
    const TokendPackedShape* weight, const TokendProduct* product, const TokendQuantised* rows);
}
