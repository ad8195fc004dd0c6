// The products of many rows with a panel by the tile unit (AMX): 16 rows x 16 outputs x the
// inputs of a scale at once, sums of codes as integers, to which the scales are applied
// exactly as packed_tile.h does it.
#pragma once

#include "packed_tile.h"

#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>

namespace tokend {

constexpr int TILE = 16;  // rows and outputs of a tile

// What tile registers hold, set once for a panel:
//   0  products, 16 rows x 16 outputs
//   1  codes of the rows
//   2  codes of the weight: a row for 4 inputs, 16 outputs x 4 bytes
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    explicit TileShapes(int inputs) {
        rows[0] = rows[1] = TILE;
        rows[2] = uint8_t(inputs / 4);
        row_bytes[0] = row_bytes[2] = 64;
        row_bytes[1] = uint16_t(inputs);
    }
};

// Tiles configured as long as it lives: a thread that keeps them costs more to switch.
class Tiles {
  public:
    explicit Tiles(int inputs) {
        const TileShapes shapes(inputs);
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
};

// Linux gives the tile unit to a process that asks for it.
inline bool ask_for_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM of asm/prctl.h
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// The panel's codes as signed bytes, less the zero of the type, in rows as a product reads
// them; scales and minima as in Unpacked.
template <class Format>
TOKEND_FLATTEN void unpack_signed(const Packed<Format>& source, int64_t num_blocks, uint8_t* to) {
    typedef uint8_t Bytes __attribute__((vector_size(DOT_LANES * 4)));
    unpack_panel(source, num_blocks, to);
    if constexpr (Format::ZERO != 0)
        for (int64_t index = 0; index < num_blocks; index++)
            for (int at = 0; at < 8 * ROW; at += int(sizeof(Bytes))) {
                uint8_t* codes = to + index * UnpackedOf<Format>::BYTES + at;
                const Bytes less = load_bytes<Bytes>(codes) - uint8_t(Format::ZERO);
                __builtin_memcpy(codes, &less, sizeof(less));
            }
    __asm__ volatile("" ::: "memory");  // the tile loads do not tell the compiler what they read
}

typedef int32_t TileProducts[TILE][TILE];

// products[half] = codes of 16 rows x times the codes of one block, 16 outputs.
template <int HALVES>
TOKEND_INLINE void multiply_tiles(const TokendQuantised* x, int64_t x_bytes, const uint8_t* codes,
                                  TileProducts (&products)[HALVES]) {
    each<HALVES>([&](auto half) {
        _tile_zero(0);
        _tile_loadd(1, x->codes + half * 16, x_bytes);
        _tile_loadd(2, codes + half * 4 * ROW, ROW);
        _tile_dpbssd(0, 1, 2);
        _tile_stored(0, products[half], 64);
    });
}

// result[row][output] of 16 rows and 16 outputs. The tile unit is one block ahead of the scales.
template <class Source>
TOKEND_FLATTEN __attribute__((noinline)) void amx_tile(const Source& from, int64_t num_blocks, int vector,
                                                       const TokendQuantised* x, int64_t stride, float* result) {
    const Source source = from;
    alignas(64) TileProducts products[2][Source::HALVES];
    const int64_t x_bytes = stride * int64_t(sizeof(TokendQuantised));
    const uint8_t* codes = source.blocks + vector * DOT_LANES * 4;
    DotF sums[TILE] = {};
    multiply_tiles<Source::HALVES>(x, x_bytes, codes, products[0]);
    for (int64_t index = 0; index < num_blocks; index++, x++) {
        codes += Source::BYTES;
        if (index + 1 < num_blocks)
            multiply_tiles<Source::HALVES>(x + 1, x_bytes, codes, products[(index + 1) % 2]);
        const auto block = source.block(index, vector);
        each<Source::HALVES>([&](auto half) {
            const DotF scale = block.scale(half, 0);
            each<TILE>([&](auto row) {
                const DotF dots = to_floats(load_bytes<DotI>(products[index % 2][half][row]));
                sums[row] = fused(dots * scale, splat<DOT_LANES>(x[row * stride].scale), sums[row]);
            });
        });
        if constexpr (Source::HAS_LOW) {
            const DotF low = block.low(0);
            each<TILE>([&](auto row) {
                sums[row] = fused(low, splat<DOT_LANES>(x[row * stride].total), sums[row]);
            });
        }
    }
    each<TILE>([&](auto row) { store<DOT_LANES>(result + row * PANEL + vector * DOT_LANES, sums[row]); });
}

// At least 16 rows: where the last tile is not full, it takes rows of the one before once more.
//   rows    | 0 … 15 | 16 … 31 | 32 33
//   tiles   |   1    |    2    |
//                       | 3: 18 … 33  |
template <class Format>
void multiply_by_tiles(const uint8_t* panel, int64_t num_blocks, const TokendQuantised* x, int64_t num_rows,
                       uint8_t* scratch, float* result) {
    using Plain = UnpackedOf<Format>;
    unpack_signed(Packed<Format>{panel}, num_blocks, scratch);
    const Plain source{scratch, 0};
    const Tiles tiles(BLOCK / Format::HALVES);
    for (int64_t begin = 0; begin < num_rows; begin += TILE) {
        const int64_t row = begin + TILE <= num_rows ? begin : num_rows - TILE;
        for (int vector = 0; vector < PANEL / DOT_LANES; vector++)
            amx_tile(source, num_blocks, vector, x + row * num_blocks, num_blocks, result + row * PANEL);
    }
}

}  // namespace tokend
#endif
