// Work sharing among OpenMP threads, inside or outside of a parallel region.
#pragma once

#include <omp.h>

#include <cstdint>

namespace tokend {

// Calls body on each thread of the current team. Outside of a parallel region a new team is made,
// of the calling thread alone unless `worth_waking`. Loops in body are `omp for` and may end with
// nowait: all work of body is done when this returns. Every thread of a team must call this, with
// the same arguments.
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

// ids: [omp_get_max_threads()], becomes the system's ids of the threads of the caller's next team.
extern "C" __attribute__((visibility("default"))) void tokend_team_threads(int32_t* ids);
