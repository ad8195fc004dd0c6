// Integer products of up to 32 rows with the 32 outputs of a pair of panels, by tiles.
//
// A tile of a weight is 16 groups x 16 outputs x 4 inputs, one of rows 16 rows x 64 inputs; the
// sums are those of rotated_dot.h.
#pragma once

#include "tile_pair.h"

#if defined(TOKEND_AMX) && defined(__AMX_INT8__)

namespace tokend {

struct RotatedTiles {
    static constexpr int64_t FETCH_AHEAD = 4096;
    static void upper_first() { _tile_dpbsud(0, 4, 6); }
    static void upper_second() { _tile_dpbsud(1, 4, 7); }
    static void lower_first() { _tile_dpbsud(2, 5, 6); }
    static void lower_second() { _tile_dpbsud(3, 5, 7); }
};

}  // namespace tokend

#endif
