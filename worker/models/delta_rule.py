"""A gated delta-rule layer as the mixer of a layer: its spec, weights and sharding.

Instead of K and V of all tokens it keeps a state of a fixed size (worker/layers/delta_rule.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from worker.layers.delta_rule import DeltaRuleShape, DeltaRuleWeights
from worker.models.parts import PartReader, Shard, WeightSpec, divide_evenly, projection, stacked
from worker.models.recurrence import RecurrentMixer, RecurrentSpec


@dataclass(frozen=True)
class GroupedRows:
    """Rows of several projections that a file has group by group; here they follow each other.

    sizes 2, 1      file [ q0 q0 k0 | q1 q1 k1 ]      here [ q0 q0 q1 q1 | k0 k1 ]
    """

    sizes: tuple[int, ...]

    def order(self, num_rows: int, file_format: str) -> npt.NDArray[np.int64]:
        """Return int64 [num_rows], row i is row order[i] in the file."""
        rows = np.arange(num_rows, dtype=np.int64).reshape(-1, sum(self.sizes))
        ends = list(accumulate(self.sizes))[:-1]
        return np.concatenate([part.reshape(-1) for part in np.split(rows, ends, axis=1)])


@dataclass(frozen=True)
class TiledHeads:
    """Rows or columns of value heads that are tiled here and in GGUF files.

    num_each: heads that read a key head. In files of Hugging Face they follow each other, also in
    an adapter of a model that is a GGUF file:

        3 key heads     file [ 0 0 | 1 1 | 2 2 ]     here [ 0 1 2 | 0 1 2 ]
    """

    num_key_heads: int
    num_each: int

    def order(self, num_rows: int, file_format: str) -> npt.NDArray[np.int64] | None:
        """Return int64 [num_rows], row i is row order[i] in the file; None for the same order."""
        if file_format == "gguf":
            return None
        rows = np.arange(num_rows, dtype=np.int64)
        return rows.reshape(self.num_key_heads, self.num_each, -1).swapaxes(0, 1).reshape(-1)


@dataclass(frozen=True, kw_only=True)
class DeltaRuleSpec(RecurrentSpec):
    """A gated delta-rule layer.

    eps: of the norm of each value head.
    grouped_inputs: files have the rows of q, k, v and z in one tensor, key head by key head.
    grouped_gates: files have those of b and a in one tensor, key head by key head.
    of_llama_cpp: weights are as llama.cpp's converter leaves them: the taps of a channel are a row,
        and the decay is that of the layer itself instead of its logarithm.
    """

    shape: DeltaRuleShape
    eps: float
    grouped_inputs: bool = False
    grouped_gates: bool = False
    of_llama_cpp: bool = False

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        shape, hidden = self.shape, self.hidden_size
        rows = {"q": shape.keys, "k": shape.keys, "v": shape.values}
        taps = [
            WeightSpec(
                name=f"taps_{name}",
                shape=(size, shape.num_taps) if self.of_llama_cpp else (size, 1, shape.num_taps),
                hugging_face="linear_attn.conv1d.weight",
                gguf="ssm_conv1d.weight",
            )
            for name, size in rows.items()
        ]
        heads = shape.num_value_heads
        (out,) = projection("out", "linear_attn.out_proj", "ssm_out", (hidden, shape.values))
        by_head = {"decay": ("A_log", "ssm_a"), "time_bias": ("dt_bias", "ssm_dt.bias")}
        return (
            *self._inputs(),
            *stacked(*taps),
            *(
                WeightSpec(
                    name=name,
                    shape=(heads,),
                    hugging_face=f"linear_attn.{theirs}",
                    gguf=gguf,
                )
                for name, (theirs, gguf) in by_head.items()
            ),
            WeightSpec(
                name="head_norm.weight",
                shape=(shape.value_size,),
                hugging_face="linear_attn.norm.weight",
                gguf="ssm_norm.weight",
            ),
            replace(out, head_columns=self._head_order),
        )

    @property
    def _head_order(self) -> TiledHeads | None:
        shape = self.shape
        num_each = shape.num_value_heads // shape.num_key_heads
        return TiledHeads(shape.num_key_heads, num_each) if shape.is_tiled else None

    def _inputs(self) -> tuple[WeightSpec, ...]:
        """Return the projections of the input, in the order of `inputs`."""
        shape, hidden, order = self.shape, self.hidden_size, self._head_order
        num_each = shape.num_value_heads // shape.num_key_heads
        if self.grouped_inputs:
            values = num_each * shape.value_size
            sizes = (shape.key_size, shape.key_size, values, values)
            inputs = self._grouped("qkvz", "ssm_in", sizes)
        else:
            rows = {"q": shape.keys, "k": shape.keys, "v": shape.values}
            qkv = [
                projection(f"in_{name}", "linear_attn.in_proj_qkv", "attn_qkv", (size, hidden))[0]
                for name, size in rows.items()
            ]
            qkv[2] = replace(qkv[2], head_rows=order)
            (z,) = projection("in_z", "linear_attn.in_proj_z", "attn_gate", (shape.values, hidden))
            inputs = (*stacked(*qkv), replace(z, head_rows=order))
        if self.grouped_gates:
            return (*inputs, *self._grouped("ba", "ssm_ba", (num_each, num_each)))
        heads = (shape.num_value_heads, hidden)
        gates = (
            *projection("in_b", "linear_attn.in_proj_b", "ssm_beta", heads),
            *projection("in_a", "linear_attn.in_proj_a", "ssm_alpha", heads),
        )
        return (*inputs, *(replace(gate, head_rows=order) for gate in gates))

    def _grouped(self, name: str, gguf: str, sizes: tuple[int, ...]) -> tuple[WeightSpec, ...]:
        """Return a projection whose rows files have key head by key head."""
        shape = (self.shape.num_key_heads * sum(sizes), self.hidden_size)
        weights = projection(f"in_{name}", f"linear_attn.in_proj_{name}", gguf, shape)
        return tuple(replace(weight, head_rows=GroupedRows(sizes)) for weight in weights)

    @property
    def inputs(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The projections of the input, as they lie in two products: q ‖ k ‖ v ‖ z and b ‖ a.

        Files often have the second ones in more bits, and a product has weights of one kind.
        """
        return (
            ("in_qkvz",) if self.grouped_inputs else ("in_q", "in_k", "in_v", "in_z"),
            ("in_ba",) if self.grouped_gates else ("in_b", "in_a"),
        )

    @property
    def max_ranks(self) -> int:
        return self.shape.num_key_heads

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple["DeltaRuleSpec", dict[str, Shard]]:
        """Give a rank its key heads, in order and as evenly as possible, and their value heads.

        12 value heads read 4 key heads     0 1 2 3 | 4 5 6 7 | 8 9 10 11
        of the first two key heads          0 1 2 3   4 5
        the same if they are tiled          0 1       4 5       8 9
        """
        shape = self.shape
        own = divide_evenly(shape.num_key_heads, size)[rank]
        num_each = shape.num_value_heads // shape.num_key_heads
        num_parts = num_each if shape.is_tiled else 1

        def rows(of_each: int, num_parts: int = 1) -> Shard:
            """Return the shard of a weight with this number of rows of each own key head."""
            in_part = of_each // num_parts
            return Shard(slice(own.start * in_part, own.stop * in_part), num_parts=num_parts)

        keys, heads = rows(shape.key_size), rows(num_each, num_parts)
        values = rows(num_each * shape.value_size, num_parts)
        shards = {
            **dict.fromkeys(("taps_q", "taps_k", "in_q.weight", "in_k.weight"), keys),
            **dict.fromkeys(("taps_v", "in_v.weight", "in_z.weight"), values),
            **dict.fromkeys(("decay", "time_bias", "in_b.weight", "in_a.weight"), heads),
            "in_qkvz.weight": rows(2 * shape.key_size + 2 * num_each * shape.value_size),
            "in_ba.weight": rows(2 * num_each),
            "out.weight": Shard(columns=values.rows, num_parts=num_parts),
        }
        own_shape = replace(shape, num_key_heads=len(own), num_value_heads=len(own) * num_each)
        names = {weight.name for weight in self.weights}
        return replace(self, shape=own_shape), {
            name: shard for name, shard in shards.items() if name in names
        }

    def read(self, reader: PartReader) -> Callable[[], RecurrentMixer]:
        """Read the projections of the input as two products."""

        def float32(name: str) -> torch.Tensor:
            return reader.tensor(name, torch.float32)

        inputs, gates = (reader.linear(*names) for names in self.inputs)
        output = reader.output_linear("out")
        taps = [float32(f"taps_{name}") for name in "qkv"]
        decay, bias, norm = map(float32, ("decay", "time_bias", "head_norm.weight"))

        def build() -> RecurrentMixer:
            weights = DeltaRuleWeights(
                torch.cat(taps).flatten(1).t().contiguous(),
                decay if self.of_llama_cpp else -decay.exp(),
                bias,
                norm,
                self.eps,
            )
            return RecurrentMixer(
                spec=self,
                layer=reader.state_layer,
                inputs=(inputs(), gates()),
                recurrence=reader.device.recurrence(self.shape, weights),
                output=output(),
            )

        return build
