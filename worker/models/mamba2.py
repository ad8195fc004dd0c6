"""A Mamba-2 layer (worker/layers/mamba2.py) as the mixer of a layer: its spec and sharding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from worker.layers.linear import PartOutput, sum_in_float32
from worker.layers.mamba2 import Mamba2Shape, Mamba2Weights
from worker.models.parts import PartReader, Shard, WeightSpec, divide_evenly, projection, stacked
from worker.models.recurrence import RecurrentMixer, RecurrentSpec

_INPUTS: Final = ("in_z", "in_x", "in_b", "in_c", "in_dt")
"""The projections of the input, as they lie in one product."""
_CONVOLVED: Final = ("x", "b", "c")


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(RecurrentSpec):
    """A Mamba-2 layer.

    eps: of the norm.
    bias, output_bias: the projections of the input, and that of the output, have one. conv_bias: so
    has the convolution.
    module: name of the layer in Hugging Face folders.
    factors: of the projections z, x, B, C and dt.
    of_llama_cpp: weights are as llama.cpp's converter leaves them: the decay is that of the layer
        itself instead of its logarithm, and shapes are those of its tensors.
    total_inner: of a rank with a part of the only group, whose norm needs all of it: channels of
        all heads; 0 for others.
    """

    shape: Mamba2Shape
    eps: float
    bias: bool = False
    output_bias: bool = False
    conv_bias: bool = True
    module: str = "mamba"
    factors: tuple[float, float, float, float, float] = (1.0,) * 5
    of_llama_cpp: bool = False
    total_inner: int = 0

    @property
    def has_norm(self) -> bool:
        return self.total_inner > 0 or self.shape.gate_norm != "none"

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        shape, hidden, module = self.shape, self.hidden_size, self.module
        states, heads = shape.group_states, shape.num_heads
        rows = dict(zip(_INPUTS, (shape.inner, shape.inner, states, states, heads), strict=True))
        inputs = [
            projection(name, f"{module}.in_proj", "ssm_in", (size, hidden), self.bias)
            for name, size in rows.items()
        ]
        taps = [
            WeightSpec(
                name=f"taps_{name}",
                shape=(size, shape.num_taps) if self.of_llama_cpp else (size, 1, shape.num_taps),
                hugging_face=f"{module}.conv1d.weight",
                gguf="ssm_conv1d.weight",
            )
            for name, size in self._convolved()
        ]
        biases = [
            WeightSpec(
                name=f"conv_bias_{name}",
                shape=(size,),
                hugging_face=f"{module}.conv1d.bias",
                gguf="ssm_conv1d.bias",
            )
            for name, size in self._convolved()
        ]
        by_head = {
            "decay": ("A_log", "ssm_a"),
            "time_bias": ("dt_bias", "ssm_dt.bias"),
            "skip": ("D", "ssm_d"),
        }
        norm = (shape.num_groups, shape.inner // shape.num_groups)
        norm_weight = WeightSpec(
            name="head_norm.weight",
            shape=norm if self.of_llama_cpp else (shape.inner,),
            hugging_face=f"{module}.norm.weight",
            gguf="ssm_norm.weight",
        )
        return (
            *(weight for kinds in zip(*inputs, strict=True) for weight in stacked(*kinds)),
            *stacked(*taps),
            *(stacked(*biases) if self.conv_bias else ()),
            *(
                WeightSpec(
                    name=name,
                    shape=(heads, 1) if self.of_llama_cpp and name != "time_bias" else (heads,),
                    hugging_face=f"{module}.{theirs}",
                    gguf=gguf,
                )
                for name, (theirs, gguf) in by_head.items()
            ),
            *((norm_weight,) if self.has_norm else ()),
            *projection(
                "out", f"{module}.out_proj", "ssm_out", (hidden, shape.inner), self.output_bias
            ),
        )

    def _convolved(self) -> tuple[tuple[str, int], ...]:
        """Return the parts of the convolution's channels, and how many each has."""
        states = self.shape.group_states
        return tuple(zip(_CONVOLVED, (self.shape.inner, states, states), strict=True))

    @property
    def max_ranks(self) -> int:
        """Ranks share groups; the heads of an only group, unless its norm comes before the gate."""
        shape = self.shape
        shares_heads = shape.num_groups == 1 and shape.gate_norm != "gated norm"
        return shape.num_heads if shares_heads else shape.num_groups

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple["Mamba2Spec", dict[str, Shard]]:
        """Give a rank its groups with their heads, or its heads of the only group.

        Every rank has B and C of the only group.
        """
        shape = self.shape
        of_groups = shape.num_groups > 1
        own = divide_evenly(shape.num_groups if of_groups else shape.num_heads, size)[rank]
        num_each = shape.num_heads // shape.num_groups if of_groups else 1
        heads = slice(own.start * num_each, own.stop * num_each)
        inner = slice(heads.start * shape.head_size, heads.stop * shape.head_size)
        of_heads, of_inner = Shard(rows=heads), Shard(rows=inner)
        shards = {
            **dict.fromkeys(("decay", "time_bias", "skip"), of_heads),
            **dict.fromkeys(("in_dt.weight", "in_dt.bias"), of_heads),
            **dict.fromkeys(("in_z.weight", "in_x.weight", "in_z.bias", "in_x.bias"), of_inner),
            **dict.fromkeys(("taps_x", "conv_bias_x"), of_inner),
            "out.weight": Shard(columns=inner),
        }
        if not self.of_llama_cpp:
            shards["head_norm.weight"] = of_inner
        elif of_groups:
            shards["head_norm.weight"] = Shard(rows=slice(own.start, own.stop))
        else:
            shards["head_norm.weight"] = Shard(columns=inner)
        if of_groups:
            states = Shard(rows=slice(own.start * shape.state_size, own.stop * shape.state_size))
            for name in ("b", "c"):
                of_states = (f"in_{name}.weight", f"in_{name}.bias", f"taps_{name}")
                shards |= dict.fromkeys((*of_states, f"conv_bias_{name}"), states)
        own_shape = replace(
            shape,
            num_heads=heads.stop - heads.start,
            num_groups=len(own) if of_groups else 1,
        )
        total_inner = 0
        if size > 1 and not of_groups and shape.gate_norm != "none":
            own_shape = replace(own_shape, gate_norm="none", has_wide_output=True)
            total_inner = shape.inner
        names = {weight.name for weight in self.weights}
        return replace(self, shape=own_shape, total_inner=total_inner), {
            name: shard for name, shard in shards.items() if name in names
        }

    def read(self, reader: PartReader) -> Callable[[], RecurrentMixer]:
        """Read the projections of the input as one product."""

        def float32(name: str) -> torch.Tensor:
            return reader.tensor(name, torch.float32)

        inputs, output = reader.linear(*_INPUTS), reader.output_linear("out")
        taps = [float32(f"taps_{name}") for name in _CONVOLVED]
        biases = [float32(f"conv_bias_{name}") for name in _CONVOLVED if self.conv_bias]
        decay, time_bias, skip = map(float32, ("decay", "time_bias", "skip"))
        norm = float32("head_norm.weight") if self.has_norm else None
        gate_factor, *factors, time_factor = self.factors

        def build() -> RecurrentMixer:
            scaled = [tap * factor for tap, factor in zip(taps, factors, strict=True)]
            flat_norm = None if norm is None else norm.flatten()
            weights = Mamba2Weights(
                taps=torch.cat(scaled).flatten(1).t().contiguous(),
                conv_bias=torch.cat(biases) if biases else decay.new_zeros(self.shape.channels),
                decay=decay.flatten() if self.of_llama_cpp else -decay.exp(),
                time_bias=time_bias,
                skip=skip.flatten(),
                norm=None if self.total_inner else flat_norm,
                norm_eps=self.eps,
                gate_factor=gate_factor,
                time_factor=time_factor,
            )
            built = output()
            finish = None
            if self.total_inner:
                assert flat_norm is not None
                finish = SharedNorm(flat_norm, self.eps, self.total_inner, built.output)
            return RecurrentMixer(
                spec=self,
                layer=reader.state_layer,
                inputs=(inputs(),),
                recurrence=reader.device.recurrence(self.shape, weights),
                output=built,
                finish=finish,
            )

        return build


class SharedNorm:
    """RMSNorm over columns of which each rank has a part.

    weight: float32, of the columns of this rank. num_columns: those of all ranks. output: of
    the same layer, which knows the other ranks.
    """

    def __init__(
        self, weight: torch.Tensor, eps: float, num_columns: int, output: PartOutput
    ) -> None:
        self._weight = weight
        self._eps = eps
        self._num_columns = num_columns
        self._group = output.group

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the norm of float32 rows [T, columns of this rank], in float32."""
        squares = sum_in_float32(self._group.gather(rows.square().sum(1, keepdim=True)))
        return rows * torch.rsqrt(squares / self._num_columns + self._eps) * self._weight
