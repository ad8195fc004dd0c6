"""The layers of a decoder: what each consists of, and how they follow one another.

Owns the order of operations of a layer where each part is a call of its own, on any
device. The same as one call of a kernel is in kernel_stack.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.attention.base import AttentionBackend
from worker.layers.activation import make_gate
from worker.layers.buffer import RowBuffer
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.residual import ResidualLinear
from worker.layers.rotary import RotaryEmbedding, Rotation
from worker.models.spec import ModelSpec


@dataclass(frozen=True)
class LayerWeights:
    """One layer, products fused.

    qkv: hidden to query ‖ key ‖ value heads.
    head_norms: per-head norms of query and key, empty for most families.
    rotary: how its queries and keys turn; many layers share one.
    output, down: end attention and MLP; a family may norm what they add.
    gate_up: hidden to gate ‖ up.
    """

    attention_norm: RMSNorm
    qkv: Linear
    head_norms: tuple[RMSNorm, RMSNorm] | tuple[()]
    rotary: RotaryEmbedding
    output: ResidualLinear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: ResidualLinear


class LayerStack(Protocol):
    """All layers of a model, over weights of one form or another."""

    def takes(self, num_rows: int, attention: AttentionBackend) -> bool:
        """Whether it computes steps of so many tokens with this attention."""
        ...

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """Embedded tokens [T, hidden], contiguous, to hidden states of that shape and dtype.

        positions: int64 [T], contiguous; raises IndexError for one beyond the model's length.
        May reuse the memory of `hidden`. `attention` has planned the step.
        """
        ...


class EagerLayers:
    """A LayerStack that calls each part by itself; takes every step."""

    def __init__(self, spec: ModelSpec, layers: Sequence[LayerWeights]) -> None:
        self.spec = spec
        self.layers = layers
        self._gate = make_gate(spec.activation, layers[0].mlp_norm.device)
        self._rotaries = tuple(dict.fromkeys(layer.rotary for layer in layers))
        self._normed = RowBuffer(spec.hidden_size)
        self._inner = RowBuffer(spec.intermediate_size)
        self._parts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._heads = (sum(self._parts), spec.head_dim)

    def takes(self, num_rows: int, attention: AttentionBackend) -> bool:
        return True

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        rotations = {rotary: rotary.at(positions) for rotary in self._rotaries}
        normed, inner = self._normed.rows(hidden), self._inner.rows(hidden)
        for index, layer in enumerate(self.layers):
            layer.attention_norm.into(hidden, normed)
            attended = self._attend(index, layer, normed.tensor, rotations[layer.rotary], attention)
            hidden = layer.output.add_to(hidden, attended)
            gate_up = layer.gate_up(layer.mlp_norm.into(hidden, normed))
            hidden = layer.down.add_to(hidden, self._gate(gate_up, inner))
        return hidden

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        normed: torch.Tensor,
        rotation: Rotation,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """The attention of one layer before its output projection, [T, query size]."""
        # heads  [ q0 q1 … | k0 … | v0 … ]
        heads = layer.qkv(normed).view(-1, *self._heads)
        query, key, value = heads.split_with_sizes(self._parts, 1)
        if layer.head_norms:
            query_norm, key_norm = layer.head_norms
            query, key = query_norm(query), key_norm(key)
        return attention.run(index, query, key, value, rotation).flatten(1)
