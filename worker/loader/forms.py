"""How the weights of products are held, and how they get there from the files.

    DenseForm    numbers of the activations' type, laid out as the device likes them
    Bf16Form     the same of bfloat16, in panels of our own kernels
    BlockForm    blocks of a few bits with scales: the file's own, or made of numbers
    RotatedForm  8 bits and one scale an output, rotated
    MixedForm    a BlockForm for few rows, with the same rotated for many

A form is used in two steps: `read…` runs in a thread of the loader and takes the weights out of
the files, what it returns runs in the thread that computes and makes the product. Owns the count
of what each form takes. Which form a model gets is decided in choice.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from worker.kernels import Kernels
from worker.layers.bf16_weight import Bf16Weight
from worker.layers.block_linear import BlockHead, BlockLinear, block_linear
from worker.layers.embedding import Bf16Table, BlockTable, DenseTable, Table
from worker.layers.linear import Linear, can_pack, make_linear
from worker.layers.mixed_linear import MixedLinear
from worker.layers.packed_weight import PackedWeight, supported
from worker.layers.rotated_weight import RotatedWeight, can_rotate
from worker.loader.blocks import BLOCKS, joined
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
"""Kernels for which the second form is worth its memory."""
DENSE_FROM: Final = 48
"""Rows from which on a head in bfloat16 takes less time than one in blocks, with AMX."""


@dataclass(frozen=True)
class Product:
    """The names of weights that are multiplied as one, one below the other, and of their biases."""

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ends:
    """The embedding and the head; one name for both where they are tied."""

    embedding: str
    head: str

    @property
    def tied(self) -> bool:
        return self.embedding == self.head


FinishProduct = Callable[[], Linear]
FinishEnds = Callable[[], tuple[Table, Linear]]


class WeightForm(Protocol):
    """How the weights of one model are held."""

    @property
    def name(self) -> str:
        """Stands in the fingerprint of the KV cache: other names, other arithmetic."""
        ...

    @property
    def memory(self) -> Counter[str]:
        """Bytes of what has been made so far, by form."""
        ...

    @property
    def dense_names(self) -> list[str]:
        """Weights that are dense although they were to be in blocks."""
        ...

    def read_product(self, source: WeightSource, product: Product) -> FinishProduct:
        """Take a product out of the files; safe in several threads at once."""
        ...

    def read_ends(self, source: WeightSource, ends: Ends) -> FinishEnds:
        """The same for the embedding and the head."""
        ...


class DenseForm:
    """Numbers of the dtype that `source` reads."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = DENSE_NAMES[dtype]
        self.dtype = dtype
        self.memory: Counter[str] = Counter()
        self.dense_names: list[str] = []

    def read_product(self, source: WeightSource, product: Product) -> FinishProduct:
        weight, bias = source.read(*product.weights), read_bias(source, product)
        return lambda: self.make(weight, bias)

    def read_ends(self, source: WeightSource, ends: Ends) -> FinishEnds:
        table = source.read(ends.embedding)
        head = table if ends.tied else source.read(ends.head)
        return lambda: (self.table(table, head), self.make(head, None))

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """The product of a weight [out, in] that nobody changes."""
        self.memory[self.name] += weight.nbytes
        return make_linear(weight, bias)

    def table(self, table: torch.Tensor, head: torch.Tensor) -> Table:
        """Rows of an embedding. A tied head that is laid out anew leaves the table beside it."""
        if table is not head or can_pack(table.device, table.dtype):
            self.memory[self.name] += table.nbytes
        return DenseTable(table)


class Bf16Form(DenseForm):
    """bfloat16 as the kernels lay it out. A tied weight is there once."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(torch.bfloat16)
        self._kernels = kernels

    def read_product(self, source: WeightSource, product: Product) -> FinishProduct:
        weight = self._weight(source, *product.weights)
        bias = read_bias(source, product)
        return lambda: self._hold(weight, bias)

    def read_ends(self, source: WeightSource, ends: Ends) -> FinishEnds:
        head = self._weight(source, ends.head)
        if ends.tied:
            return lambda: (Bf16Table(head), self._hold(head, None))
        table = source.read(ends.embedding)
        return lambda: (self.table(table, table), self._hold(head, None))

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._hold(Bf16Weight(self._kernels, weight), bias)

    def table(self, table: torch.Tensor, head: torch.Tensor) -> Table:
        self.memory[self.name] += table.nbytes
        return DenseTable(table)

    def _weight(self, source: WeightSource, *names: str) -> Bf16Weight:
        return Bf16Weight(self._kernels, source.read(*names, dtype=self.dtype))

    def _hold(self, weight: Bf16Weight, bias: torch.Tensor | None) -> Linear:
        self.memory[self.name] += weight.nbytes
        return BlockLinear(weight, bias)


class Packer(Protocol):
    """Makes blocks of weights."""

    name: str

    def pack(self, source: WeightSource, names: Sequence[str]) -> list[PackedWeight]:
        """These weights, one below the other; empty where they cannot be in blocks."""
        ...


class FileBlocks:
    """The blocks that the file has, rearranged for the kernels; their values stay."""

    name = "packed"

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def pack(self, source: WeightSource, names: Sequence[str]) -> list[PackedWeight]:
        if not all(in_blocks(source, name) for name in names):
            return []
        return [
            PackedWeight.from_blocks(
                self._kernels, each.type, (each.rows, each.columns), each.data, each.row_order
            )
            for each in joined([source.read_blocks(name) for name in names])
        ]


class NewBlocks:
    """Blocks of 8 bits (GGUF's Q8_0), made of whatever numbers the file has."""

    name = "int8"

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._as_they_are = FileBlocks(kernels)

    def pack(self, source: WeightSource, names: Sequence[str]) -> list[PackedWeight]:
        if all(source.type_of(name) == "Q8_0" for name in names):
            return self._as_they_are.pack(source, names)
        if not supported("Q8_0", source.columns_of(names[0])):
            return []
        numbers = source.read(*names, dtype=torch.float32)
        return [PackedWeight.from_dense(self._kernels, numbers)]


class BlockForm:
    """Blocks for every product that can have them; `dense` for the others.

    The activations are quantised to 8 bits for each product, in blocks as well.
    """

    def __init__(self, packer: Packer, dense: DenseForm, dtype: torch.dtype) -> None:
        self.name = packer.name
        self.memory = dense.memory
        self.dense_names: list[str] = []
        self._packer = packer
        self._dense = dense
        self._dtype = dtype

    def read_product(self, source: WeightSource, product: Product) -> FinishProduct:
        parts = self.pack(source, product.weights)
        if not parts:
            return self.read_dense(source, product)
        bias = read_bias(source, product)
        return lambda: self.make(parts, bias)

    def read_dense(self, source: WeightSource, product: Product) -> FinishProduct:
        """A product whose weights cannot be in blocks."""
        return self._dense.read_product(source, product)

    def read_ends(self, source: WeightSource, ends: Ends) -> FinishEnds:
        """A tied weight is there once: its rows are taken apart when a token asks for them."""
        table = self.pack(source, [ends.embedding])
        head = table if ends.tied else self.pack(source, [ends.head])
        if not table or not head:
            return self._dense.read_ends(source, ends)
        return lambda: (self.table(table, ends), self.make_head(head))

    def pack(self, source: WeightSource, names: Sequence[str]) -> list[PackedWeight]:
        """The blocks of these weights; empty, and noted, where they stay dense."""
        parts = self._packer.pack(source, names)
        if not parts:
            self.dense_names.extend(f"{name} ({source.type_of(name)})" for name in names)
        return parts

    def make(self, parts: list[PackedWeight], bias: torch.Tensor | None) -> Linear:
        """The product of weights that lie one below the other."""
        self.memory[self.name] += sum(part.nbytes for part in parts)
        return block_linear(parts, bias)

    def make_head(self, parts: list[PackedWeight]) -> Linear:
        """The product that gives scores; the one weight there is."""
        (weight,) = parts
        self.memory[self.name] += weight.nbytes
        return BlockHead(weight)

    def table(self, parts: list[PackedWeight], ends: Ends) -> Table:
        """Rows of an embedding."""
        (table,) = parts
        self.memory[self.name] += 0 if ends.tied else table.nbytes
        return BlockTable(table, self._dtype)


class RotatedForm:
    """8 bits and one scale an output for the layers, whatever the number of rows.

    The head, which loses more by one scale an output, is in blocks, as `ends` has it.
    """

    def __init__(self, ends: BlockForm, dense: DenseForm, kernels: Kernels) -> None:
        self.name = ends.name
        self.memory = dense.memory
        self.dense_names = ends.dense_names
        self.read_ends = ends.read_ends
        self._dense = dense
        self._kernels = kernels

    def read_product(self, source: WeightSource, product: Product) -> FinishProduct:
        names = product.weights
        if not can_rotate(source.columns_of(names[0])):
            self.dense_names.extend(f"{name} ({source.type_of(name)})" for name in names)
            return self._dense.read_product(source, product)
        weight = RotatedWeight(self._kernels, source.read(*names, dtype=torch.float32))
        bias = read_bias(source, product)

        def finish() -> Linear:
            self.memory[self.name] += weight.nbytes
            return BlockLinear(weight, bias)

        return finish


class MixedForm:
    """Every product of a layer twice: in blocks for few rows, rotated for ROTATED_FROM and more.

    The head, which loses more by one scale an output, stays in blocks.
    """

    def __init__(self, blocks: BlockForm, kernels: Kernels) -> None:
        self.name = f"{blocks.name}+rotated"
        self.memory = blocks.memory
        self.dense_names = blocks.dense_names
        self._blocks = blocks
        self._kernels = kernels

    def read_product(self, source: WeightSource, product: Product) -> FinishProduct:
        parts = self._blocks.pack(source, product.weights)
        if not parts:
            return self._blocks.read_dense(source, product)
        bias = read_bias(source, product)
        rotated = RotatedWeight(self._kernels, numbers_of(parts, torch.float32))

        def finish() -> Linear:
            self.memory["rotated"] += rotated.nbytes
            few, many = self._blocks.make(parts, bias), BlockLinear(rotated, bias)
            return MixedLinear(few, many, ROTATED_FROM)

        return finish

    def read_ends(self, source: WeightSource, ends: Ends) -> FinishEnds:
        return self._blocks.read_ends(source, ends)


class TileForm(MixedForm):
    """The same for a CPU with AMX, which has the head twice: in blocks, and dense for
    DENSE_FROM rows and more. What the head computes is in no KV."""

    def __init__(self, blocks: BlockForm, kernels: Kernels, dense: DenseForm) -> None:
        super().__init__(blocks, kernels)
        self._dense = dense

    def read_ends(self, source: WeightSource, ends: Ends) -> FinishEnds:
        table = self._blocks.pack(source, [ends.embedding])
        head = table if ends.tied else self._blocks.pack(source, [ends.head])
        if not table or not head:
            return self._dense.read_ends(source, ends)
        numbers = numbers_of(head, self._dense.dtype)

        def finish() -> tuple[Table, Linear]:
            few, many = self._blocks.make_head(head), self._dense.make(numbers, None)
            return self._blocks.table(table, ends), MixedLinear(few, many, DENSE_FROM)

        return finish


def numbers_of(parts: Sequence[PackedWeight], dtype: torch.dtype) -> torch.Tensor:
    """What blocks stand for, rounded to dtype: [out, in]."""
    numbers = [part.rows(torch.arange(part.out_features), dtype) for part in parts]
    return numbers[0] if len(numbers) == 1 else torch.cat(numbers)


def in_blocks(source: WeightSource, name: str) -> bool:
    """Whether the kernels multiply with a weight, or its piece that is read, as the file has it."""
    kind = source.type_of(name)
    return (
        kind in BLOCKS
        and supported(kind, source.columns_of(name))
        and not source.separates(name, BLOCKS[kind][0])
    )


def read_bias(source: WeightSource, product: Product) -> torch.Tensor | None:
    """The biases of a product, or None where it has none."""
    return source.read(*product.biases) if product.biases else None
