// Packs blocks of files and dense rows, and unpacks rows to numbers. Single-threaded: the caller uses
// several threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "products/packed/packed_format.h"

namespace tokend {
namespace {

constexpr int WORDS = BLOCK / 4;

TOKEND_INLINE uint32_t word_at(const void* from, int index) {
    return load_bytes<uint32_t>(static_cast<const uint8_t*>(from) + index * 4);
}

TOKEND_INLINE float to_float(uint16_t half) {
    const float16 halves[4] = {{half}};
    return load<4>(halves)[0];
}

// ---- codes of one output within a panel's block ---------------------------------

template <class Format>
TOKEND_INLINE void put_codes(uint8_t* block, int output, const uint8_t (&codes)[BLOCK]) {
    uint32_t* words = reinterpret_cast<uint32_t*>(block) + output;
    if constexpr (Format::BITS == 8) {
        for (int j = 0; j < WORDS; j++) words[j * PANEL] = word_at(codes, j);
        return;
    }
    if constexpr (Format::BITS <= 3) {
        uint32_t low[2] = {0, 0}, third = 0;
        for (int j = 0; j < WORDS; j++) {
            low[j / 4] |= (word_at(codes, j) & 0x03030303u) << j % 4 * 2;
            third |= (word_at(codes, j) >> 2 & 0x01010101u) << j;
        }
        words[0] = low[0], words[PANEL] = low[1];
        if constexpr (Format::BITS == 3) words[2 * PANEL] = third;
        return;
    }
    uint32_t high[2] = {0, 0};
    for (int i = 0; i < WORDS / 2; i++) {
        const uint32_t even = word_at(codes, 2 * i), odd = word_at(codes, 2 * i + 1);
        words[i * PANEL] = (even & 0x0f0f0f0fu) | (odd & 0x0f0f0f0fu) << 4;
        if constexpr (Format::BITS == 5) {
            high[0] |= (even >> 4 & 0x01010101u) << 2 * i | (odd >> 4 & 0x01010101u) << (2 * i + 1);
        } else if constexpr (Format::BITS == 6) {
            high[i / 2] |= (even >> 4 & 0x03030303u) << i % 2 * 4 | (odd >> 4 & 0x03030303u) << (i % 2 * 4 + 2);
        }
    }
    if constexpr (Format::BITS >= 5) words[4 * PANEL] = high[0];
    if constexpr (Format::BITS == 6) words[5 * PANEL] = high[1];
}

template <class Format>
void get_codes(const uint8_t* block, int output, uint8_t (&codes)[BLOCK]) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(block) + output;
    for (int j = 0; j < WORDS; j++) {
        uint32_t word;
        if constexpr (Format::BITS == 8)
            word = words[j * PANEL];
        else if constexpr (Format::BITS <= 3)
            word = words[j / 4 * PANEL] >> j % 4 * 2 & 0x03030303u;
        else
            word = words[j / 2 * PANEL] >> j % 2 * 4 & 0x0f0f0f0fu;
        if constexpr (Format::BITS == 3) word |= (words[2 * PANEL] >> j & 0x01010101u) << 2;
        if constexpr (Format::BITS == 5) word |= (words[4 * PANEL] >> j & 0x01010101u) << 4;
        if constexpr (Format::BITS == 6) word |= (words[(4 + j / 4) * PANEL] >> j % 4 * 2 & 0x03030303u) << 4;
        std::memcpy(codes + j * 4, &word, 4);
    }
}

// ---- blocks of files ------------------------------------------------------------------

// Where the parts of a block of the file are, in bytes from its beginning. A part that a format does not have is
// left out, and never read.
struct RawLayout {
    int bytes;          // of the whole block
    int scale = 0;      // of the whole block: a float16, or one byte of exponent
    int minimum = 0;    // of the whole block: a float16, or the zero of a group in one byte
    int scales = 0;     // of each 32 or 16 numbers in it, 4 to 8 bits each; with minima in some formats
    int high_bits = 0;  // of codes whose low bits are apart from them
    int codes = 0;      // or their low bits
};

// A format without a layout does not compile.
constexpr RawLayout raw_layout(Q4_0) { return {.bytes = 18, .scale = 0, .codes = 2}; }
constexpr RawLayout raw_layout(Q4_1) { return {.bytes = 20, .scale = 0, .minimum = 2, .codes = 4}; }
constexpr RawLayout raw_layout(Q5_0) { return {.bytes = 22, .scale = 0, .high_bits = 2, .codes = 6}; }
constexpr RawLayout raw_layout(Q5_1) { return {.bytes = 24, .scale = 0, .minimum = 2, .high_bits = 4, .codes = 8}; }
constexpr RawLayout raw_layout(Q8_0) { return {.bytes = 34, .scale = 0, .codes = 2}; }
constexpr RawLayout raw_layout(Q2_K) {
    return {.bytes = 84, .scale = 80, .minimum = 82, .scales = 0, .codes = 16};
}
constexpr RawLayout raw_layout(Q3_K) {
    return {.bytes = 110, .scale = 108, .scales = 96, .high_bits = 0, .codes = 32};
}
constexpr RawLayout raw_layout(Q4_K) {
    return {.bytes = 144, .scale = 0, .minimum = 2, .scales = 4, .codes = 16};
}
constexpr RawLayout raw_layout(Q5_K) {
    return {.bytes = 176, .scale = 0, .minimum = 2, .scales = 4, .high_bits = 16, .codes = 48};
}
constexpr RawLayout raw_layout(Q6_K) {
    return {.bytes = 210, .scale = 208, .scales = 192, .high_bits = 128, .codes = 0};
}
constexpr RawLayout raw_layout(IQ4_NL) { return {.bytes = 18, .scale = 0, .codes = 2}; }
constexpr RawLayout raw_layout(IQ4_XS) { return {.bytes = 136, .scale = 0, .scales = 2, .codes = 8}; }
constexpr RawLayout raw_layout(TQ2_0) { return {.bytes = 66, .scale = 64, .codes = 0}; }
constexpr RawLayout raw_layout(MXFP4) { return {.bytes = 17, .scale = 0, .codes = 1}; }
constexpr RawLayout raw_layout(NVFP4) { return {.bytes = 36, .scales = 0, .codes = 4}; }
constexpr RawLayout raw_layout(NF4) { return {.bytes = 18, .scale = 0, .codes = 2}; }
// INT4 and INT8, in groups of 32 or 128 numbers.
template <int BITS, int SUPER>
constexpr RawLayout raw_layout(Format<BITS, 0, Scales::group, SUPER>) {
    return {.bytes = 4 + SUPER * BLOCK * BITS / 8, .scale = 0, .minimum = 2, .codes = 4};
}

// Of a block of the file.
template <class Format>
constexpr int raw_bytes() {
    if constexpr (Format::IN_FILE_BLOCKS) return Format::RAW_BYTES;
    else return raw_layout(Format()).bytes;
}

// The 32 codes of block `sub` within a block of the file.
template <class Format>
TOKEND_INLINE void raw_codes(const uint8_t* raw, int sub, uint8_t (&codes)[BLOCK]) {
    constexpr RawLayout layout = raw_layout(Format());
    const uint8_t* low = raw + layout.codes;
    const uint8_t* high = raw + layout.high_bits;
    if constexpr (Format::SCALES == Scales::group || Format::SCALES == Scales::super_one) low += sub * 4 * Format::BITS;
    if constexpr (Format::BITS == 8) {
        for (int i = 0; i < BLOCK; i++) codes[i] = Format::SCALES == Scales::group ? low[i] : low[i] ^ 0x80;
    } else if constexpr (Format::BITS <= 3) {
        low += sub / 4 * 32;
        for (int i = 0; i < BLOCK; i++) codes[i] = low[i] >> sub % 4 * 2 & 3;
        if constexpr (Format::BITS == 3)
            for (int i = 0; i < BLOCK; i++) codes[i] |= (high[i] >> sub & 1) << 2;
    } else if constexpr (Format::BITS == 6) {
        const int half = sub / 4, part = sub % 4;
        low += half * 64 + part % 2 * 32;
        high += half * 32;
        for (int i = 0; i < BLOCK; i++)
            codes[i] = (low[i] >> part / 2 * 4 & 15) | (high[i] >> part * 2 & 3) << 4;
    } else if constexpr (Format::SCALES == Scales::super_low) {
        low += sub / 2 * 32;
        for (int i = 0; i < BLOCK; i++) codes[i] = low[i] >> sub % 2 * 4 & 15;
        if constexpr (Format::BITS == 5)
            for (int i = 0; i < BLOCK; i++) codes[i] |= (high[i] >> sub & 1) << 4;
    } else if constexpr (Format::SCALES == Scales::micro) {
        low += sub * 16;
        for (int i = 0; i < BLOCK; i++) codes[i] = low[i / 16 * 8 + i % 8] >> i % 16 / 8 * 4 & 15;
    } else {
        for (int i = 0; i < 16; i++) codes[i] = low[i] & 15;
        for (int i = 0; i < 16; i++) codes[i + 16] = low[i] >> 4;
        if constexpr (Format::BITS == 5) {
            const uint32_t bits = word_at(high, 0);
            for (int i = 0; i < BLOCK; i++) codes[i] |= (bits >> i & 1) << 4;
        }
    }
}

// The 6-bit scale and minimum of block `sub` of a Q4_K or Q5_K block.
TOKEND_INLINE void raw_scales(const uint8_t* scales, int sub, uint8_t* scale, uint8_t* low) {
    if (sub < 4) {
        *scale = scales[sub] & 63;
        *low = scales[sub + 4] & 63;
    } else {
        *scale = (scales[sub + 4] & 15) | scales[sub - 4] >> 6 << 4;
        *low = scales[sub + 4] >> 4 | scales[sub] >> 6 << 4;
    }
}

// The signed scale of 16 numbers of a Q3_K block, and of 32 numbers of an IQ4_XS block.
TOKEND_INLINE uint8_t raw_scale_q3(const uint8_t* scales, int index) {
    const int low = scales[index % 8] >> index / 8 * 4 & 15, high = scales[8 + index % 4] >> index / 4 * 2 & 3;
    return uint8_t((low | high << 4) - 32);
}
TOKEND_INLINE uint8_t raw_scale_iq4(const uint8_t* scales, int sub) {
    const int low = scales[2 + sub / 2] >> sub % 2 * 4 & 15, high = load_bytes<uint16_t>(scales) >> sub * 2 & 3;
    return uint8_t((low | high << 4) - 32);
}

// A whole block of a type that stays as it is.
template <class Format>
void put_file_block(uint8_t* panel, int64_t block, int output, const uint8_t* row) {
    uint8_t* to = panel + Format::place(block) + output;
    const uint8_t* raw = row + block / Format::SUPER * Format::RAW_BYTES;
    for (int i = 0; i < Format::RAW_BYTES; i++) to[i * PANEL] = raw[i];
}

template <class Format>
void put_block(uint8_t* panel, int64_t block, int output, const uint8_t* row) {
    constexpr RawLayout layout = raw_layout(Format());
    uint8_t* to = panel + Format::place(block);
    uint8_t* scales = to + Format::CODE_BYTES;
    const int sub = int(block % Format::SUPER);
    const uint8_t* raw = row + block / Format::SUPER * layout.bytes;
    uint8_t codes[BLOCK];
    raw_codes<Format>(raw, sub, codes);
    put_codes<Format>(to, output, codes);
    if constexpr (Format::SCALES == Scales::power) {
        scales[output] = raw[layout.scale];
        return;
    }
    if constexpr (Format::SCALES == Scales::micro) {  // the sign has no meaning, and ggml reads 0x7f as 0
        for (int half = 0; half < 2; half++) {
            const uint8_t scale = raw[layout.scales + sub * 2 + half];
            scales[half * PANEL + output] = scale == 0x7f ? 0 : scale & 0x7f;
        }
        const float factor = 1.0f;
        if (block == 0) std::memcpy(panel + output * 4, &factor, 4);
        return;
    }
    if (Format::HAS_HEAD && sub == 0) scales = panel + Format::head(block);
    if (!Format::HAS_HEAD || sub == 0) {
        std::memcpy(scales + output * 2, raw + layout.scale, 2);
        if constexpr (Format::SCALES == Scales::group)
            scales[PANEL * 2 + output] = raw[layout.minimum];
        else if (Format::HAS_LOW)
            std::memcpy(scales + PANEL * 2 + output * 2, raw + layout.minimum, 2);
    }
    scales = to + Format::CODE_BYTES;
    const uint8_t* small = raw + layout.scales;
    if constexpr (Format::SCALES == Scales::super_low)
        raw_scales(small, sub, scales + output, scales + PANEL + output);
    if constexpr (Format::SCALES == Scales::super_one) scales[output] = raw_scale_iq4(small, sub);
    if constexpr (Format::HALVES == 2)
        for (int half = 0; half < 2; half++)
            scales[half * PANEL + output] =
                Format::BITS == 3 ? raw_scale_q3(small, sub * 2 + half) : small[sub * 2 + half];
}

template <class Format>
void pack_blocks(
    const TokendPackedShape& weight, int64_t first, int64_t num_rows, const uint8_t* raw, const int64_t* order) {
    const int64_t num_blocks = weight.in_features / BLOCK;
    const int64_t row_bytes = num_blocks / Format::SUPER * raw_bytes<Format>();
    uint8_t* packed = static_cast<uint8_t*>(weight.packed);
    for (int64_t index = 0; index < num_rows; index++) {
        const int64_t output = first + index;
        const uint8_t* row = raw + (order ? order[index] : index) * row_bytes;
        uint8_t* panel = packed + output / PANEL * Format::panel_bytes(weight.in_features);
        if constexpr (Format::IN_FILE_BLOCKS)
            for (int64_t block = 0; block < num_blocks; block += Format::SUPER)
                put_file_block<Format>(panel, block, int(output % PANEL), row);
        else
            for (int64_t block = 0; block < num_blocks; block++)
                put_block<Format>(panel, block, int(output % PANEL), row);
    }
}

// ---- dense rows -------------------------------------------------------------------

template <class T>
void put_dense(uint8_t* to, int output, const T* from) {
    float numbers[BLOCK];
    uint8_t codes[BLOCK];
    for (int i = 0; i < BLOCK; i += 8) store<8>(numbers + i, load<8>(from + i));
    uint32_t largest = 0;
    for (float number : numbers) largest = std::max(largest, bit_cast<uint32_t>(number) & 0x7fffffffu);
    float16 scale = {to_float16(bit_cast<float>(largest) / 127.0f)};
    const float exact = to_float(scale.bits);
    if ((scale.bits & 0x7c00) == 0x7c00 || exact == 0.0f) {
        std::fill_n(codes, BLOCK, uint8_t(128));
        if (exact != 0.0f) scale.bits = 0x7e00;  // NaN
    } else {
        for (int i = 0; i < BLOCK; i++) {
            const float code = std::nearbyint(numbers[i] / exact);
            codes[i] = uint8_t(int(std::min(std::max(code, -127.0f), 127.0f)) + 128);
        }
    }
    put_codes<Q8_0>(to, output, codes);
    std::memcpy(to + Q8_0::CODE_BYTES + output * 2, &scale, 2);
}

template <class T>
void pack_dense(const TokendPackedShape& weight, int64_t stride, const T* dense) {
    uint8_t* packed = static_cast<uint8_t*>(weight.packed);
    for (int64_t row = 0; row < weight.out_features; row++) {
        uint8_t* panel = packed + row / PANEL * Q8_0::panel_bytes(weight.in_features);
        for (int64_t block = 0; block < weight.in_features / BLOCK; block++)
            put_dense(panel + Q8_0::place(block), int(row % PANEL), dense + row * stride + block * BLOCK);
    }
}

// ---- rows as numbers ----------------------------------------------------------------

// 32 numbers, equal bit by bit to the format's definition in float32.
template <class Format>
TOKEND_FLATTEN void get_file_block(const uint8_t* panel, int64_t block, int output, float* numbers) {
    const int lane = output % DOT_LANES, sub = int(block % Format::SUPER);
    const Fields fields{panel + Format::place(block) + output - lane};
    float scales[2];
    each<Format::HALVES>([&](auto half) { scales[half] = Format::scale(fields, sub, half)[lane]; });
    each<4>([&](auto group) {
        DotU words[2];
        Format::template codes<group>(fields, sub, words);
        for (int i = 0; i < 8; i++) {
            const int code = int(words[i / 4][lane] >> i % 4 * 8 & 255);
            numbers[group * 8 + i] = scales[group * Format::HALVES / 4] * float(code - Format::ZERO);
        }
    });
}
template <class Format>
void get_block(const uint8_t* panel, int64_t block, int output, float* numbers) {
    const uint8_t* from = panel + Format::place(block);
    const uint8_t* scales = from + Format::CODE_BYTES;
    uint8_t codes[BLOCK];
    get_codes<Format>(from, output, codes);
    if constexpr (Format::HAS_TABLE)
        for (uint8_t& code : codes) code = TABLE_OF<Format>[code];
    const uint16_t* halves =
        reinterpret_cast<const uint16_t*>(Format::HAS_HEAD ? panel + Format::head(block) : scales);
    float scale[2], low[2] = {0.0f, 0.0f};
    for (int half = 0; half < 2; half++) {
        const uint8_t small =
            Format::scale_bytes() == 0 ? 0 : scales[(Format::HALVES == 2 ? half * PANEL : 0) + output];
        if constexpr (Format::SCALES == Scales::power) {
            scale[half] = bit_cast<float>(std::max(int32_t(small) << 23, LEAST_POWER)) * 0.5f;
            continue;
        }
        if constexpr (Format::SCALES == Scales::micro) {
            const float of_output = bit_cast<float>(word_at(panel, output));
            scale[half] = to_float(uint16_t(small << 7)) * HALF_OF_E4M3 * of_output;
            continue;
        }
        const float factor = to_float(halves[output]);
        scale[half] = factor;
        if constexpr (Format::SCALES == Scales::super_low) scale[half] = factor * float(small);
        if constexpr (Format::SCALES == Scales::super_pair) scale[half] = factor * float(small & 15);
        if constexpr (Format::SCALES == Scales::super_half || Format::SCALES == Scales::super_one)
            scale[half] = factor * float(int8_t(small));
        if constexpr (Format::SCALES == Scales::half_low) low[half] = to_float(halves[PANEL + output]);
        if constexpr (Format::SCALES == Scales::super_low)
            low[half] = -(to_float(halves[PANEL + output]) * float(scales[PANEL + output]));
        if constexpr (Format::SCALES == Scales::super_pair)
            low[half] = -(to_float(halves[PANEL + output]) * float(small >> 4));
        if constexpr (Format::SCALES == Scales::group)
            low[half] = -(factor * float(reinterpret_cast<const uint8_t*>(halves)[PANEL * 2 + output]));
    }
    for (int i = 0; i < BLOCK; i++) {
        const float number = scale[i / 16] * float(int(codes[i]) - Format::ZERO);
        numbers[i] = Format::HAS_LOW ? number + low[i / 16] : number;
    }
}

template <class Format, class T>
void unpack_rows(const TokendPackedShape& weight, int64_t num_ids, const int64_t* ids, T* to) {
    const uint8_t* packed = static_cast<const uint8_t*>(weight.packed);
    for (int64_t index = 0; index < num_ids; index++) {
        const uint8_t* panel = packed + ids[index] / PANEL * Format::panel_bytes(weight.in_features);
        for (int64_t block = 0; block < weight.in_features / BLOCK; block++, to += BLOCK) {
            float numbers[BLOCK];
            if constexpr (Format::IN_FILE_BLOCKS)
                get_file_block<Format>(panel, block, int(ids[index] % PANEL), numbers);
            else
                get_block<Format>(panel, block, int(ids[index] % PANEL), numbers);
            for (int i = 0; i < BLOCK; i += 8) store<8>(to + i, load<8>(numbers + i));
        }
    }
}

}  // namespace
}  // namespace tokend

using namespace tokend;

extern "C" int64_t tokend_packed_bytes(const TokendPackedShape* weight) {
    int64_t bytes = 0;
    with_format(weight->type, [&](auto format) {
        bytes = num_panels(weight->out_features) * format.panel_bytes(weight->in_features);
    });
    return bytes;
}

extern "C" void tokend_pack_blocks(
    const TokendPackedShape* weight, int64_t first, int64_t num_rows, const void* raw, const int64_t* order) {
    with_format(weight->type, [&](auto format) {
        pack_blocks<decltype(format)>(*weight, first, num_rows, static_cast<const uint8_t*>(raw), order);
    });
}

extern "C" void tokend_pack_dense(const TokendPackedShape* weight, int64_t dtype, int64_t stride, const void* dense) {
    switch (dtype) {
        case 0: return pack_dense(*weight, stride, static_cast<const float*>(dense));
        case 1: return pack_dense(*weight, stride, static_cast<const bfloat16*>(dense));
        case 2: return pack_dense(*weight, stride, static_cast<const float16*>(dense));
    }
}

extern "C" int64_t tokend_unpack_rows(const TokendPackedShape* weight, int64_t num_ids, const int64_t* ids, int64_t dtype,
                                      void* numbers) {
    for (int64_t place = 0; place < num_ids; place++)
        if (ids[place] < 0 || ids[place] >= weight->out_features) return place;
    with_format(weight->type, [&](auto format) {
        using Format = decltype(format);
        switch (dtype) {
            case 0: return unpack_rows<Format>(*weight, num_ids, ids, static_cast<float*>(numbers));
            case 1: return unpack_rows<Format>(*weight, num_ids, ids, static_cast<bfloat16*>(numbers));
            case 2: return unpack_rows<Format>(*weight, num_ids, ids, static_cast<float16*>(numbers));
        }
    });
    return num_ids;
}
