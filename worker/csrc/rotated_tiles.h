// Integer products of up to 32 rows with the 32 outputs of a pair of panels, by tiles.
//
//            B  [ panel 0 | panel 1 ]        16 groups x 16 outputs x 4 inputs each
//   A        C
//   rows 0 … 15    [ C 0 | C 1 ]             a tile of A: 16 rows x 64 inputs
//   rows 16 … 31   [ C 2 | C 3 ]
//
// 64 inputs at a time, four products of four loads; the sums are those of rotated_dot.h.
#pragma once

#include "amx.h"
#include "rotated_format.h"

#if defined(TOKEND_AMX) && defined(__AMX_INT8__)

namespace tokend {

constexpr int64_t TILE_ROWS_MOST = 16;
constexpr int64_t TILES_ROWS_MOST = 2 * TILE_ROWS_MOST;

// The shapes for a number of rows, on this thread.
inline void shape_tiles(int64_t num_rows) {
    const int upper = int(num_rows < TILE_ROWS_MOST ? num_rows : TILE_ROWS_MOST);
    const int lower = int(num_rows) - upper;
    TileShapes shapes;
    shapes.set(0, upper);
    shapes.set(1, upper);
    if (lower) {
        shapes.set(2, lower);
        shapes.set(3, lower);
        shapes.set(5, lower);
    }
    shapes.set(4, upper);
    shapes.set(6, 16);
    shapes.set(7, 16);
    shapes.load();
}

// Lines of the weight that are asked for before their turn, with a step's products between.
constexpr int64_t TILE_FETCH_AHEAD = 4096;

inline void fetch_ahead(const uint8_t* from) {
    for (int line = 0; line < 16; line++) __builtin_prefetch(from + TILE_FETCH_AHEAD + line * 64);
}

// sums: [num_rows][PAIR_OUTPUTS]. FETCH: the weight comes from memory.
// `between` is called after each 64 inputs: what vectors can do while tiles are multiplied.
template <bool LOWER, bool FETCH, class Between>
inline void tile_pair(const uint8_t* pair, int64_t panel_bytes, int64_t inputs, const int8_t* x, int64_t stride,
                      int32_t* sums, Between between) {
    const uint8_t* other = pair + panel_bytes;
    const int8_t* low = x + TILE_ROWS_MOST * stride;
    _tile_zero(0);
    _tile_zero(1);
    if (LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t at = 0; at < inputs; at += DEPTH) {
        const int64_t weights = at * PANEL_OUTPUTS;
        _tile_loadd(4, x + at, stride);
        _tile_loadd(6, pair + weights, GROUP_BYTES);
        _tile_dpbsud(0, 4, 6);
        if (FETCH) fetch_ahead(pair + weights);
        _tile_loadd(7, other + weights, GROUP_BYTES);
        _tile_dpbsud(1, 4, 7);
        if (FETCH) fetch_ahead(other + weights);
        if (LOWER) {
            _tile_loadd(5, low + at, stride);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
        between();
    }
    constexpr int64_t LINE = PAIR_OUTPUTS * int64_t(sizeof(int32_t));
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + PANEL_OUTPUTS, LINE);
    if (LOWER) {
        int32_t* below = sums + TILE_ROWS_MOST * PAIR_OUTPUTS;
        _tile_stored(2, below, LINE);
        _tile_stored(3, below + PANEL_OUTPUTS, LINE);
    }
}

}  // namespace tokend

#endif
