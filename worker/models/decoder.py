"""The decoder that every family runs on: a ModelSpec's arithmetic over loaded weights.

Owns the order of operations of a layer. Knows neither requests nor pages: the
tokens of all requests are one packed batch, and attention is a backend that has
been told about the step beforehand.
"""

from dataclasses import dataclass

import torch

from worker.attention.base import AttentionBackend
from worker.layers.activation import make_gate
from worker.layers.buffer import RowBuffer
from worker.layers.embedding import Embedding
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.residual import Addition
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
    output: Addition
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Addition


class Decoder:
    """Token ids and positions to hidden states, hidden states to logits."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Embedding,
        layers: list[LayerWeights],
        norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.spec = spec
        self._embedding = embedding
        self._layers = layers
        self._rotaries = {layer.rotary for layer in layers}
        self._gate = make_gate(spec.activation, norm.device)
        self._normed = RowBuffer(spec.hidden_size)
        self._inner = RowBuffer(spec.intermediate_size)
        self._norm = norm
        self._head = head
        self._parts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._heads = (sum(self._parts), spec.head_dim)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """int64 [T] token ids and positions to hidden states [T, hidden], not yet normed.

        Positions are below the model's length. `attention` writes every token's
        key and value and attends for the whole batch.
        """
        hidden = self._embedding(token_ids)
        normed, inner = self._normed.rows(hidden), self._inner.rows(hidden)
        rotations = {rotary: rotary.at(positions) for rotary in self._rotaries}
        for index, layer in enumerate(self._layers):
            layer.attention_norm.into(hidden, normed)
            attended = self._attend(index, layer, normed.tensor, rotations[layer.rotary], attention)
            hidden = layer.output.add_to(hidden, attended)
            gate_up = layer.gate_up(layer.mlp_norm.into(hidden, normed))
            hidden = layer.down.add_to(hidden, self._gate(gate_up, inner))
        return hidden

    @torch.inference_mode()
    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result, [N, hidden], to logits [N, vocab] in the model's dtype."""
        return self._head(self._norm(hidden))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same in float32."""
        return self.scores(hidden).float()

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
