"""Calls of a KV connector around the attention of each layer.

Only for a connector that asks for them: attention that is wrapped is not the one that a kernel
for whole stacks, or a graph, knows, so a step is computed layer by layer.
"""

from collections.abc import Sequence

import torch

from worker.attention.base import AttentionBackend, AttentionInputs
from worker.kv_connector.base import WorkerConnector
from worker.layers.rotary import Rotation


class LayerHooks:
    """AttentionBackend that waits for a layer's load before it runs, and saves it after."""

    def __init__(self, attention: AttentionBackend, connector: WorkerConnector) -> None:
        self._attention = attention
        self._connector = connector

    def plan(self, inputs: Sequence[AttentionInputs]) -> None:
        """As the Protocol says."""
        self._attention.plan(inputs)

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
    ) -> torch.Tensor:
        """As the Protocol says."""
        self._connector.wait_for_layer_load(layer)
        attended = self._attention.run(layer, query, key, value, rotation)
        self._connector.save_kv_layer(layer)
        return attended


def with_hooks(attention: AttentionBackend, connector: WorkerConnector) -> AttentionBackend:
    """Attention as a connector wants it."""
    return LayerHooks(attention, connector) if connector.per_layer else attention
