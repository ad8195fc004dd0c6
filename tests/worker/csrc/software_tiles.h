// The tile unit (Intel AMX) in software: a build of the AMX kernels with this file included first runs
// on a CPU without tiles. Every thread has eight tiles of its own, as in hardware.
//
// Operations are those of Intel's manual (TDPBSUD, TDPBF16PS). A tile that is used without
// a loaded configuration, or outside its shape, ends the process, as the hardware would.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace software_tiles {

struct Tile {
    int rows = 0, bytes = 0;
    uint8_t lines[16][64] = {};
};

inline thread_local Tile tiles[8];

inline void demand(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "software tiles: %s\n", what);
    std::abort();
}

inline Tile& shaped(int number) {
    demand(tiles[number].rows > 0, "a tile without a shape");
    return tiles[number];
}

inline void configure(const void* from) {
    const uint8_t* bytes = static_cast<const uint8_t*>(from);
    demand(bytes[0] == 1, "not palette 1");
    for (int number = 0; number < 8; number++) {
        uint16_t line;
        std::memcpy(&line, bytes + 16 + 2 * number, 2);
        tiles[number] = {};
        tiles[number].rows = bytes[48 + number];
        tiles[number].bytes = line;
        demand(tiles[number].rows <= 16 && line <= 64 && line % 4 == 0, "a shape that there is not");
    }
}

inline void release() {
    for (Tile& tile : tiles) tile = {};
}

inline void zero(int number) {
    for (auto& line : shaped(number).lines) std::memset(line, 0, sizeof(line));
}

inline void load(int number, const void* base, int64_t stride) {
    zero(number);
    Tile& tile = shaped(number);
    for (int row = 0; row < tile.rows; row++)
        std::memcpy(tile.lines[row], static_cast<const uint8_t*>(base) + row * stride, size_t(tile.bytes));
}

inline void store(int number, void* base, int64_t stride) {
    const Tile& tile = shaped(number);
    for (int row = 0; row < tile.rows; row++)
        std::memcpy(static_cast<uint8_t*>(base) + row * stride, tile.lines[row], size_t(tile.bytes));
}

// Calls add(sum, four bytes of a, four bytes of b) for every output and group of four bytes.
template <class Sum, class Add>
void multiply(int to, int left, int right, Add add) {
    Tile &c = shaped(to), &a = shaped(left), &b = shaped(right);
    demand(c.rows == a.rows && c.bytes == b.bytes && a.bytes / 4 == b.rows, "shapes that do not match");
    for (int row = 0; row < c.rows; row++)
        for (int group = 0; group < b.rows; group++)
            for (int column = 0; column < c.bytes / 4; column++) {
                Sum sum;
                std::memcpy(&sum, c.lines[row] + 4 * column, 4);
                add(sum, a.lines[row] + 4 * group, b.lines[group] + 4 * column);
                std::memcpy(c.lines[row] + 4 * column, &sum, 4);
            }
}

inline void dpbsud(int to, int left, int right) {
    multiply<int32_t>(to, left, right, [](int32_t& sum, const uint8_t* a, const uint8_t* b) {
        for (int i = 0; i < 4; i++) sum += int32_t(int8_t(a[i])) * int32_t(b[i]);
    });
}

// Subnormal inputs count as 0, as in hardware.
inline float number(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

inline void dpbf16ps(int to, int left, int right) {
    multiply<float>(to, left, right, [](float& sum, const uint8_t* a, const uint8_t* b) {
        sum = std::fma(number(a + 2), number(b + 2), std::fma(number(a), number(b), sum));
    });
}

}  // namespace software_tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) software_tiles::configure(from)
#define _tile_release() software_tiles::release()
#define _tile_zero(tile) software_tiles::zero(tile)
#define _tile_loadd(tile, base, stride) software_tiles::load(tile, base, int64_t(stride))
#define _tile_stored(tile, base, stride) software_tiles::store(tile, base, int64_t(stride))
#define _tile_dpbsud(to, left, right) software_tiles::dpbsud(to, left, right)
#define _tile_dpbf16ps(to, left, right) software_tiles::dpbf16ps(to, left, right)
// The request for permission to use tiles (common/amx.h) succeeds.
#define syscall(...) 0
