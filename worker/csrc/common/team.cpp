#include "common/team.h"

#include <unistd.h>

extern "C" void tokend_team_threads(int32_t* ids) {
#pragma omp parallel
    ids[omp_get_thread_num()] = gettid();
}
