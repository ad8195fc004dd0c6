// The tile unit (Intel AMX): permission to use it, and the shapes of its eight tiles.
//
// A kernel loads its own shapes when it begins and releases the tiles when it ends, on every
// thread. No state is kept between calls, because oneDNN uses the tiles as well.
#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TOKEND_AMX 1

namespace tokend {

// Whether this process may use tiles. Permission is requested once (arch_prctl,
// ARCH_REQ_XCOMP_PERM, feature 18), because tile registers add 8 KiB to the saved state of a
// thread; a sandbox may refuse.
inline bool tiles_allowed() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}

// The operand of ldtilecfg: palette 1 has eight tiles of up to 16 rows of 64 bytes.
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int bytes = 64) {
        rows[tile] = uint8_t(num_rows);
        row_bytes[tile] = uint16_t(bytes);
    }
    void load() const {
        // GCC assumes that the instruction reads eight bytes: the others must be in memory already.
        asm volatile("" : : "r"(this) : "memory");
        _tile_loadconfig(this);
    }
};

}  // namespace tokend

#else

namespace tokend {

inline bool tiles_allowed() { return false; }

}  // namespace tokend

#endif
