"""The gated MLP of a layer, down(f(gate(x)) * up(x)): spec, weights, sharding and forward pass.

(Shazeer, GLU Variants Improve Transformer.)
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from worker.layers.activation import Activation, make_gate
from worker.layers.linear import Linear, ResidualLinear
from worker.models.parts import ForwardContext, Shard, WeightSpec, divide_evenly, projection

if TYPE_CHECKING:
    from worker.loader.weights import LayerReader

_ROTATED_COLUMNS: Final = 64
_BLOCK_COLUMNS: Final = 32
"""Columns that int8 formats rotate together, and columns that share a scale."""


@dataclass(frozen=True, kw_only=True)
class GatedMlpSpec:
    """Gate and up projections from hidden_size to intermediate_size, and the way back."""

    hidden_size: int
    intermediate_size: int
    activation: Activation = "silu"

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        hidden, inner = self.hidden_size, self.intermediate_size
        return (
            *projection("gate", "mlp.gate_proj", "ffn_gate", (inner, hidden)),
            *projection("up", "mlp.up_proj", "ffn_up", (inner, hidden)),
            *projection("down", "mlp.down_proj", "ffn_down", (hidden, inner)),
        )

    @property
    def max_ranks(self) -> int:
        return self.intermediate_size

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple["GatedMlpSpec", dict[str, Shard]]:
        """Divide the inner columns evenly, between quantisation blocks if every rank gets one."""
        units = (
            math.lcm(_ROTATED_COLUMNS, block_columns.get("down.weight", 1)),
            _ROTATED_COLUMNS,
            _BLOCK_COLUMNS,
        )
        fitting = (
            unit
            for unit in units
            if self.intermediate_size % unit == 0 and self.intermediate_size // unit >= size
        )
        unit = next(fitting, 1)
        share = divide_evenly(self.intermediate_size // unit, size)[rank]
        inner = slice(share.start * unit, share.stop * unit)
        shards = {
            "gate.weight": Shard(rows=inner),
            "up.weight": Shard(rows=inner),
            "down.weight": Shard(columns=inner),
        }
        return replace(self, intermediate_size=inner.stop - inner.start), shards

    def read(self, reader: "LayerReader") -> Callable[[], "GatedMlp"]:
        """Read gate and up projections as one product."""
        gate_up, down = reader.linear("gate", "up"), reader.output_linear("down")
        return lambda: GatedMlp(self, gate_up(), down(), reader.device)


class GatedMlp:
    """The MLP of one layer with its weights; gate_up: hidden to gate ‖ up."""

    def __init__(
        self, spec: GatedMlpSpec, gate_up: Linear, down: ResidualLinear, device: torch.device
    ) -> None:
        self.spec = spec
        self.gate_up = gate_up
        self.down = down
        self._gate = make_gate(spec.activation, device)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        inner = context.scratch(self.spec.intermediate_size)
        return self.down.add_to(residual, self._gate(self.gate_up(x), inner))
