"""A gated short convolution as the mixer of a layer (worker/layers/short_conv.py)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from worker.layers.short_conv import ShortConvShape, ShortConvWeights
from worker.models.parts import PartReader, Shard, WeightSpec, divide_evenly, projection, stacked
from worker.models.recurrence import RecurrentMixer, RecurrentSpec

_INPUTS: Final = ("in_b", "in_c", "in_x")
"""The projections of the input, as they lie in one product."""


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """A gated short convolution. bias: projections and the convolution have one.

    of_llama_cpp: the taps of a channel are a row, as in GGUF files.
    """

    shape: ShortConvShape
    bias: bool = False
    of_llama_cpp: bool = False

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        channels, taps, hidden = self.shape.channels, self.shape.num_taps, self.hidden_size
        inputs = [
            projection(name, "conv.in_proj", "shortconv.in_proj", (channels, hidden), self.bias)
            for name in _INPUTS
        ]
        shapes: dict[str, tuple[int, ...]] = {
            "weight": (channels, taps) if self.of_llama_cpp else (channels, 1, taps)
        }
        if self.bias:
            shapes["bias"] = (channels,)
        return (
            *(weight for kinds in zip(*inputs, strict=True) for weight in stacked(*kinds)),
            *(
                WeightSpec(
                    name=f"conv.{kind}",
                    shape=shape,
                    hugging_face=f"conv.conv.{kind}",
                    gguf=f"shortconv.conv.{kind}",
                )
                for kind, shape in shapes.items()
            ),
            *projection(
                "out", "conv.out_proj", "shortconv.out_proj", (hidden, channels), self.bias
            ),
        )

    @property
    def max_ranks(self) -> int:
        return self.shape.channels

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple["ShortConvSpec", dict[str, Shard]]:
        """Give a rank its channels, in order and as evenly as possible."""
        own = divide_evenly(self.shape.channels, size)[rank]
        channels = slice(own.start, own.stop)
        kinds = ("weight", "bias") if self.bias else ("weight",)
        names = [f"{name}.{kind}" for name in (*_INPUTS, "conv") for kind in kinds]
        shards = dict.fromkeys(names, Shard(rows=channels))
        shards["out.weight"] = Shard(columns=channels)
        return replace(self, shape=replace(self.shape, channels=len(own))), shards

    def read(self, reader: PartReader) -> Callable[[], RecurrentMixer]:
        """Read the projections of the input as one product."""
        inputs, output = reader.linear(*_INPUTS), reader.output_linear("out")
        taps = reader.tensor("conv.weight", torch.float32)
        bias = reader.tensor("conv.bias", torch.float32) if self.bias else None

        def build() -> RecurrentMixer:
            weights = ShortConvWeights(
                taps.flatten(1).t().contiguous(),
                taps.new_zeros(self.shape.channels) if bias is None else bias,
            )
            return RecurrentMixer(
                spec=self,
                layer=reader.state_layer,
                inputs=(inputs(),),
                recurrence=reader.device.recurrence(self.shape, weights),
                output=output(),
            )

        return build
