"""What the kinds of recurrent layers have in common, between a layer's projections.

A kind (worker/layers/delta_rule.py) describes its sizes and weights. A device computes it:
`Device.recurrence` finds its implementation by the type of the sizes. A layer of any kind keeps of
each sequence a state of a fixed size instead of K and V.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from worker.attention.state_cache import StateCache
from worker.layers.scratch import ByteBuffer

TILE: Final = 32
"""TOKEND_STATE_TILE of csrc/layers/recurrence.h: columns of a matrix that lie together."""


class RecurrenceShape(Protocol):
    """The sizes of a recurrent layer on one rank."""

    @property
    def state_floats(self) -> int:
        """Floats of the state of a sequence: matrices, and the last inputs of a convolution."""

    @property
    def logged_floats(self) -> int:
        """Floats of the log of a token: inputs of the convolution, and of the gates."""

    @property
    def scratch_floats(self) -> int:
        """Floats of memory that a token takes while a layer runs."""

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a token between the projections; a convolution of a few taps is left out."""

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """Columns of each projection of the input."""

    @property
    def num_outputs(self) -> int:
        """Columns of the output."""


class Recurrence(Protocol):
    """One implementation, with the weights of a layer.

    It has one entry for prompts, decodes and rows whose states are needed one by one: they are
    sequences of many tokens, of one token, and of tokens each of which has a write in the plan.
    """

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        states: StateCache,
        layer: int,
        memory: ByteBuffer,
    ) -> torch.Tensor:
        """Return the output [T, num_outputs] of the projections of the input, each [T, columns].

        layer: its number among those with states. Reads and writes the states of the planned step.
        The bits of a token do not depend on the sequences beside its own, nor on how its own is
        cut into steps. The output has the dtype of the inputs, unless the kind says otherwise.
        """


Recurrences = Mapping[type[Any], Callable[[Any, Any], Recurrence]]
"""What makes the implementation of a kind, by the type of its sizes, of sizes and weights."""
