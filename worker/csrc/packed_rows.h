// Rows of activations, rounded to 8 bits with a scale for 32 numbers.
#pragma once

#include "packed.h"

namespace tokend {

// Row `row` of the product's input to in_features / 32 blocks.
void quantise_row(const TokendProduct& product, int64_t in_features, int64_t row, TokendQuantised* to);

}  // namespace tokend
