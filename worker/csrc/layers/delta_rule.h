// The C interface of gated delta-rule layers (Yang et al., Gated Delta Networks, 2024): a causal
// depthwise convolution, a state of one matrix for each value head, and a gated norm.
//
// For each token t and value head, with decay a, strength b, query q, key k and value v of the token:
//
//   S_t = a S_t-1 + k (b (v - a S_t-1^T k))^T        o_t = S_t^T q
//
// rows of a run: | q k v, before the convolution | z | of each token: all channels, all values.
// gates: | b | a | of each token, num_value_heads numbers each. log a of the token is
// decay * softplus(a + time_bias); its strength is sigmoid(b).
// out: [num_tokens, num_value_heads * value_size], norm(o) * silu(z).
//
// The state of a layer in one slot, floats:
//
//   matrices   [value head, column tile, key_size, TOKEND_STATE_TILE]    columns: value_size, padded
//   inputs     [num_taps - 1 + max_logged, channels]                    of the convolution (recurrence.h)
//   gates      [max_logged, 2 * num_value_heads]                        of logged tokens
#pragma once

#include <cstdint>

#include "layers/recurrence.h"

extern "C" {

// One layer. Channels of the convolution are queries, keys and values: [ q | k | v ], heads in order.
// n value heads read a key head: heads h * n … h * n + n - 1 read key head h or, if is_tiled, each head
// reads key head h modulo num_key_heads.
struct TokendDeltaRule {
    int64_t num_key_heads;
    int64_t num_value_heads;  // a multiple
    int64_t key_size;
    int64_t value_size;
    int64_t is_tiled;
    int64_t num_taps;        // of the convolution, the token's own included
    const float* taps;       // [num_taps, channels]
    const float* decay;      // [num_value_heads], negative; see log a below
    const float* time_bias;  // [num_value_heads]
    const float* norm;       // [value_size]
    double norm_eps;
};

// Floats of the state of a layer.
__attribute__((visibility("default"))) int64_t tokend_delta_state(
    const TokendDeltaRule* layer, int64_t max_logged
);

__attribute__((visibility("default"))) TokendRecurrenceBytes tokend_delta_bytes;
__attribute__((visibility("default"))) TokendRecurrenceKernel tokend_delta_run;
}
