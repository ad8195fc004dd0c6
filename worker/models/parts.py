"""The seam between a model and the parts of its layers: attention, MLP and later kinds.

A part is described by a PartSpec, which knows its weights, how ranks divide them and how they
become a LayerPart that runs. The loader, the sharding over ranks and the layer stacks ask the
parts and list no weight of a layer by name. attention.py and gated_mlp.py are examples to copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, Self

import torch

from worker.attention.base import AttentionBackend
from worker.layers.rotary import RotaryEmbedding, Rotation
from worker.layers.scratch import RowBuffer, Scratch

if TYPE_CHECKING:
    from worker.loader.weights import LayerReader


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """One weight tensor: shape, name in this program and names in model files.

    name: "q.weight"; names of a layer's weights are relative to the layer.
    gguf_interleaved_head_dim: size of the heads whose rows a GGUF file interleaves, so that rows
        2i and 2i + 1 rotate together; the loader restores the order. 0: nothing is interleaved.
    """

    name: str
    shape: tuple[int, ...]
    hugging_face: str
    gguf: str
    gguf_interleaved_head_dim: int = 0

    def in_layer(self, layer: int) -> "WeightSpec":
        """Return the same weight with full names, as a weight of this layer of the model."""
        return replace(
            self,
            name=f"layers.{layer}.{self.name}",
            hugging_face=f"model.layers.{layer}.{self.hugging_face}",
            gguf=f"blk.{layer}.{self.gguf}",
        )

    def name_in(self, file_format: str) -> str:
        """Return the tensor's name in a "gguf" or "safetensors" file."""
        return self.gguf if file_format == "gguf" else self.hugging_face


def projection(
    name: str, hugging_face: str, gguf: str, shape: tuple[int, int], bias: bool = False
) -> tuple[WeightSpec, ...]:
    """Return the weight [out, in] of a linear layer, followed by its bias [out] if it has one."""
    kinds = {"weight": shape, "bias": shape[:1]} if bias else {"weight": shape}
    return tuple(
        WeightSpec(
            name=f"{name}.{kind}",
            shape=size,
            hugging_face=f"{hugging_face}.{kind}",
            gguf=f"{gguf}.{kind}",
        )
        for kind, size in kinds.items()
    )


def norm_weight(name: str, hugging_face: str, gguf: str, size: int) -> WeightSpec:
    """Return the weight [size] of a norm."""
    return WeightSpec(
        name=f"{name}.weight",
        shape=(size,),
        hugging_face=f"{hugging_face}.weight",
        gguf=f"{gguf}.weight",
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows and columns of a weight that one rank holds; a full slice keeps that dimension whole."""

    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this shard of a weight of shape `whole`."""
        divided = tuple(
            len(range(*cut.indices(size)))
            for cut, size in zip((self.rows, self.columns), whole, strict=False)
        )
        return (*divided, *whole[2:])


def divide_evenly(count: int, size: int) -> list[range]:
    """Return range(count) as `size` ranges in order; the first ones may be longer by one."""
    least, more = divmod(count, size)
    ends = [least * rank + min(rank, more) for rank in range(size + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


class ForwardContext:
    """What all layers of one forward pass share: positions, attention backend, scratch memory."""

    def __init__(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        buffers: dict[int, RowBuffer],
    ) -> None:
        self.attention = attention
        self._hidden = hidden
        self._positions = positions
        self._buffers = buffers
        self._rotations: dict[RotaryEmbedding, Rotation] = {}
        self._scratch: dict[int, Scratch] = {}

    def rotation(self, rotary: RotaryEmbedding) -> Rotation:
        """Return cosines and sines of the step's positions; computed once per pass."""
        rotation = self._rotations.get(rotary)
        if rotation is None:
            rotation = self._rotations[rotary] = rotary.at(self._positions)
        return rotation

    def scratch(self, size: int) -> Scratch:
        """Return memory [T, size] of the hidden states' dtype; the next part may overwrite it."""
        space = self._scratch.get(size)
        if space is None:
            buffer = self._buffers.get(size)
            if buffer is None:
                buffer = self._buffers[size] = RowBuffer(size)
            space = self._scratch[size] = buffer.rows(self._hidden)
        return space


class LayerPart(Protocol):
    """One half of a layer, with its weights: attention or MLP."""

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Return residual plus the part's output for x, both [T, hidden].

        x is normed already. The residual's memory may be reused for the result.
        """
        ...


class PartSpec(Protocol):
    """Description of one half of a layer: sizes, weights, sharding, construction."""

    @property
    def weights(self) -> Sequence[WeightSpec]:
        """The part's weights, with names relative to the layer."""
        ...

    @property
    def max_ranks(self) -> int:
        """The most ranks that can share the part."""
        ...

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple[Self, Mapping[str, Shard]]:
        """Return the part as rank `rank` of `size` computes it, and its shard of each weight.

        Weights without an entry are held whole by every rank. block_columns: columns of a
        quantisation block of each weight in the file, 1 if it is not quantised in blocks; a cut
        within a block would force the weight to be stored dense. Raises ConfigError if the part
        cannot be shared by `size` ranks.
        """
        ...

    def read(self, reader: "LayerReader") -> Callable[[], LayerPart]:
        """Read the weights from the files and return a function that builds the part from them.

        Runs in a reader thread; the returned function runs in the thread that computes.
        """
        ...
