"""How the weights of linear layers are held in memory, and how they get there from the files.

    DenseFormat    the activations' dtype, in the layout that the device likes best
    Bf16Format     bfloat16 in the layout of our own kernels
    PackedFormat   the quantisation blocks of a GGUF file
    Int8Format     blocks of 8 bits, quantised from any format of the file
    RotatedFormat  8 bits and one scale per output, rotated
    MixedFormat    PackedFormat for few rows, and the same rotated for many
    AmxFormat      MixedFormat with a second, dense head for many rows

A format is used in two steps: its `read_…` methods run in a reader thread and take weights out of
the files; what they return runs in the thread that computes and builds the layer. format_choice.py
decides which format a model gets.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from worker.kernels import Kernels
from worker.layers.embedding import DenseTable, EmbeddingTable, KernelTable
from worker.layers.kernel_weights import (
    GGUF_BLOCKS,
    Bf16Weight,
    KernelWeight,
    PackedWeight,
    RotatedWeight,
    can_rotate,
    is_packable,
)
from worker.layers.linear import (
    KernelLinear,
    Linear,
    MixedLinear,
    is_reordered_by_onednn,
    make_linear,
)
from worker.loader.files import join_blocks
from worker.loader.source import WeightSource

DENSE_NAMES: Final = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
ROTATED_FROM: Final = 8
"""Rows from which on products with rotated weights take less time than those over blocks of 4
bits. Of the layers of SmolLM2, milliseconds of one thread, Q4_1 and rotated:

    rows                 1           4           8           16          32         256
    AMX               7.3  8.8    9.7  8.8   12.1  9.4    16.3  10   24.5  11    170   38
    AVX-512 VNNI      7.5  8.9    9.7  9.9   12.3  11     16.0  14   25.2  21    146  106
    AVX-VNNI         10.4  9.7   13.0  11    17.2  14     25.2  20   40.4  32    309  220
    AVX-512           7.2  9.6   10.8  12    15.2  17     25.7  28   43.1  47    353  348
    AVX2              9.9  11    14.1  13    20.9  19     34.1  33   61.4  60    449  435

Beside blocks of 8 bits (Q8_0: on AMX 11.3 for one row, 19.6 for 16; on AVX2 18.7 and 71) they
win for every number of rows. Two threads share the way to memory, which more bytes need longer.
Where bytes are multiplied without an instruction for it, there is next to nothing to gain. A
number, not a measurement at the start: tokens that change from one start to the next, or when a
worker dies, cost more than the few milliseconds between the two."""
ROTATED_VARIANTS: Final = frozenset({"amx", "avx512_bf16", "avx512_vnni", "avx2_vnni"})
"""Kernels for which a second format is worth its memory."""
DENSE_FROM: Final = 48
"""Rows from which on a head in bfloat16 takes less time than one in blocks, with AMX."""


@dataclass(frozen=True)
class Product:
    """Names of weights that are multiplied as one, one below the other, and of their biases."""

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ends:
    """Names of embedding and head; one name for both if they are tied."""

    embedding: str
    head: str

    @property
    def tied(self) -> bool:
        return self.embedding == self.head


BuildLinear = Callable[[], Linear]
BuildEnds = Callable[[], tuple[EmbeddingTable, Linear]]


class WeightFormat(Protocol):
    """How the weights of one model are held in memory."""

    @property
    def name(self) -> str:
        """Part of the KV cache's fingerprint: another name means other arithmetic."""
        ...

    @property
    def memory(self) -> Counter[str]:
        """Bytes of the weights built so far, by format."""
        ...

    @property
    def dense_names(self) -> list[str]:
        """Weights that are dense although the format would quantise them."""
        ...

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        """Read a product from the files; safe in several threads at once."""
        ...

    def read_ends(self, source: WeightSource, ends: Ends) -> BuildEnds:
        """Read embedding and head from the files."""
        ...


class DenseFormat:
    """Numbers of the dtype that `source` reads."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = DENSE_NAMES[dtype]
        self.dtype = dtype
        self.memory: Counter[str] = Counter()
        self.dense_names: list[str] = []

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weight, bias = source.read(*product.weights), _read_bias(source, product)
        return lambda: self.build(weight, bias)

    def read_ends(self, source: WeightSource, ends: Ends) -> BuildEnds:
        table = source.read(ends.embedding)
        head = table if ends.tied else source.read(ends.head)
        return lambda: (self.build_table(table, head), self.build(head, None))

    def build(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Return the layer of a weight [out, in], which must not change afterwards."""
        self.memory[self.name] += weight.nbytes
        return make_linear(weight, bias)

    def build_table(self, table: torch.Tensor, head: torch.Tensor) -> EmbeddingTable:
        """Return the embedding. A tied head that oneDNN reorders leaves the table beside it."""
        if table is not head or is_reordered_by_onednn(table.device, table.dtype):
            self.memory[self.name] += table.nbytes
        return DenseTable(table)


class Bf16Format(DenseFormat):
    """bfloat16 in the layout of the kernels. A tied weight exists once."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(torch.bfloat16)
        self._kernels = kernels

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weight = self._read(source, *product.weights)
        bias = _read_bias(source, product)
        return lambda: self._build_linear(weight, bias)

    def read_ends(self, source: WeightSource, ends: Ends) -> BuildEnds:
        head = self._read(source, ends.head)
        if ends.tied:
            return lambda: (KernelTable(head, self.dtype), self._build_linear(head, None))
        table = source.read(ends.embedding)
        return lambda: (self.build_table(table, table), self._build_linear(head, None))

    def build(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._build_linear(Bf16Weight(self._kernels, weight), bias)

    def build_table(self, table: torch.Tensor, head: torch.Tensor) -> EmbeddingTable:
        self.memory[self.name] += table.nbytes
        return DenseTable(table)

    def _read(self, source: WeightSource, *names: str) -> Bf16Weight:
        return Bf16Weight(self._kernels, source.read(*names, dtype=self.dtype))

    def _build_linear(self, weight: KernelWeight, bias: torch.Tensor | None) -> Linear:
        self.memory[self.name] += weight.nbytes
        return KernelLinear([weight], bias)


class PackedFormat:
    """The quantisation blocks of a GGUF file, rearranged for the kernels; their values stay.

    `dense` is for weights that are not in blocks. Activations of `dtype` are quantised to 8 bits
    for each product, in blocks as well.
    """

    name = "packed"

    def __init__(self, kernels: Kernels, dense: DenseFormat, dtype: torch.dtype) -> None:
        self.memory = dense.memory
        self.dense_names: list[str] = []
        self._kernels = kernels
        self._dense = dense
        self._dtype = dtype

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weights = self.read_packed(source, product.weights)
        if not weights:
            return self.read_dense(source, product)
        bias = _read_bias(source, product)
        return lambda: self.build(weights, bias)

    def read_dense(self, source: WeightSource, product: Product) -> BuildLinear:
        """Read a product whose weights cannot be in blocks."""
        return self._dense.read_product(source, product)

    def read_ends(self, source: WeightSource, ends: Ends) -> BuildEnds:
        """Read embedding and head; a tied weight exists once and is unpacked row by row on use."""
        table = self.read_packed(source, [ends.embedding])
        head = table if ends.tied else self.read_packed(source, [ends.head])
        if not table or not head:
            return self._dense.read_ends(source, ends)
        return lambda: (self.build_table(table, ends), self.build_head(head))

    def read_packed(self, source: WeightSource, names: Sequence[str]) -> list[PackedWeight]:
        """Read weights in blocks, one below the other; empty, and noted, if they stay dense."""
        weights = self._pack(source, names)
        if not weights:
            self.dense_names.extend(f"{name} ({source.type_of(name)})" for name in names)
        return weights

    def build(self, weights: list[PackedWeight], bias: torch.Tensor | None) -> Linear:
        """Return the product of weights that lie one below the other."""
        self.memory[self.name] += sum(weight.nbytes for weight in weights)
        return KernelLinear(weights, bias)

    def build_head(self, weights: list[PackedWeight]) -> Linear:
        """Return the product that computes logits, always in float32."""
        (weight,) = weights
        self.memory[self.name] += weight.nbytes
        return KernelLinear([weight], None, torch.float32)

    def build_table(self, weights: list[PackedWeight], ends: Ends) -> EmbeddingTable:
        (table,) = weights
        self.memory[self.name] += 0 if ends.tied else table.nbytes
        return KernelTable(table, self._dtype)

    def _pack(self, source: WeightSource, names: Sequence[str]) -> list[PackedWeight]:
        if not all(_is_packable(source, name) for name in names):
            return []
        return [
            PackedWeight.from_blocks(
                self._kernels,
                stored.type,
                (stored.rows, stored.columns),
                stored.data,
                stored.row_order,
            )
            for stored in join_blocks([source.read_blocks(name) for name in names])
        ]


class Int8Format(PackedFormat):
    """Blocks of 8 bits (GGUF's Q8_0), quantised from any format of the file."""

    name = "int8"

    def _pack(self, source: WeightSource, names: Sequence[str]) -> list[PackedWeight]:
        if all(source.type_of(name) == "Q8_0" for name in names):
            return super()._pack(source, names)
        if not is_packable("Q8_0", source.columns_of(names[0])):
            return []
        numbers = source.read(*names, dtype=torch.float32)
        return [PackedWeight.from_dense(self._kernels, numbers)]


class RotatedFormat:
    """8 bits and one scale per output for the layers, for any number of rows.

    Embedding and head, which lose more by one scale per output, are in the format of `ends`.
    """

    def __init__(self, ends: PackedFormat, dense: DenseFormat, kernels: Kernels) -> None:
        self.name = ends.name
        self.memory = dense.memory
        self.dense_names = ends.dense_names
        self.read_ends = ends.read_ends
        self._dense = dense
        self._kernels = kernels

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        names = product.weights
        if not can_rotate(source.columns_of(names[0])):
            self.dense_names.extend(f"{name} ({source.type_of(name)})" for name in names)
            return self._dense.read_product(source, product)
        weight = RotatedWeight(self._kernels, source.read(*names, dtype=torch.float32))
        bias = _read_bias(source, product)

        def build() -> Linear:
            self.memory[self.name] += weight.nbytes
            return KernelLinear([weight], bias)

        return build


class MixedFormat:
    """Every product of a layer twice: in blocks for few rows, rotated for ROTATED_FROM and more.

    Embedding and head stay in blocks.
    """

    def __init__(self, blocks: PackedFormat, kernels: Kernels) -> None:
        self.name = f"{blocks.name}+rotated"
        self.memory = blocks.memory
        self.dense_names = blocks.dense_names
        self._blocks = blocks
        self._kernels = kernels

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weights = self._blocks.read_packed(source, product.weights)
        if not weights:
            return self._blocks.read_dense(source, product)
        bias = _read_bias(source, product)
        rotated = RotatedWeight(self._kernels, _numbers_of(weights, torch.float32))

        def build() -> Linear:
            self.memory["rotated"] += rotated.nbytes
            few, many = self._blocks.build(weights, bias), KernelLinear([rotated], bias)
            return MixedLinear(few, many, ROTATED_FROM)

        return build

    def read_ends(self, source: WeightSource, ends: Ends) -> BuildEnds:
        return self._blocks.read_ends(source, ends)


class AmxFormat(MixedFormat):
    """MixedFormat for a CPU with AMX, with a second head: dense for DENSE_FROM rows and more.

    The KV cache does not depend on the head.
    """

    def __init__(self, blocks: PackedFormat, kernels: Kernels, dense: DenseFormat) -> None:
        super().__init__(blocks, kernels)
        self._dense = dense

    def read_ends(self, source: WeightSource, ends: Ends) -> BuildEnds:
        table = self._blocks.read_packed(source, [ends.embedding])
        head = table if ends.tied else self._blocks.read_packed(source, [ends.head])
        if not table or not head:
            return self._dense.read_ends(source, ends)
        numbers = _numbers_of(head, self._dense.dtype)

        def build() -> tuple[EmbeddingTable, Linear]:
            few, many = self._blocks.build_head(head), self._dense.build(numbers, None)
            return self._blocks.build_table(table, ends), MixedLinear(few, many, DENSE_FROM)

        return build


def _numbers_of(weights: Sequence[PackedWeight], dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that blocks stand for, rounded to dtype: [out, in]."""
    numbers = [weight.rows(torch.arange(weight.out_features), dtype) for weight in weights]
    return numbers[0] if len(numbers) == 1 else torch.cat(numbers)


def _is_packable(source: WeightSource, name: str) -> bool:
    """Return whether kernels multiply with a weight, or this rank's shard, as the file has it."""
    stored_as = source.type_of(name)
    return (
        stored_as in GGUF_BLOCKS
        and is_packable(stored_as, source.columns_of(name))
        and not source.splits_block(name, GGUF_BLOCKS[stored_as][0])
    )


def _read_bias(source: WeightSource, product: Product) -> torch.Tensor | None:
    return source.read(*product.biases) if product.biases else None
