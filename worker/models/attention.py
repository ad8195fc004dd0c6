"""Multi-head attention as the mixer of a layer: its spec, weights, sharding and forward pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from proto.errors import ConfigError
from worker.attention.backend import AttentionShape
from worker.layers.activation import Gate
from worker.layers.linear import Linear, ResidualLinear, sum_in_float32
from worker.layers.norm import Norm
from worker.models.parts import (
    ForwardContext,
    HeadRows,
    PartReader,
    PartSpec,
    Shard,
    WeightSpec,
    divide_evenly,
    norm_weights,
    projection,
    stacked,
)
from worker.models.rope import Rope
from worker.models.rotary import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(PartSpec):
    """Grouped-query attention of one layer.

    head_dim: need not be hidden_size / num_heads.
    scale: factor of query times key before the softmax.
    soft_cap: see AttentionShape.
    rotary_dim: first dimensions of a head, which are rotated; 0: all of them.
    rope_interleaved_in, interleaves_all: see HeadRows.
    window: sliding window in tokens, the query's own included; None for full attention.
    bidirectional: a query sees later tokens, too; the window then reaches to both sides.
    qkv_bias, output_bias: biases of the projections.
    stacked_qkv: files have the three projections of the input as one tensor.
    sinks: each head has a logit without a value in its softmax.
    output_gate: the query projection also gives a gate of each head, whose sigmoid multiplies the
        output of the attention: | query of head 0 | its gate | query of head 1 | …
    qk_norm: RMSNorm over each query and key head before the rotary embedding.
    joint_qk_norm: the same over all query heads together, and over all key heads.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    soft_cap: float = 0.0
    rotary_dim: int = 0
    rope_interleaved_in: tuple[str, ...] = ()
    interleaves_all: bool = False
    window: int | None = None
    bidirectional: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    stacked_qkv: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    sinks: bool = False
    output_gate: bool = False

    @property
    def query_size(self) -> int:
        """Numbers of all queries."""
        return self.num_heads * self.head_dim

    @property
    def query_rows(self) -> int:
        """Rows of the query projection."""
        return self.query_size * (2 if self.output_gate else 1)

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def shape(self) -> AttentionShape:
        """Heads and scale, as attention backends take them."""
        return AttentionShape(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.scale,
            self.soft_cap,
            bidirectional=self.bidirectional,
        )

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        hidden, head = self.hidden_size, self.head_dim
        rows = {"q": self.query_rows, "k": self.kv_size, "v": self.kv_size}
        inputs = [
            projection(
                name,
                "self_attn.qkv_proj" if self.stacked_qkv else f"self_attn.{name}_proj",
                "attn_qkv" if self.stacked_qkv else f"attn_{name}",
                (size, hidden),
                self.qkv_bias,
            )
            for name, size in rows.items()
        ]
        if self.stacked_qkv:
            inputs = [stacked(*weights) for weights in zip(*inputs, strict=True)]
        norms = [
            norm_weights(
                f"{name}_norm",
                f"self_attn.{name}_norm",
                f"attn_{name}_norm",
                {"q": self.query_size, "k": self.kv_size}[name] if self.joint_qk_norm else head,
            )
            for name in ("q", "k")
            if self.has_qk_norm
        ]
        head_rows = HeadRows(
            head,
            self.rotary_dim or head,
            self.rope_interleaved_in,
            interleaves_all=self.interleaves_all,
        )
        sinks = WeightSpec(
            name="sinks",
            shape=(self.num_heads,),
            hugging_face="self_attn.sinks",
            gguf="attn_sinks.weight",
        )
        query_rows = replace(head_rows, gated=self.output_gate)
        orders = {"q.weight": query_rows, "q.bias": query_rows}
        return (
            *(
                replace(weight, head_rows=orders.get(weight.name, head_rows))
                if weight.name[0] in "qk"
                else weight
                for weights in (*inputs, *norms)
                for weight in weights
            ),
            *((sinks,) if self.sinks else ()),
            *projection(
                "o", "self_attn.o_proj", "attn_output", (hidden, self.query_size), self.output_bias
            ),
        )

    @property
    def has_qk_norm(self) -> bool:
        return self.qk_norm or self.joint_qk_norm

    @property
    def max_ranks(self) -> int:
        """With a joint norm, whose sum is one over ranks, no rank shares a KV head."""
        return self.num_kv_heads if self.joint_qk_norm else self.num_heads

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
        shards = {
            "o.weight": Shard(columns=query),
            "sinks": Shard(rows=slice(heads.start, heads.stop)),
        }
        query_rows = query
        if self.output_gate:
            query_rows = slice(2 * query.start, 2 * query.stop)
        for name, rows in (("q", query_rows), ("k", kv), ("v", kv)):
            shards |= dict.fromkeys((f"{name}.weight", f"{name}.bias"), Shard(rows=rows))
        if self.joint_qk_norm:
            shards |= {"q_norm.weight": Shard(rows=query), "k_norm.weight": Shard(rows=kv)}
        return replace(self, num_heads=len(heads), num_kv_heads=len(kv_heads)), shards

    def read(self, reader: PartReader) -> Callable[[], "Attention"]:
        """Read query, key and value projections as one product."""
        qkv, output = reader.linear("q", "k", "v"), reader.output_linear("o")
        norms = [reader.norm(name) for name in ("q_norm", "k_norm") if self.has_qk_norm]
        sinks = reader.tensor("sinks", torch.float32) if self.sinks else None
        return lambda: Attention(
            spec=self,
            layer=reader.cache_layer,
            qkv=qkv(),
            head_norms=tuple(build() for build in norms),
            rotary=reader.rotary(self.rope, self.head_dim, self.rotary_dim),
            output=output(),
            sinks=sinks,
            gate=reader.device.gate("sigmoid") if self.output_gate else None,
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
                    f"{self.num_kv_heads} KV heads cannot be divided among the workers"
                )
            first = kv * queries
            heads += [
                (range(kv, kv + 1), range(first + part.start, first + part.stop))
                for part in divide_evenly(queries, len(ranks))
            ]
        return heads


class Attention:
    """Attention of one layer with its weights.

    layer: its number among the layers with attention.
    qkv: hidden to query ‖ key ‖ value heads. head_norms: norms of queries and keys, or empty.
    sinks: float32 [num_heads], or None. gate: of the output, or None.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        layer: int,
        qkv: Linear,
        head_norms: tuple[Norm, ...],
        rotary: RotaryEmbedding,
        output: ResidualLinear,
        sinks: torch.Tensor | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.spec = spec
        self.qkv = qkv
        self.head_norms = head_norms
        self.rotary = rotary
        self.output = output
        self.sinks = sinks
        self.layer = layer
        self._gate = gate
        self._parts = (spec.query_rows // spec.head_dim, spec.num_kv_heads, spec.num_kv_heads)
        self._heads = (sum(self._parts), spec.head_dim)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        # heads  [ q0 q1 … | k0 … | v0 … ]      with gates  [ q0 g0 q1 g1 … | k0 … | v0 … ]
        heads = self.qkv(x).view(-1, *self._heads)
        query, key, value = heads.split_with_sizes(self._parts, 1)
        gates = None
        if self._gate is not None:
            query, gates = query[:, ::2].contiguous(), query[:, 1::2]
        if self.head_norms:
            query, key = self._normed(query, key)
        scales = context.query_scales(self.rotary)
        if scales is not None:
            query = query.mul_(scales[:, None, None])
        rotation = context.rotation(self.rotary)
        attended = context.attention.run(self.layer, query, key, value, rotation, self.sinks)
        if self._gate is not None and gates is not None:
            rows = torch.cat((gates, attended), dim=2).flatten(0, 1)
            attended = self._gate(rows).view(attended.shape)
        return self.output.add_to(residual, attended.flatten(1))

    def _normed(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query_norm, key_norm = self.head_norms
        if not self.spec.joint_qk_norm:
            return query_norm(query), key_norm(key)
        num_rows, spec = len(query), self.spec
        rows = [query.view(num_rows, 1, spec.query_size), key.view(num_rows, 1, spec.kv_size)]
        group = self.output.output.group
        if group.size == 1:
            normed = [norm(row) for norm, row in zip(self.head_norms, rows, strict=True)]
        else:
            # of each row   | sum of squares of queries, how many, the same of keys |
            own = torch.empty(num_rows, 2, 2, device=query.device)
            for index, row in enumerate(rows):
                own[:, index, 0] = row.float().square().sum((1, 2))
                own[:, index, 1] = row.shape[2]
            sums, counts = sum_in_float32(group.gather(own)).unbind(2)
            means = (sums / counts)[:, :, None, None].unbind(1)
            normed = [
                norm.with_mean_square(row, mean)
                for norm, row, mean in zip(self.head_norms, rows, means, strict=True)
            ]
        return normed[0].view(query.shape), normed[1].view(key.shape)
