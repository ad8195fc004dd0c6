// The sampling parameters of one row of a batch.
#pragma once

#include <cstdint>

namespace tokend {

// An element of ROW_PARAMS of worker/sampling/row_params.py: the same fields in the same order.
struct RowParams {
    uint64_t seed;
    uint32_t choice;
    uint32_t position;
    float temperature;  // above 0
    int32_t top_k;      // 0 keeps all
    float top_p;        // 1 keeps all
    float min_p;        // 0 keeps all
};

}  // namespace tokend
