// Whether this library may run here, beyond what the processor's flags tell.
#include "amx.h"

extern "C" __attribute__((visibility("default"))) int64_t tokend_may_run() {
#if defined(TOKEND_AMX)
    return tokend::tiles_allowed();
#else
    return 1;
#endif
}
