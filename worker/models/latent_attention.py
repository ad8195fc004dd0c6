"""Multi-head latent attention as the mixer of a layer (DeepSeek-V2, section 2.1).

Of each token the cache has one latent and one rotated part, which all heads share. Keys and values
of a head are products of the latent with its weights k_b and v_b, and are never computed: k_b
multiplies the query instead, and v_b the sum of latents ("absorbed", section 2.1.3):

    query of head h    [ k_b(h) · q(h) | rotated q(h) ]        output of head h   v_b(h) · sum
    key of a token     [    latent     | rotated k    ]        its value          latent

So decodes and chunks of prompts are one attention with one KV head, and add up in one order.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from worker.attention.backend import AttentionShape
from worker.layers.linear import HeadLinears, Linear, ResidualLinear
from worker.layers.norm import Norm
from worker.models.parts import (
    ForwardContext,
    HeadRows,
    PartReader,
    PartSpec,
    Shard,
    StackPart,
    WeightSpec,
    divide_evenly,
    norm_weights,
    projection,
)
from worker.models.rope import RotatingRope, YarnRope
from worker.models.rotary import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(PartSpec):
    """Latent attention of one layer; sizes by their names in configurations.

    q_lora_rank: numbers of a compressed query; None if queries are not compressed.
    qk_nope_head_dim, qk_rope_head_dim: of a query and key head, those that do not rotate and those
        that do.
    is_interleaved: files have the two rows that rotate together side by side.
    bias: of the products of the input, and of the output.
    own: heads of this rank, all if None.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RotatingRope
    is_interleaved: bool = True
    bias: bool = False
    own: range | None = None

    window = None

    @property
    def own_heads(self) -> range:
        return range(self.num_heads) if self.own is None else self.own

    @property
    def head_dim(self) -> int:
        """Numbers of a key in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def query_dim(self) -> int:
        """Rows of a head in the query projection."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        magnitude = self.rope.magnitude if isinstance(self.rope, YarnRope) else 1.0
        return magnitude * magnitude / math.sqrt(self.query_dim)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            num_heads=len(self.own_heads),
            num_kv_heads=1,
            head_dim=self.head_dim,
            scale=self.scale,
            latent_dim=self.kv_lora_rank,
        )

    @cached_property
    def weights(self) -> tuple[WeightSpec, ...]:
        num_heads, rank, hidden = len(self.own_heads), self.kv_lora_rank, self.hidden_size
        queries = num_heads * self.query_dim
        if self.q_lora_rank is None:
            query = projection("q", "self_attn.q_proj", "attn_q", (queries, hidden))
            into_latent: tuple[WeightSpec, ...] = ()
        else:
            latent = self.q_lora_rank
            query = projection("q", "self_attn.q_b_proj", "attn_q_b", (queries, latent))
            into_latent = (
                *projection("q_a", "self_attn.q_a_proj", "attn_q_a", (latent, hidden), self.bias),
                *norm_weights("q_a_norm", "self_attn.q_a_layernorm", "attn_q_a_norm", latent),
            )
        kv_a = projection(
            "kv_a",
            "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_mqa",
            (self.head_dim, hidden),
            self.bias,
        )
        values = num_heads * self.v_head_dim
        return (
            *into_latent,
            *self._in_order(query, self.query_dim),
            *self._in_order(kv_a, self.head_dim),
            *norm_weights("kv_a_norm", "self_attn.kv_a_layernorm", "attn_kv_a_norm", rank),
            *(weight for head in self.own_heads for weight in self._head_weights(head)),
            *projection("o", "self_attn.o_proj", "attn_output", (hidden, values), self.bias),
        )

    @property
    def max_ranks(self) -> int:
        return self.num_heads

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple["LatentAttentionSpec", dict[str, Shard]]:
        """Deal out the heads in order; every rank has the latent of each token."""
        heads = divide_evenly(self.num_heads, size)[rank]
        queries, values = (
            slice(heads.start * width, heads.stop * width)
            for width in (self.query_dim, self.v_head_dim)
        )
        shards = {"q.weight": Shard(rows=queries), "o.weight": Shard(columns=values)}
        return replace(self, own=heads), shards

    def read(self, reader: PartReader) -> Callable[[], "LatentAttention"]:
        """Read what multiplies the input as one product."""
        if self.q_lora_rank is None:
            inputs, query, query_norm = reader.linear("q", "kv_a"), None, None
        else:
            inputs, query = reader.linear("q_a", "kv_a"), reader.linear("q")
            query_norm = reader.norm("q_a_norm")
        key_norm, output = reader.norm("kv_a_norm"), reader.output_linear("o")
        keys, values = (
            [reader.head_linear(f"{name}.{head}") for head in self.own_heads]
            for name in ("k_b", "v_b")
        )
        return lambda: LatentAttention(
            spec=self,
            layer=reader.cache_layer,
            inputs=inputs(),
            query_norm=query_norm and query_norm(),
            query=query and query(),
            key_norm=key_norm(),
            rotary=reader.rotary(self.rope, self.rotary_dim, self.rotary_dim),
            keys=reader.device.head_linears([build() for build in keys]),
            values=reader.device.head_linears([build() for build in values]),
            output=output(),
        )

    def _in_order(self, weights: tuple[WeightSpec, ...], head_dim: int) -> list[WeightSpec]:
        """Return weights whose heads rotate in their last rows."""
        rope_interleaved_in = ("gguf", "safetensors") if self.is_interleaved else ()
        head_rows = HeadRows(head_dim, self.rotary_dim, rope_interleaved_in, rotates_last=True)
        return [replace(weight, head_rows=head_rows) for weight in weights]

    def _head_weights(self, head: int) -> tuple[WeightSpec, ...]:
        """Return k_b [rank, nope] and v_b [v, rank] of a head.

        kv_b_proj  | k_b of 0, transposed | v_b of 0 | k_b of 1, transposed | v_b of 1 | …
        """
        rank, nope = self.kv_lora_rank, self.qk_nope_head_dim
        rows_each = nope + self.v_head_dim
        all_rows, first = self.num_heads * rows_each, head * rows_each

        def weight(name: str, shape: tuple[int, int]) -> WeightSpec:
            hugging_face, gguf = (
                StackPart(
                    tensor=tensor, shape=(rank, all_rows), first_column=first, transposed=True
                )
                if name == "k_b"
                else StackPart(tensor=tensor, shape=(all_rows, rank), first_row=first + nope)
                for tensor in ("self_attn.kv_b_proj.weight", "attn_kv_b.weight")
            )
            tensor = f"attn_{name}.weight"
            return WeightSpec(
                name=f"{name}.{head}.weight",
                shape=shape,
                hugging_face=hugging_face.tensor,
                gguf=tensor,
                hugging_face_stack=hugging_face,
                gguf_stack=StackPart(tensor=tensor, shape=(self.num_heads, *shape), index=head),
                older_gguf_stack=gguf,
            )

        return weight("k_b", (rank, nope)), weight("v_b", (self.v_head_dim, rank))


class LatentAttention:
    """Latent attention of one layer with its weights.

    inputs: hidden to queries ‖ latent ‖ part that rotates. With q_lora_rank the first
    part is the compressed query, of which query_norm and query make queries.
    """

    def __init__(
        self,
        spec: LatentAttentionSpec,
        layer: int,
        inputs: Linear,
        query_norm: Norm | None,
        query: Linear | None,
        key_norm: Norm,
        rotary: RotaryEmbedding,
        keys: HeadLinears,
        values: HeadLinears,
        output: ResidualLinear,
    ) -> None:
        self.spec = spec
        self.inputs = inputs
        self.query_norm = query_norm
        self.query = query
        self.key_norm = key_norm
        self.rotary = rotary
        self.keys = keys
        self.values = values
        self.output = output
        self.layer = layer

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        spec, num_heads = self.spec, len(self.spec.own_heads)
        rank, nope, rotated = spec.kv_lora_rank, spec.qk_nope_head_dim, spec.qk_rope_head_dim
        inputs = self.inputs(x)
        sizes = (inputs.shape[1] - rank - rotated, rank, rotated)
        queries, latent, rotating = inputs.split_with_sizes(sizes, 1)
        if self.query is not None and self.query_norm is not None:
            queries = self.query(self.query_norm(queries))
        heads = queries.view(-1, num_heads, spec.query_dim)
        query = x.new_empty((len(x), num_heads, spec.head_dim))
        self.keys.into(heads[..., :nope], query[..., :rank])
        query[..., rank:] = heads[..., nope:]
        key = torch.cat((self.key_norm(latent), rotating), dim=1).unsqueeze(1)
        rotation = context.rotation(self.rotary)
        attended = context.attention.run(self.layer, query, key, None, rotation)
        values = x.new_empty((len(x), num_heads, spec.v_head_dim))
        self.values.into(attended, values)
        return self.output.add_to(residual, values.flatten(1))
