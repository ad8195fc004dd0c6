// Element types by their numbers in the C interfaces: DTYPE_CODES of worker/cpu/kernels.py.
#pragma once

#include <cstdint>

extern "C" {

enum TokendDType : int64_t { TOKEND_FLOAT32 = 0, TOKEND_BFLOAT16 = 1, TOKEND_FLOAT16 = 2, TOKEND_INT8 = 3 };
}
