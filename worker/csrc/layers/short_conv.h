// The C interface of gated short convolutions (Liquid AI, LFM2): out = C * conv(B * x), a causal depthwise
// convolution.
//
// rows of a run: | B | C | x | of each token, `channels` numbers each. There are no gates.
// out: [num_tokens, channels].
//
// The state of a layer in one slot, floats: the inputs B * x of the convolution (recurrence.h). There are no gates, and
// nothing is computed again.
#pragma once

#include <cstdint>

#include "layers/recurrence.h"

extern "C" {

struct TokendShortConv {
    int64_t channels;
    int64_t num_taps;   // the token's own included
    const float* taps;  // [num_taps, channels]
    const float* bias;  // [channels]
};

__attribute__((visibility("default"))) TokendRecurrenceBytes tokend_short_conv_bytes;
__attribute__((visibility("default"))) TokendRecurrenceKernel tokend_short_conv_run;
}
