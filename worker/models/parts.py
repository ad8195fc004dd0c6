"""The seam between a model and the parts of its layers: attention, MLP and later kinds.

A part is described by a PartSpec, which knows its weights, how ranks divide them and how they
become a LayerPart that runs. The loader, the sharding over ranks and the layer stacks ask the
parts and list no weight of a layer by name. attention.py and mlp.py are examples to copy.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from worker.attention.backend import AttentionBackend, Rotation
from worker.layers.activation import Activation
from worker.layers.experts import Experts
from worker.layers.linear import Linear, PartOutput, ResidualLinear
from worker.layers.norm import Norm
from worker.layers.scratch import ByteBuffer
from worker.models.rope import Rope
from worker.models.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from worker.models.layer_device import LayerDevice


class RowOrder(Protocol):
    """An order of the rows, or columns, of a weight that is not that of this program."""

    def order(self, num_rows: int, file_format: str) -> npt.NDArray[np.int64] | None:
        """Return int64 [num_rows], row i is row order[i] in the file; None for the same order."""


@dataclass(frozen=True)
class HeadRows:
    """The order in which a file has the rows of each query and key head.

    rotary_dim: the first rows, which rotate; the others stay as they are.
    rope_interleaved_in: kinds of files ("gguf", "safetensors") in which rows 2i and 2i + 1 rotate
        together. In others these are rows i and i + rotary_dim / 2.

    This program rotates row i together with row i + head_dim / 2, so the loader changes the order:

        head of 8, 4 rotate     file [ 0 1 2 3 | 4 5 6 7 ]     here [ 0 1 4 5 | 2 3 6 7 ]
        the same, interleaved                                  here [ 0 2 4 5 | 1 3 6 7 ]

    Query times key does not depend on an order that both have.

    interleaves_all: in those files the rows that do not rotate are interleaved, too, as if all did:

        head of 8, 4 rotate     file [ 0 4 1 5 | 2 6 3 7 ]     here [ 0 1 4 5 | 2 3 6 7 ]

    gated: each head has as many rows again behind its own, which do not rotate: those of its gate.

    rotates_last: the last `rotary_dim` rows rotate instead of the first, and row i of these
        together with row i + rotary_dim / 2: in latent attention.

        head of 8, 4 rotate     file [ 0 1 2 3 | 4 5 6 7 ]     here the same
        the same, interleaved                                  here [ 0 1 2 3 | 4 6 5 7 ]
    """

    head_dim: int
    rotary_dim: int
    rope_interleaved_in: tuple[str, ...] = ()
    rotates_last: bool = False
    gated: bool = False
    interleaves_all: bool = False

    def order(self, num_rows: int, file_format: str) -> npt.NDArray[np.int64] | None:
        """Return int64 [num_rows], row i is row order[i] in the file; None for the same order."""
        interleaved = file_format in self.rope_interleaved_in
        if not interleaved and (self.rotates_last or self.rotary_dim == self.head_dim):
            return None
        rotated = np.arange(self.rotary_dim, dtype=np.int64)
        only_these = interleaved and not self.interleaves_all
        pairs = rotated.reshape(-1, 2).T if only_these else rotated.reshape(2, -1)
        num_others = self.head_dim - self.rotary_dim
        if self.rotates_last:
            others = np.arange(num_others, dtype=np.int64)
            head = np.concatenate((others, num_others + pairs.reshape(-1)))
        else:
            others = np.arange(self.rotary_dim, self.head_dim, dtype=np.int64)
            head = np.concatenate((pairs, others.reshape(2, -1)), axis=1).reshape(-1)
        if interleaved and self.interleaves_all:
            head = np.arange(self.head_dim, dtype=np.int64).reshape(-1, 2).T.reshape(-1)[head]
        if self.gated:
            head = np.concatenate((head, np.arange(self.head_dim, 2 * self.head_dim)))
        firsts = np.arange(0, num_rows, len(head), dtype=np.int64)
        return (firsts[:, None] + head).reshape(-1)


@dataclass(frozen=True, kw_only=True)
class StackPart:
    """A weight as part of a tensor that has those of several projections, or of all experts.

    weight = tensor[first_row : first_row + rows], or tensor[index, …] of experts; shape: of the
    tensor.
    row_step: the weight has every row_step-th of these rows.
    transposed: files have the transpose of each of these matrices, except as a pair of MXFP4 blocks
        and scales. The weight then has the columns from first_column on.
    may_be_transposed: some files do; they are those of which the shape says so.
    """

    tensor: str
    shape: tuple[int, ...]
    index: int = 0
    first_row: int = 0
    row_step: int = 1
    transposed: bool = False
    may_be_transposed: bool = False
    first_column: int = 0

    def shape_in_file(self, transposed: bool) -> tuple[int, ...]:
        """Return the shape of the tensor in a file that has it like this or transposed."""
        if not transposed or len(self.shape) < 2:
            return self.shape
        *experts, rows, columns = self.shape
        return (*experts, columns, rows)


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """One weight tensor: shape, name in this program and names in model files.

    name: "q.weight"; names of a layer's weights are relative to the layer.
    hugging_face_stack, gguf_stack: where the weight is in files that stack it with others; it is
        read from there if the file has that tensor.
    older_gguf_stack: the same in files of another version of llama.cpp.
    head_rows: the order of the rows in the file; None for the order of this program.
    head_columns: that of the columns in an adapter's file; a model's file has them in order.
    """

    name: str
    shape: tuple[int, ...]
    hugging_face: str
    gguf: str
    hugging_face_stack: StackPart | None = None
    gguf_stack: StackPart | None = None
    older_gguf_stack: StackPart | None = None
    head_rows: RowOrder | None = None
    head_columns: RowOrder | None = None

    def in_layer(self, layer: int) -> "WeightSpec":
        """Return the same weight with full names, as a weight of this layer of the model."""
        hugging_face, gguf = f"model.layers.{layer}.", f"blk.{layer}."
        return replace(
            self,
            name=f"layers.{layer}.{self.name}",
            hugging_face=hugging_face + self.hugging_face,
            gguf=gguf + self.gguf,
            hugging_face_stack=_with_prefix(self.hugging_face_stack, hugging_face),
            gguf_stack=_with_prefix(self.gguf_stack, gguf),
            older_gguf_stack=_with_prefix(self.older_gguf_stack, gguf),
        )

    def renamed(
        self, names: Iterable[tuple[str, str]], gguf_names: Iterable[tuple[str, str]] = ()
    ) -> "WeightSpec":
        """Return the weight with parts of its names replaced.

        names: those of Hugging Face folders. gguf_names: those of GGUF files, but for stacks.
        """
        hugging_face, stack = self.hugging_face, self.hugging_face_stack
        for ours, theirs in names:
            hugging_face = hugging_face.replace(ours, theirs)
            if stack is not None:
                stack = replace(stack, tensor=stack.tensor.replace(ours, theirs))
        gguf = self.gguf
        for ours, theirs in gguf_names:
            gguf = gguf.replace(ours, theirs)
        return replace(self, hugging_face=hugging_face, hugging_face_stack=stack, gguf=gguf)

    def name_in(self, file_format: str) -> str:
        """Return the tensor's name in a "gguf" or "safetensors" file."""
        return self.gguf if file_format == "gguf" else self.hugging_face

    def stack_in(self, file_format: str, tensors: Container[str]) -> StackPart | None:
        """Return where the weight is in a file of this format that stacks it with others.

        tensors: names in the file.
        """
        if file_format != "gguf":
            return self.hugging_face_stack
        older = self.older_gguf_stack
        return older if older is not None and older.tensor in tensors else self.gguf_stack


def _with_prefix(stack: StackPart | None, prefix: str) -> StackPart | None:
    return None if stack is None else replace(stack, tensor=prefix + stack.tensor)


def projection(
    name: str, hugging_face: str, gguf: str, shape: tuple[int, ...], bias: bool = False
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


def stacked(*weights: WeightSpec) -> tuple[WeightSpec, ...]:
    """Return weights that files have in one tensor, in this order; its name is that of each."""
    shape = (sum(weight.shape[0] for weight in weights), *weights[0].shape[1:])
    placed = []
    first_row = 0
    for weight in weights:
        hugging_face, gguf = (
            StackPart(tensor=name, shape=shape, first_row=first_row)
            for name in (weight.hugging_face, weight.gguf)
        )
        placed.append(replace(weight, hugging_face_stack=hugging_face, gguf_stack=gguf))
        first_row += weight.shape[0]
    return tuple(placed)


def norm_weights(
    name: str, hugging_face: str, gguf: str, size: int, bias: bool = False
) -> tuple[WeightSpec, ...]:
    """Return the weight [size] of a norm, followed by its bias if it has one."""
    return projection(name, hugging_face, gguf, (size,), bias)


def product_flops(weights: Iterable[WeightSpec]) -> int:
    """Return the FLOPs of products of one token with all these weights."""
    return sum(2 * math.prod(weight.shape) for weight in weights if len(weight.shape) == 2)


def product_outputs(weights: Iterable[WeightSpec]) -> int:
    """Return how many numbers the products of one token with all these weights give."""
    return sum(weight.shape[0] for weight in weights if len(weight.shape) == 2)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows and columns of a weight that one rank holds; a full slice keeps that dimension whole.

    num_parts: a slice is taken of each of this number of equal parts:

        rows 1:3, 2 parts     weight [ 0 1 2 3 | 4 5 6 7 ]     shard [ 1 2 5 6 ]
    """

    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))
    num_parts: int = 1

    def row_slices(self, num_rows: int) -> list[slice]:
        """Return which of a weight's rows the rank holds, in order; one slice if it holds all."""
        return self._slices(self.rows, num_rows)

    def column_slices(self, num_columns: int) -> list[slice]:
        """Return the same of the columns."""
        return self._slices(self.columns, num_columns)

    def _slices(self, cut: slice, size: int) -> list[slice]:
        part_size = size // self.num_parts
        first, end, _ = cut.indices(part_size)
        if end - first == part_size:
            return [slice(0, size)]
        return [
            slice(part * part_size + first, part * part_size + end)
            for part in range(self.num_parts)
        ]

    def rows_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rank's rows of a weight, or of a vector with a number for each row.

        A view, unless they are of several parts; so are `columns_of`.
        """
        return _joined([weight[rows] for rows in self.row_slices(len(weight))], 0)

    def columns_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rank's columns of a weight."""
        return _joined([weight[:, columns] for columns in self.column_slices(weight.shape[1])], 1)

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this shard of a weight of shape `whole`."""
        divided = tuple(
            sum(each.stop - each.start for each in self._slices(cut, size))
            for cut, size in zip((self.rows, self.columns), whole, strict=False)
        )
        return (*divided, *whole[2:])


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def divide_evenly(count: int, size: int) -> list[range]:
    """Return range(count) as `size` ranges in order; the first ones may be longer by one."""
    least, more = divmod(count, size)
    ends = [least * rank + min(rank, more) for rank in range(size + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


class ForwardContext:
    """What all layers of a forward pass share: positions, attention backend, memory of kernels."""

    def __init__(
        self,
        positions: torch.Tensor,
        attention: AttentionBackend,
        memory: ByteBuffer,
    ) -> None:
        """positions: as in LayerStack.run. memory: for a kernel, until it returns."""
        self.attention = attention
        self.memory = memory
        self._positions = positions
        self._rotations: dict[RotaryEmbedding, Rotation] = {}
        self._query_scales: dict[RotaryEmbedding, torch.Tensor | None] = {}

    def rotation(self, rotary: RotaryEmbedding) -> Rotation:
        """Return cosines and sines of the step's positions; computed once per pass."""
        rotation = self._rotations.get(rotary)
        if rotation is None:
            rotation = self._rotations[rotary] = rotary.at(self._positions)
        return rotation

    def query_scales(self, rotary: RotaryEmbedding) -> torch.Tensor | None:
        """Return the factor of each token's query, float32 [T]; None if all are 1."""
        if rotary not in self._query_scales:
            table, positions = rotary.query_scales, self._positions
            assert table is None or positions.dim() == 1, "no model with M-RoPE scales queries"
            scales = None if table is None else table.index_select(0, positions)
            self._query_scales[rotary] = scales
        return self._query_scales[rotary]


class LayerPart(Protocol):
    """One half of a layer, with its weights: attention or MLP."""

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Return residual plus the part's output for x, both [T, hidden].

        x is normed already. The residual's memory may be reused for the result.
        """


class PartReader(Protocol):
    """Gives a part of one layer its weights, by their names in the layer.

    The loader implements it for files (worker/loader/weights.py), and once more to find out which
    products a part has. The methods run in a reader thread; the functions that they return build
    modules in the thread that computes.

    device: makes what computes the part besides its weights.
    cache_layer: the number of the layer among those that keep KV. state_layer: its number among
        those that keep a state.
    """

    device: "LayerDevice"
    cache_layer: int
    state_layer: int

    def linear(self, *names: str) -> Callable[[], Linear]:
        """Read `NAME.weight`, one below the other, as one product, with their biases if any."""

    def head_linear(self, name: str) -> Callable[[], Linear]:
        """Read `NAME.weight`, the product of one head among others."""

    def summed_linear(self, name: str) -> Callable[[], Linear]:
        """Read a product that ranks add up; of several ranks only the first adds the bias."""

    def output_linear(self, name: str) -> Callable[[], ResidualLinear]:
        """Read the product that ends the part, as `summed_linear` does."""

    def output(self) -> Callable[[], PartOutput]:
        """Read what follows a part that does not end with a single product."""

    def experts(
        self,
        numbers: range,
        activation: Activation,
        *,
        total: int,
        row_fraction: float,
        are_whole: bool,
    ) -> Callable[[], Experts]:
        """Read gate, up and down projections of the experts with these numbers, of `total`.

        row_fraction: of a step's rows, those that one expert computes on average.
        are_whole: ranks have whole experts. Else they add up the down projections, and only the
            first adds their biases.
        """

    def norm(self, name: str) -> Callable[[], Norm]:
        """Read the weight of a norm, and its bias if it has one."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read this rank's shard of a weight as a dense tensor, for example a router's."""

    def rotary(self, rope: Rope, head_dim: int, rotary_dim: int) -> RotaryEmbedding:
        """Return the rotary embedding; call it while building, not while reading."""


class PartSpec(Protocol):
    """Description of one half of a layer: sizes, weights, sharding, construction."""

    @property
    def weights(self) -> Sequence[WeightSpec]:
        """The part's weights, with names relative to the layer."""

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the products of one token, which are those of all weights unless overridden."""
        return product_flops(self.weights)

    @property
    def outputs_per_token(self) -> int:
        """Numbers that the products of one token give, as above."""
        return product_outputs(self.weights)

    @property
    def mixers(self) -> "tuple[PartSpec, ...]":
        """The part itself, or the parts that it runs in parallel."""
        return (self,)

    @property
    def logged_floats(self) -> int:
        """Float32 numbers of a token in the log of a state (worker/attention/state_cache.py)."""
        return 0

    @property
    def state_floats(self) -> int:
        """Floats of the state that the part keeps of a sequence; 0 if it keeps none."""
        return 0

    @property
    def max_ranks(self) -> int:
        """The most ranks that can share the part."""

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple[Self, Mapping[str, Shard]]:
        """Return the part as rank `rank` of `size` computes it, and its shard of each weight.

        Weights without an entry are held whole by every rank. block_columns: columns of a
        quantisation block of each weight in the file, 1 if it is not quantised in blocks; a cut
        within a block would force the weight to be stored dense. Raises ConfigError if the part
        cannot be shared by `size` ranks.
        """

    def read(self, reader: PartReader) -> Callable[[], LayerPart]:
        """Read the weights from the files and return a function that builds the part from them.

        Runs in a reader thread; the returned function runs in the thread that computes.
        """
