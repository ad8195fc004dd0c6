"""Gated delta-rule layers between their projections (Yang et al., Gated Delta Networks, 2024).

    q, k, v = silu(causal depthwise convolution of q, k, v)      q, k: of length 1 in each head
    S = a S + k (b (v - a S^T k))^T                              a, b: of the token and value head
    output = RMSNorm(S^T q / sqrt(key size)) * silu(z)

Computed one token after the other in float32, so results do not depend on how a sequence is cut
into steps. The inputs of its Recurrence are the projections q ‖ k ‖ v ‖ z and b ‖ a.
"""

from dataclasses import dataclass

import torch

from worker.layers.recurrence import TILE


@dataclass(frozen=True, kw_only=True)
class DeltaRuleShape:
    """Heads of a layer on one rank; n value heads read a key head.

    is_tiled: value head h reads key head h modulo num_key_heads, else heads h * n … h * n + n - 1
        read key head h.
    num_taps: tokens that the convolution sees, the current one included.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    num_taps: int
    is_tiled: bool = False

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.num_key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def num_outputs(self) -> int:
        return self.values

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def num_inputs(self) -> int:
        """Columns of the projections q ‖ k ‖ v ‖ z; b ‖ a have two for each value head."""
        return self.channels + self.values

    @property
    def input_sizes(self) -> tuple[int, ...]:
        return (self.num_inputs, 2 * self.num_value_heads)

    @property
    def matrix_floats(self) -> int:
        """Floats of the matrices in a state: [value heads, column tiles, key_size, 32]."""
        return self.num_value_heads * -(-self.value_size // TILE) * self.key_size * TILE

    @property
    def state_floats(self) -> int:
        """Floats of a state: the matrices, and the window [num_taps - 1, channels]."""
        return self.matrix_floats + (self.num_taps - 1) * self.channels

    @property
    def logged_floats(self) -> int:
        return self.channels + 2 * self.num_value_heads

    @property
    def scratch_floats(self) -> int:
        """Floats of memory that a token takes while a layer runs."""
        return self.channels + 3 * self.num_value_heads

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the update of the matrices, and of the two products with them."""
        return 8 * self.num_value_heads * self.key_size * self.value_size


@dataclass(frozen=True, slots=True)
class DeltaRuleWeights:
    """Weights of a layer that are in no product; float32, contiguous.

    taps: [num_taps, channels], the oldest token first. decay: [num_value_heads], negative.
    time_bias: [num_value_heads]. norm: [value_size].
    """

    taps: torch.Tensor
    decay: torch.Tensor
    time_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
