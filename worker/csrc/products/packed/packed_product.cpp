// Products with packed weights: divides the work into panels and rows for the threads, and rounds,
// adds and writes the results of the tiles.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/team.h"
#include "products/packed/packed_format.h"
#include "products/packed/packed_tile.h"

namespace tokend {
namespace {

// Rows that are multiplied with the unpacked part of a panel: whole tiles, whose blocks stay in the
// L2 cache. Two chunks are a prompt's part of a step (256 rows).
#if defined(TOKEND_AMX) && defined(__AMX_INT8__)
constexpr int64_t CHUNK = 128;
#else
constexpr int64_t CHUNK = 132;
#endif

// Up to this many rows, unpacking a panel within the product costs less than leaving it unpacked in
// memory; codes of 8 bits are never unpacked. Without an instruction for products of bytes the
// fifth and sixth bits compete with the products for the same units.
template <class Format>
constexpr int64_t FEW = Format::BITS == 8                  ? CHUNK
                        : WORDS_FIRST && Format::BITS != 4 ? 3
                                                           : 2 * TILE_ROWS;

// Blocks of a panel that are unpacked together: they stay in the L1 cache.
constexpr int64_t DEEP = 18;

// Memory of a thread, kept for the next product.
struct Scratch {
    alignas(64) uint8_t unpacked[DEEP * ROW * 12];
    alignas(64) float results[CHUNK * PANEL];
};

// Adds to the results of the first rows by the tile unit, if there is one; returns how many rows.
template <class Source>
int64_t multiply_by_amx([[maybe_unused]] const Source& source, [[maybe_unused]] int64_t num_blocks,
                        [[maybe_unused]] const TokendQuantised* x, [[maybe_unused]] int64_t stride,
                        [[maybe_unused]] int64_t num_rows, [[maybe_unused]] float* result) {
#if defined(TOKEND_AMX) && defined(__AMX_INT8__)
    if (tiles_allowed() && num_rows >= AmxTiles<Source>::ROWS) {
        AmxTiles<Source> tiles;
        const int64_t end = num_rows / tiles.ROWS * tiles.ROWS;
        for (int64_t row = 0; row < end; row += tiles.ROWS)
            tiles(source, num_blocks, x + row * stride, stride, result + row * PANEL);
        return end;
    }
#endif
    return 0;
}

// Adds to result[row][output] for the outputs of a panel.
template <class Format>
void multiply_packed(const uint8_t* panel, int64_t num_blocks, const TokendQuantised* x, int64_t num_rows,
                     Scratch& scratch, float* result) {
    const Packed<Format> packed{panel};
    int64_t done = 0;
    if constexpr (Format::BITS == 8) {
        done = multiply_by_amx(packed, num_blocks, x, num_blocks, num_rows, result);
    } else {
        for (int64_t begin = 0; num_rows > FEW<Format> && begin < num_blocks; begin += DEEP) {
            const int64_t end = std::min(begin + DEEP, num_blocks);
            unpack_blocks(packed, begin, end, scratch.unpacked);
            const UnpackedOf<Format> plain{scratch.unpacked, Format::ZERO};
            int64_t row = multiply_by_amx(plain, end - begin, x + begin, num_blocks, num_rows, result);
            for (; row + TILE_ROWS <= num_rows; row += TILE_ROWS)
                tile_of_panel<TILE_ROWS>(plain, end - begin, x + row * num_blocks + begin, num_blocks,
                                         result + row * PANEL);
            done = row;
        }
    }
    tiles(packed, num_blocks, x + done * num_blocks, num_blocks, num_rows - done, result + done * PANEL);
}

template <class Format>
void multiply_file_blocks(const uint8_t* panel, int64_t num_blocks, const TokendQuantised* x, int64_t num_rows,
                          Scratch& scratch, float* result) {
    for (int64_t begin = 0; begin < num_blocks; begin += DEEP) {
        const int64_t end = std::min(begin + DEEP, num_blocks);
        unpack_blocks(PanelInFileBlocks<Format>{panel}, begin, end, scratch.unpacked);
        const UnpackedOf<Format> plain{scratch.unpacked, Format::ZERO};
        const int64_t done = multiply_by_amx(plain, end - begin, x + begin, num_blocks, num_rows, result);
        tiles(plain, end - begin, x + done * num_blocks + begin, num_blocks, num_rows - done, result + done * PANEL);
    }
}

// result[row][output] for the outputs of a panel.
template <class Format>
void multiply_panel(const uint8_t* panel, int64_t num_blocks, const TokendQuantised* x, int64_t num_rows,
                    Scratch& scratch, float* result) {
    std::fill_n(result, num_rows * PANEL, 0.0f);
    if constexpr (Format::IN_FILE_BLOCKS)
        multiply_file_blocks<Format>(panel, num_blocks, x, num_rows, scratch, result);
    else
        multiply_packed<Format>(panel, num_blocks, x, num_rows, scratch, result);
    if constexpr (Format::HAS_FACTORS) {
        float factors[PANEL];
        std::memcpy(factors, panel, sizeof(factors));
        for (int64_t row = 0; row < num_rows; row++)
            for (int output = 0; output < PANEL; output++) result[row * PANEL + output] *= factors[output];
    }
}

// The same for a type that is known at run time.
using MultiplyPanel = void (*)(const uint8_t*, int64_t, const TokendQuantised*, int64_t, Scratch&, float*);

template <class T>
float number_at(const T* from, int64_t index) {
    if constexpr (std::is_same_v<T, float>) return from[index];
    else return bit_cast<float>(uint32_t(from[index].bits) << 16);
}

float number_at(int64_t dtype, const void* from, int64_t index) {
    return dtype == 0 ? number_at(static_cast<const float*>(from), index)
                      : number_at(static_cast<const bfloat16*>(from), index);
}

template <class T>
TOKEND_FLATTEN void write_full(const float* from, const float* bias, bool adds, T* to) {
    constexpr int N = DOT_LANES;
    for (int at = 0; at < PANEL; at += N) {
        DotF value = load<N>(from + at) + load<N>(bias + at);
        if (adds) value += load<N>(to + at);
        store<N>(to + at, value);
    }
}

// Writes rows of results to outputs [first, first + PANEL) within the weight.
template <class T>
void write(const TokendProduct& product, int64_t out_features, int64_t first, int64_t begin, int64_t count,
           const float* results) {
    const int64_t width = std::min<int64_t>(PANEL, out_features - first);
    float bias[PANEL] = {};
    if (product.bias)
        for (int64_t i = 0; i < width; i++) bias[i] = number_at(product.bias_dtype, product.bias, first + i);
    for (int64_t row = 0; row < count; row++) {
        T* to = static_cast<T*>(product.output) + (begin + row) * product.output_stride + first;
        const float* from = results + row * PANEL;
        if (width == PANEL) {
            write_full(from, bias, product.adds, to);
        } else {
            T line[PANEL] = {};
            std::copy_n(to, width, line);
            write_full(from, bias, product.adds, line);
            std::copy_n(line, width, to);
        }
    }
}

// Below this many products of bytes one thread is done before others wake up.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 17;
// Above this many numbers the threads share the rounding of the rows.
constexpr int64_t PARALLEL_NUMBERS = 1 << 13;

MultiplyPanel multiply_panel_of(const TokendPackedShape& weight) {
    MultiplyPanel multiply = nullptr;
    with_format(weight.type, [&](auto format) { multiply = multiply_panel<decltype(format)>; });
    return multiply;
}

// Multiplies up to CHUNK rows from `begin` on with a panel, and writes what they give.
void multiply_chunk(const TokendPackedShape& weight, MultiplyPanel multiply, const TokendProduct& product,
                    const TokendQuantised* x, int64_t panel, int64_t begin, int64_t count) {
    static thread_local Scratch scratch;
    const int64_t num_blocks = weight.in_features / BLOCK;
    const int64_t panel_bytes = tokend_packed_bytes(&weight) / num_panels(weight.out_features);
    float* results = scratch.results;
    const uint8_t* packed = static_cast<const uint8_t*>(weight.packed) + panel * panel_bytes;
    multiply(packed, num_blocks, x + begin * num_blocks, count, scratch, results);
    if (product.output_dtype == 0)
        write<float>(product, weight.out_features, panel * PANEL, begin, count, results);
    else
        write<bfloat16>(product, weight.out_features, panel * PANEL, begin, count, results);
}

void run(const TokendPackedShape& weight, const TokendProduct& product, const TokendQuantised* given) {
    static thread_local std::vector<TokendQuantised> own;
    const int64_t num_rows = product.num_rows, num_blocks = weight.in_features / BLOCK;
    if (!given && int64_t(own.size()) < num_rows * num_blocks) own.resize(num_rows * num_blocks);
    TokendQuantised* rounded = own.data();
    const TokendQuantised* x = given ? given : rounded;
    const bool shared = num_rows * weight.in_features > PARALLEL_NUMBERS;
    if (!given && !shared)
        for (int64_t row = 0; row < num_rows; row++)
            quantise_row(product, weight.in_features, row, rounded + row * num_blocks);
    const MultiplyPanel multiply = multiply_panel_of(weight);
    const int64_t chunks = (num_rows + CHUNK - 1) / CHUNK;
    const int64_t tasks = num_panels(weight.out_features) * chunks;
    in_team(num_rows * weight.in_features * weight.out_features > PARALLEL_PRODUCTS, [&] {
        if (!given && shared) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < num_rows; row++)
                quantise_row(product, weight.in_features, row, rounded + row * num_blocks);
        }
#pragma omp for schedule(static) nowait
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t begin = task % chunks * CHUNK;
            multiply_chunk(weight, multiply, product, x, task / chunks, begin, std::min(CHUNK, num_rows - begin));
        }
    });
}

}  // namespace

void multiply_packed_part(const TokendPackedShape& weight, const TokendProduct& product, const TokendQuantised* rows,
                          const ProductPart& part) {
    const MultiplyPanel multiply = multiply_panel_of(weight);
    for (int64_t panel = part.first_panel; panel < part.end_panel; panel++)
        for (int64_t begin = part.first_row; begin < part.end_row; begin += CHUNK)
            multiply_chunk(weight, multiply, product, rows, panel, begin, std::min(CHUNK, part.end_row - begin));
}

}  // namespace tokend

extern "C" void tokend_quantised_product(const TokendPackedShape* weight, const TokendProduct* product,
                                         const TokendQuantised* rows) {
    tokend::run(*weight, *product, rows);
}

extern "C" void tokend_packed_product(const TokendPackedShape* weight, const TokendProduct* product) {
    tokend_quantised_product(weight, product, nullptr);
}
