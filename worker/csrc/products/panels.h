// Weights in panels of 16 outputs, two of which are multiplied at a time.
#pragma once

#include <cstdint>

namespace tokend {

constexpr int64_t PANEL_OUTPUTS = 16;
constexpr int64_t PAIR_OUTPUTS = 2 * PANEL_OUTPUTS;  // outputs that a product computes at a time

// Some outputs of a product, 32 at a time, for some of its rows.
struct ProductPart {
    int64_t first_panel, end_panel, first_row, end_row;
};

inline int64_t whole(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

}  // namespace tokend
