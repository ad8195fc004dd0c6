"""Mamba-2 layers between their projections (Dao and Gu, Transformers are SSMs, 2024).

    x, B, C = silu(causal depthwise convolution of x, B, C)      B, C: of a group of heads
    S = a S + B (d x)^T            d = softplus(dt + bias) of the token and head, a = exp(A d)
    y = S^T C + D x
    output = RMSNorm(y * silu(z)) of each group; or see GateNorm

Computed one token after the other in float32, so results do not depend on how a sequence is cut
into steps. The input of its Recurrence is the projection z ‖ x ‖ B ‖ C ‖ dt.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from worker.layers.recurrence import TILE

GateNorm = Literal["norm of gated", "gated norm", "none"]
"""The end of a layer: RMSNorm(y * silu(z)), RMSNorm(y) * silu(z), or y * silu(z)."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Shape:
    """Heads of a layer on one rank; the heads of a group follow each other and share B and C.

    num_taps: tokens that the convolution sees, the current one included.
    gate_norm: order of gate and norm; each norm covers all heads of a group.
    has_wide_output: the output is float32 for any input, for a norm over all ranks that follows.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    num_taps: int
    gate_norm: GateNorm = "norm of gated"
    has_wide_output: bool = False

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_size

    @property
    def num_outputs(self) -> int:
        return self.inner

    @property
    def group_states(self) -> int:
        """Channels of B, and of C."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.group_states

    @property
    def num_inputs(self) -> int:
        """Columns of the projection."""
        return self.inner + self.channels + self.num_heads

    @property
    def input_sizes(self) -> tuple[int, ...]:
        return (self.num_inputs,)

    @property
    def matrix_floats(self) -> int:
        """Floats of the matrices in a state: [heads, column tiles, state_size, 32]."""
        return self.num_heads * -(-self.head_size // TILE) * self.state_size * TILE

    @property
    def state_floats(self) -> int:
        """Floats of a state: the matrices, and the window [num_taps - 1, channels]."""
        return self.matrix_floats + (self.num_taps - 1) * self.channels

    @property
    def logged_floats(self) -> int:
        return self.channels + self.num_heads

    @property
    def scratch_floats(self) -> int:
        return self.channels + 2 * self.num_heads

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the update of the matrices, and of the product with them."""
        return 5 * self.inner * self.state_size


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """Weights of a layer that are in no product; float32, contiguous.

    taps: [num_taps, channels], the oldest token first. conv_bias: [channels]. decay: A,
    [num_heads], negative. time_bias: [num_heads]. skip: D, [num_heads]. norm: [inner]; None
    without a norm.
    gate_factor, time_factor: of z and of dt.
    """

    taps: torch.Tensor
    conv_bias: torch.Tensor
    decay: torch.Tensor
    time_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor | None
    norm_eps: float
    gate_factor: float = 1.0
    time_factor: float = 1.0
