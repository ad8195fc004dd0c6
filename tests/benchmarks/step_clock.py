"""Timing of the products and attention of a step.

Wraps the parts of a model with timers; a kernel that runs all layers times them itself. The rest of
a step is found by subtraction.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from worker.attention.backend import AttentionBackend
from worker.attention.state_cache import AttentionWithStates
from worker.cpu.stack import KernelStack
from worker.layers.linear import Linear, ResidualLinear
from worker.models.decoder import Decoder
from worker.models.layer_stack import DecoderLayer, EagerLayers, LayerStack, RowAddition
from worker.models.parts import LayerPart


@dataclass
class StepClock:
    """Seconds since it was last cleared."""

    product: float = 0.0
    attention: float = 0.0

    def clear(self) -> None:
        self.product = self.attention = 0.0


class ClockedLinear(Linear):
    """A Linear whose calls are timed."""

    def __init__(self, linear: Linear, clock: StepClock) -> None:
        self._linear = linear
        self._clock = clock

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        started = perf_counter()
        result = self._linear(x)
        self._clock.product += perf_counter() - started
        return result

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        started = perf_counter()
        result = self._linear.add_to(residual, x)
        self._clock.product += perf_counter() - started
        return result


class ClockedAttention(AttentionWithStates):
    """An attention backend whose layers are timed, with its states; it is planned elsewhere."""

    def __init__(self, attention: AttentionBackend, clock: StepClock) -> None:
        self.attention = attention
        self._clock = clock
        self.plan = attention.plan  # type: ignore[method-assign]
        if isinstance(attention, AttentionWithStates):
            self.states = attention.states

    def run(self, *arguments: Any) -> torch.Tensor:
        started = perf_counter()
        result = self.attention.run(*arguments)
        self._clock.attention += perf_counter() - started
        return result


class ClockedParts(EagerLayers):
    """Layers with shared weights, whose products and attention are timed."""

    def __init__(self, stack: EagerLayers, clock: StepClock) -> None:
        layers = [_clocked_layer(layer, clock) for layer in stack.layers]
        super().__init__(layers)
        self._clock = clock

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        additions: Sequence[RowAddition] = (),
    ) -> torch.Tensor:
        clocked = ClockedAttention(attention, self._clock)
        return super().run(hidden, positions, clocked, additions)


class ClockedKernel:
    """A layer stack that is one call, which times its parts."""

    def __init__(self, stack: KernelStack, clock: StepClock) -> None:
        self._stack = stack
        self._clock = clock
        self.takes = stack.takes
        self.record_experts = stack.record_experts
        self.record_residuals = stack.record_residuals
        self.track_layers = stack.track_layers

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        additions: Sequence[RowAddition] = (),
    ) -> torch.Tensor:
        run = self._stack._run
        run.is_timed, run.product_ns, run.attention_ns = 1, 0, 0
        hidden = self._stack.run(hidden, positions, attention, additions)
        self._clock.product += run.product_ns * 1e-9
        self._clock.attention += run.attention_ns * 1e-9
        return hidden


class ClockedModel(Decoder):
    """A model with shared weights, whose products and attention are timed."""

    def __init__(self, model: Decoder, clock: StepClock) -> None:
        vars(self).update(vars(model))
        self._stacks = tuple(_clocked_stack(stack, clock) for stack in model._stacks)
        if model._head is not None:
            self._head = ClockedLinear(model._head, clock)


def _clocked_stack(stack: LayerStack, clock: StepClock) -> LayerStack:
    if isinstance(stack, KernelStack):
        return ClockedKernel(stack, clock)
    assert isinstance(stack, EagerLayers)
    return ClockedParts(stack, clock)


def _clocked_layer(layer: DecoderLayer, clock: StepClock) -> DecoderLayer:
    mixer, mlp = _clocked_part(layer.mixer, clock), _clocked_part(layer.mlp, clock)
    return replace(layer, mixer=mixer, mlp=mlp)


def _clocked_part(part: LayerPart, clock: StepClock) -> LayerPart:
    """Return a copy of the part whose products are timed."""
    clocked = copy(part)
    for name, value in vars(part).items():
        if isinstance(value, ResidualLinear):
            linear = ClockedLinear(value.linear, clock)
            setattr(clocked, name, ResidualLinear(linear, value.output))
        elif name in ("qkv", "gate_up") or isinstance(value, Linear):
            setattr(clocked, name, ClockedLinear(value, clock))
        elif name == "inputs":  # of a recurrent mixer
            setattr(clocked, name, [ClockedLinear(each, clock) for each in value])
    return clocked
