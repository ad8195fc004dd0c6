"""The MLP of a layer, down(f(gate(x)) * up(x)): spec, weights, sharding and forward pass.

(Shazeer, GLU Variants Improve Transformer.) Without a gate it is down(f(up(x))).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import torch

from worker.layers.activation import Activation, Gate
from worker.layers.linear import Linear, ResidualLinear
from worker.models.parts import (
    ForwardContext,
    PartReader,
    PartSpec,
    Shard,
    WeightSpec,
    divide_evenly,
    projection,
    stacked,
)

_ROTATED_COLUMNS: Final = 64
_BLOCK_COLUMNS: Final = 32
"""Columns that int8 formats rotate together, and columns that share a scale."""


@dataclass(frozen=True, kw_only=True)
class MlpSpec(PartSpec):
    """Gate and up projections from hidden_size to intermediate_size, and the way back.

    bias: all projections have one.
    is_gated: whether there is a gate projection.
    stacked_gate_up: files have the projections of the input as one tensor; GGUF files only if
        `stacked_in_gguf`.
    up, down: names of the projections in a Hugging Face folder.
    gate_factor, output_factor: of the gate before the activation, and of the output.
    """

    hidden_size: int
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    is_gated: bool = True
    stacked_gate_up: bool = False
    stacked_in_gguf: bool = True
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate_factor: float = 1.0
    output_factor: float = 1.0

    @property
    def inputs(self) -> tuple[str, ...]:
        """The projections of the input, as they lie in the product of both."""
        return ("gate", "up") if self.is_gated else ("up",)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        hidden, inner = self.hidden_size, self.intermediate_size
        names = {"gate": ("mlp.gate_proj", "ffn_gate"), "up": (self.up, "ffn_up")}
        if self.stacked_gate_up:
            names = {
                name: ("mlp.gate_up_proj", "ffn_up" if self.stacked_in_gguf else theirs)
                for name, (_, theirs) in names.items()
            }
        inputs = [
            projection(name, *names[name], (inner, hidden), self.bias) for name in self.inputs
        ]
        if self.stacked_gate_up:
            inputs = [stacked(*weights) for weights in zip(*inputs, strict=True)]
            if not self.stacked_in_gguf:
                inputs = [tuple(replace(each, gguf_stack=None) for each in ws) for ws in inputs]
        return (
            *chain.from_iterable(inputs),
            *projection("down", self.down, "ffn_down", (hidden, inner), self.bias),
        )

    @property
    def max_ranks(self) -> int:
        return self.intermediate_size

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple["MlpSpec", dict[str, Shard]]:
        """Divide the inner columns as `share_of_inner` does."""
        inner = share_of_inner(
            self.intermediate_size, rank, size, block_columns.get("down.weight", 1)
        )
        shards = {"down.weight": Shard(columns=inner)}
        for name in self.inputs:
            shards |= dict.fromkeys((f"{name}.weight", f"{name}.bias"), Shard(rows=inner))
        return replace(self, intermediate_size=inner.stop - inner.start), shards

    def read(self, reader: PartReader) -> Callable[[], "Mlp"]:
        """Read gate and up projections as one product."""
        gate_up, down = reader.linear(*self.inputs), reader.output_linear("down")
        device = reader.device
        return lambda: Mlp(self, gate_up(), down(), device.gate(self.activation, self.is_gated))


def share_of_inner(num_columns: int, rank: int, size: int, block_columns: int) -> slice:
    """Return the inner columns of an MLP that rank `rank` of `size` computes.

    They are divided evenly, between quantisation blocks of the down projection if every rank gets
    one.
    """
    units = (math.lcm(_ROTATED_COLUMNS, block_columns), _ROTATED_COLUMNS, _BLOCK_COLUMNS)
    fitting = (unit for unit in units if num_columns % unit == 0 and num_columns // unit >= size)
    unit = next(fitting, 1)
    share = divide_evenly(num_columns // unit, size)[rank]
    return slice(share.start * unit, share.stop * unit)


class Mlp:
    """The MLP of one layer with its weights; gate_up: hidden to gate ‖ up, or to up."""

    def __init__(self, spec: MlpSpec, gate_up: Linear, down: ResidualLinear, gate: Gate) -> None:
        self.spec = spec
        self.gate_up = gate_up
        self.down = down
        self._gate = gate

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        rows, spec = self.gate_up(x), self.spec
        if spec.gate_factor != 1.0:
            rows[:, : spec.intermediate_size] *= spec.gate_factor
        inner = self._gate(rows)
        if spec.output_factor != 1.0:
            inner *= spec.output_factor
        return self.down.add_to(residual, inner)
