"""A recurrent layer as the mixer of a layer: what the specs of all kinds share, and the layer.

A kind has a spec (worker/models/delta_rule.py, mamba2.py, short_conv.py) with its weights and their
sharding; sizes and weights between the projections are in worker/layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from worker.attention.state_cache import AttentionWithStates
from worker.layers.linear import Linear, ResidualLinear
from worker.layers.recurrence import Recurrence, RecurrenceShape
from worker.models.parts import ForwardContext, PartSpec, product_flops, product_outputs


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(PartSpec):
    """A mixer that keeps a state of a fixed size instead of KV.

    shape: the sizes between the projections.
    """

    hidden_size: int
    shape: RecurrenceShape

    @property
    def state_floats(self) -> int:
        return self.shape.state_floats

    @property
    def logged_floats(self) -> int:
        return self.shape.logged_floats

    @property
    def flops_per_token(self) -> int:
        return product_flops(self.weights) + self.shape.flops_per_token

    @property
    def outputs_per_token(self) -> int:
        # Memory of a token beside the products, in float32.
        shape = self.shape
        return product_outputs(self.weights) + 2 * shape.scratch_floats + shape.num_outputs


class RecurrentMixer:
    """A recurrent layer with its weights.

    layer: its number among the layers that have a state. inputs: the projections that the
    recurrence reads, one or two. finish: what lies between the recurrence and the output; None:
    nothing.
    """

    def __init__(
        self,
        spec: RecurrentSpec,
        layer: int,
        inputs: Sequence[Linear],
        recurrence: Recurrence,
        output: ResidualLinear,
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.spec = spec
        self.layer = layer
        self.inputs = inputs
        self.recurrence = recurrence
        self.output = output
        self.finish = finish

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        attention = context.attention
        assert isinstance(attention, AttentionWithStates), "the step has no states"
        rows = [project(x) for project in self.inputs]
        mixed = self.recurrence.run(rows, attention.states, self.layer, context.memory)
        if self.finish is not None:
            mixed = self.finish(mixed).to(x.dtype)
        return self.output.add_to(residual, mixed)
