// The tile unit (Intel AMX): leave to use it, and the shapes of its eight tiles.
//
// A kernel loads its own shapes when it begins and releases the tiles when it ends, on each
// thread: nothing is kept from one call to the next, for oneDNN uses the tiles as well.
#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TOKEND_AMX 1

namespace tokend {

// Whether this process may use tiles. The system is asked once: tile registers take 8 KiB of
// every thread that is switched out, so Linux gives them only to who asks (arch_prctl,
// ARCH_REQ_XCOMP_PERM, feature 18), and a sandbox may refuse.
inline bool tiles_allowed() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}

// What ldtilecfg reads: palette 1 has eight tiles of up to 16 rows of 64 bytes.
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
        // GCC takes the instruction for one that reads eight bytes: the others must be in memory.
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
