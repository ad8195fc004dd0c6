"""Multi-head attention as the mixer of a layer: its spec, weights, sharding and forward pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from proto.errors import ConfigError
from worker.attention.base import AttentionShape
from worker.layers.linear import Linear, ResidualLinear
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryEmbedding
from worker.models.parts import (
    ForwardContext,
    Shard,
    WeightSpec,
    divide_evenly,
    norm_weight,
    projection,
)
from worker.models.rope import Rope

if TYPE_CHECKING:
    from worker.loader.weights import LayerReader


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    head_dim: need not be hidden_size / num_heads.
    scale: factor of query times key before the softmax.
    window: sliding window in tokens, the query's own included; None for full attention.
    qkv_bias, output_bias: biases of the projections.
    qk_norm: RMSNorm over each query and key head before the rotary embedding.
    gguf_permutes_qk: a GGUF file of this family interleaves the rows of query and key heads.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    gguf_permutes_qk: bool = False

    @property
    def query_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def shape(self) -> AttentionShape:
        """Heads and scale, as attention backends take them."""
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.scale)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        hidden, query, kv = self.hidden_size, self.query_size, self.kv_size
        rotated = (
            *projection("q", "self_attn.q_proj", "attn_q", (query, hidden), self.qkv_bias),
            *projection("k", "self_attn.k_proj", "attn_k", (kv, hidden), self.qkv_bias),
        )
        if self.gguf_permutes_qk:
            rotated = tuple(
                replace(weight, gguf_interleaved_head_dim=self.head_dim) for weight in rotated
            )
        norms = (
            norm_weight("q_norm", "self_attn.q_norm", "attn_q_norm", self.head_dim),
            norm_weight("k_norm", "self_attn.k_norm", "attn_k_norm", self.head_dim),
        )
        return (
            *rotated,
            *projection("v", "self_attn.v_proj", "attn_v", (kv, hidden), self.qkv_bias),
            *(norms if self.qk_norm else ()),
            *projection("o", "self_attn.o_proj", "attn_output", (hidden, query), self.output_bias),
        )

    @property
    def max_ranks(self) -> int:
        return self.num_heads

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple["AttentionSpec", dict[str, Shard]]:
        """Give a rank its KV heads and the query heads that read them.

        KV heads are dealt out in order, as evenly as possible. With more ranks than KV heads,
        several ranks hold the same KV head and share its query heads.

            SmolLM2, two ranks    KV heads 0 1 | 2    query heads 0 … 5 | 6 7 8
        """
        kv_heads, heads = self._heads_of_ranks(size)[rank]
        query, kv = (
            slice(part.start * self.head_dim, part.stop * self.head_dim)
            for part in (heads, kv_heads)
        )
        shards = {"o.weight": Shard(columns=query)}
        for name, rows in (("q", query), ("k", kv), ("v", kv)):
            shards |= dict.fromkeys((f"{name}.weight", f"{name}.bias"), Shard(rows=rows))
        return replace(self, num_heads=len(heads), num_kv_heads=len(kv_heads)), shards

    def read(self, reader: "LayerReader") -> Callable[[], "Attention"]:
        """Read query, key and value projections as one product."""
        qkv, output = reader.linear("q", "k", "v"), reader.output_linear("o")
        norms = [reader.norm(name) for name in ("q_norm", "k_norm") if self.qk_norm]
        return lambda: Attention(
            self,
            reader.layer,
            qkv(),
            tuple(build() for build in norms),
            reader.rotary(self.rope, self.head_dim),
            output(),
        )

    def _heads_of_ranks(self, size: int) -> list[tuple[range, range]]:
        """Return KV heads and query heads of each rank."""
        queries = self.num_heads // self.num_kv_heads
        if size <= self.num_kv_heads:
            return [
                (kv, range(kv.start * queries, kv.stop * queries))
                for kv in divide_evenly(self.num_kv_heads, size)
            ]
        # ranks of a KV head   | 0 1 2 | 3 4 |      its query heads   | 0 | 1 | 2 3 |
        heads = []
        for kv, ranks in enumerate(divide_evenly(size, self.num_kv_heads)):
            if len(ranks) > queries:
                raise ConfigError(
                    f"--tensor-parallel-size {size}: {self.num_heads} query heads over "
                    f"{self.num_kv_heads} KV heads do not suffice for so many workers",
                    "tensor_parallel_size",
                )
            first = kv * queries
            heads += [
                (range(kv, kv + 1), range(first + part.start, first + part.stop))
                for part in divide_evenly(queries, len(ranks))
            ]
        return heads


class Attention:
    """Attention of one layer with its weights.

    qkv: hidden to query ‖ key ‖ value heads. head_norms: norms of query and key heads, or empty.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        layer: int,
        qkv: Linear,
        head_norms: tuple[RMSNorm, ...],
        rotary: RotaryEmbedding,
        output: ResidualLinear,
    ) -> None:
        self.spec = spec
        self.qkv = qkv
        self.head_norms = head_norms
        self.rotary = rotary
        self.output = output
        self._layer = layer
        self._parts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._heads = (sum(self._parts), spec.head_dim)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        # heads  [ q0 q1 … | k0 … | v0 … ]
        heads = self.qkv(x).view(-1, *self._heads)
        query, key, value = heads.split_with_sizes(self._parts, 1)
        if self.head_norms:
            query_norm, key_norm = self.head_norms
            query, key = query_norm(query), key_norm(key)
        rotation = context.rotation(self.rotary)
        attended = context.attention.run(self._layer, query, key, value, rotation)
        return self.output.add_to(residual, attended.flatten(1))
