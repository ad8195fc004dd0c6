// Work that threads share, whether a team of them is there already or not.
#pragma once

#include <omp.h>

namespace tokend {

// Calls body on each thread of the team that runs this, or, where none does, of a new one, which is
// the calling thread alone where others are not worth waking. Loops in body are `omp for`, which
// may end with nowait: all that body does is done when this returns. Every thread of a team must
// come here, with the same arguments.
template <class Body>
inline void in_team(bool worth_waking, Body body) {
    if (omp_get_level() > 0) {
        body();
#pragma omp barrier
    } else {
#pragma omp parallel if (worth_waking)
        body();
    }
}

}  // namespace tokend
