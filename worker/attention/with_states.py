"""Attention of a model some of whose layers have a recurrent state instead of KV."""

from collections.abc import Sequence

import torch

from worker.attention.base import AttentionBackend, AttentionInputs
from worker.layers.rotary import Rotation
from worker.state_cache import StateCache


class AttentionWithStates:
    """A backend for the layers with attention, and the states of the others.

    The state group is the last of a step's groups.
    """

    def __init__(self, attention: AttentionBackend, states: StateCache) -> None:
        self._attention = attention
        self.states = states

    def plan(self, inputs: Sequence[AttentionInputs]) -> None:
        *attention, states = inputs
        self._attention.plan(attention)
        self.states.plan_step(states)

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._attention.run(layer, query, key, value, rotation, sinks)
