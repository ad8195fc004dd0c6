// The C interface of Mamba-2 layers (Dao and Gu, Transformers are SSMs, 2024): a causal depthwise convolution, a
// state of one matrix for each head, and a gate, mostly with a norm.
//
// For each token t and head, with d = softplus(dt + time_bias), x of the head and B, C of its group:
//
//   S_t = exp(decay d) S_t-1 + B (d x)^T        y_t = S_t^T C + skip x
//
// rows of a run: | z | x B C, before the convolution | dt | of each token: all heads, all channels, a number of each
// head. There are no gates. out: [num_tokens, heads]: y with gate and norm, float32 if has_wide_output.
//
// The state of a layer in one slot, floats:
//
//   matrices   [head, column tile, state_size, TOKEND_STATE_TILE]    columns: head_size, padded
//   inputs     [num_taps - 1 + max_logged, channels]                of the convolution (recurrence.h)
//   gates      [max_logged, num_heads]                              dt of logged tokens
#pragma once

#include <cstdint>

#include "layers/recurrence.h"

extern "C" {

// RMSNorm(y * silu(z)), RMSNorm(y) * silu(z), y * silu(z); each norm covers all heads of a group.
enum TokendGateNorm : int64_t { TOKEND_NORM_OF_GATED = 0, TOKEND_GATED_NORM = 1, TOKEND_NO_NORM = 2 };

// One layer. Channels of the convolution are [ x | B | C ]: heads in order, B of all groups, C of all groups.
// The heads of a group follow each other.
struct TokendMamba2 {
    int64_t num_heads;
    int64_t head_size;
    int64_t num_groups;  // a divisor of num_heads
    int64_t state_size;
    int64_t num_taps;         // of the convolution, the token's own included
    int64_t gate_norm;        // a TokendGateNorm
    int64_t has_wide_output;
    const float* taps;       // [num_taps, channels]
    const float* conv_bias;  // [channels]
    const float* decay;      // [num_heads], negative
    const float* time_bias;  // [num_heads]
    const float* skip;       // [num_heads]
    const float* norm;       // [num_heads * head_size]; null without a norm
    double norm_eps;
    double gate_factor;  // of z
    double time_factor;  // of dt
};

// Floats of the state of a layer.
__attribute__((visibility("default"))) int64_t tokend_mamba2_state(
    const TokendMamba2* layer, int64_t max_logged
);

__attribute__((visibility("default"))) TokendRecurrenceBytes tokend_mamba2_bytes;
__attribute__((visibility("default"))) TokendRecurrenceKernel tokend_mamba2_run;
}
