// Products of up to 32 rows with the 32 outputs of a pair of panels, by tiles, for any number type.
//
//            B  [ panel 0 | panel 1 ]        a tile of each: 16 lines of 64 bytes
//   A        C
//   rows 0 … 15    [ C 0 | C 1 ]             a tile of A: 16 rows of 64 bytes
//   rows 16 … 31   [ C 2 | C 3 ]
//
// 64 bytes of the rows at a time, four products of four loads.
#pragma once

#include "common/amx.h"
#include "products/panels.h"

#if defined(TOKEND_AMX)

namespace tokend {

constexpr int64_t TILE_ROWS_MOST = 16;
constexpr int64_t TILE_BYTES = 1024;
constexpr int64_t TILE_LINE = 64;

// Configures the tile shapes for a number of rows on this thread.
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

inline void fetch_tile(const uint8_t* from) {
    for (int line = 0; line < 16; line++) __builtin_prefetch(from + line * TILE_LINE);
}

// A weight's tiles of both panels, one step after the other.
struct TilesOfPair {
    const uint8_t* first;
    const uint8_t* second;
    int64_t step_bytes;  // from one tile of a panel to the next
};

// sums: [num_rows][PAIR_OUTPUTS], of Dot's type. Dot: the products of tiles, and the prefetch
// distance in bytes, used with FETCH, which means that the weight comes from memory. `between` is
// called after every step, for vector work while tiles are multiplied.
template <class Dot, bool LOWER, bool FETCH, class Sum, class Between>
inline void multiply_tiles(const TilesOfPair& weight, int64_t num_steps, const void* rows, int64_t row_bytes,
                           Sum* sums, Between between) {
    static_assert(sizeof(Sum) == 4);
    const char* x = static_cast<const char*>(rows);
    const char* low = x + TILE_ROWS_MOST * row_bytes;
    _tile_zero(0);
    _tile_zero(1);
    if (LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < num_steps; step++, x += TILE_LINE, low += TILE_LINE) {
        const int64_t at = step * weight.step_bytes;
        _tile_loadd(4, x, row_bytes);
        _tile_loadd(6, weight.first + at, TILE_LINE);
        Dot::upper_first();
        if (FETCH) fetch_tile(weight.first + at + Dot::FETCH_AHEAD);
        _tile_loadd(7, weight.second + at, TILE_LINE);
        Dot::upper_second();
        if (FETCH) fetch_tile(weight.second + at + Dot::FETCH_AHEAD);
        if (LOWER) {
            _tile_loadd(5, low, row_bytes);
            Dot::lower_first();
            Dot::lower_second();
        }
        between();
    }
    constexpr int64_t LINE = PAIR_OUTPUTS * 4;
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + PANEL_OUTPUTS, LINE);
    if (LOWER) {
        Sum* below = sums + TILE_ROWS_MOST * PAIR_OUTPUTS;
        _tile_stored(2, below, LINE);
        _tile_stored(3, below + PANEL_OUTPUTS, LINE);
    }
}

// Tiles on one thread, whose shapes follow the number of rows.
template <class Dot>
class TileStrips {
  public:
    template <class Sum, class Between>
    void operator()(const TilesOfPair& weight, int64_t num_steps, const void* rows, int64_t row_bytes,
                    int64_t num_rows, Sum* sums, bool fetch, Between between) {
        if (num_rows != shaped_) shape_tiles(shaped_ = num_rows);
        const auto run = [&](auto lower, auto fetches) {
            multiply_tiles<Dot, lower, fetches>(weight, num_steps, rows, row_bytes, sums, between);
        };
        if (num_rows > TILE_ROWS_MOST)
            fetch ? run(std::true_type(), std::true_type()) : run(std::true_type(), std::false_type());
        else
            fetch ? run(std::false_type(), std::true_type()) : run(std::false_type(), std::false_type());
    }
    ~TileStrips() {
        if (shaped_) _tile_release();
    }

  private:
    int64_t shaped_ = 0;
};

}  // namespace tokend

#endif
