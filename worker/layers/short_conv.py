"""Gated short convolutions between their projections (Liquid AI, LFM2).

    output = C * (causal depthwise convolution of B * x)

The state of a sequence is only the last inputs of the convolution. Sums are float32, in the order
of the tokens. The input of its Recurrence is the projection B ‖ C ‖ x.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ShortConvShape:
    """Channels of a layer on one rank. num_taps: tokens that the convolution sees, its own too."""

    channels: int
    num_taps: int

    @property
    def num_outputs(self) -> int:
        return self.channels

    @property
    def num_inputs(self) -> int:
        """Columns of the projection."""
        return 3 * self.channels

    @property
    def input_sizes(self) -> tuple[int, ...]:
        return (self.num_inputs,)

    @property
    def state_floats(self) -> int:
        """Floats of a state, the window [num_taps - 1, channels]."""
        return (self.num_taps - 1) * self.channels

    @property
    def logged_floats(self) -> int:
        return self.channels

    @property
    def scratch_floats(self) -> int:
        return self.channels

    @property
    def flops_per_token(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """Float32, contiguous: taps [num_taps, channels], the oldest token first; bias [channels]."""

    taps: torch.Tensor
    bias: torch.Tensor
