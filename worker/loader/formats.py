"""How the weights of linear layers are held in memory, and how they get there from the files.

    DenseFormat    the activations' dtype, in the layout that the device likes best
    FixedRowsFormat  the same, for --batch-invariant on a GPU
    GpuFormat      quantised weights as they are, as far as kernels of a GPU multiply them
    Bf16Format     bfloat16 in the layout of our own kernels
    PackedFormat   quantisation blocks, read from GGUF or made by quantised.py, or FP8
    Int8Format     blocks of 8 bits, quantised from any format of the file
    RotatedFormat  8 bits and one scale per output, rotated
    MixedFormat    PackedFormat for few rows, and the same rotated for many

A format is used in two steps: its `read_…` methods run in a reader thread and take weights out of
the files; what they return runs in the thread that computes and builds the layer. format_choice.py
decides which format a model gets. An embedding whose head is another weight is
not converted on a CPU: lookups read the mapped file.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Protocol

import torch

from proto.errors import ModelError
from proto.prepared_model import FP8
from worker.kernel_structures import Bf16Shape, RotatedShape
from worker.kernels import Kernels, row_kernels
from worker.layers.activation import Activation
from worker.layers.embedding import (
    DenseTable,
    EmbeddingTable,
    KernelTable,
    MappedBlockTable,
    MappedTable,
)
from worker.layers.experts import (
    DenseExperts,
    Expert,
    ExpertRanks,
    Experts,
    LinearExperts,
    StackedWeights,
)
from worker.layers.flashinfer_kernels import (
    FlashInferExperts,
    has_prebuilt_experts,
    is_hopper,
    takes_experts,
    usable_flashinfer,
)
from worker.layers.kernel_weights import (
    BLOCK_COLUMNS,
    BLOCK_TYPES,
    Bf16Weight,
    Fp8Weight,
    KernelWeight,
    PackedWeight,
    RotatedWeight,
    can_rotate,
    fp8_shape,
    is_packable,
    packed_shape,
)
from worker.layers.linear import (
    FixedRowsLinear,
    KernelLinear,
    Linear,
    MixedLinear,
    is_reordered_by_onednn,
    make_linear,
)
from worker.layers.triton_experts import TritonExperts
from worker.loader.files import check_scales
from worker.loader.source import WeightSource

DENSE_NAMES: Final = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
ROTATED_FROM: Final = 8
"""Rows of a step from which on rotated int8 weights, kept beside blocks of 4 bits, multiply faster
than the blocks; measured in docs/benchmarks/products.md, "Rotated int8 weights"."""


@dataclass(frozen=True)
class Product:
    """Names of weights that are multiplied as one, one below the other, and of their biases.

    rows_share: rows that are multiplied, of those of a step; an expert's are a part of them.
    is_one_head: it multiplies the columns of one head, beside equal products of all others.
    is_expert: it is one of a mixture, beside equal products of all others.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()
    rows_share: float = 1.0
    is_one_head: bool = False
    is_expert: bool = False


@dataclass(frozen=True)
class ExpertProducts:
    """The products of a layer's experts: gate_up and down of each.

    ranks: which of the layer's experts these are.
    """

    gate_up: tuple[Product, ...]
    down: tuple[Product, ...]
    activation: Activation
    ranks: ExpertRanks


@dataclass(frozen=True)
class Ends:
    """Names of embedding and head; one name for both if they are tied."""

    embedding: str
    head: str

    @property
    def tied(self) -> bool:
        return self.embedding == self.head


BuildLinear = Callable[[], Linear]
BuildExperts = Callable[[], Experts]
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

    @property
    def kernel_weights(self) -> list[KernelWeight]:
        """The weights built so far that kernels of ours multiply."""
        ...

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        """Read a product from the files; safe in several threads at once."""
        ...

    def read_experts(self, source: WeightSource, experts: ExpertProducts) -> BuildExperts:
        """Read the experts of a layer from the files; safe in several threads at once."""
        ...

    def read_ends(self, source: WeightSource, ends: Ends) -> BuildEnds:
        """Read embedding and head from the files."""
        ...

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        """Return what `read_product` and its build would add to `memory`, without reading."""
        ...

    def ends_bytes(self, source: WeightSource, ends: Ends) -> Counter[str]:
        """Return what `read_ends` and its build would add to `memory`, without reading."""
        ...


class DenseFormat:
    """Numbers of the dtype that `source` reads."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = DENSE_NAMES[dtype]
        self.dtype = dtype
        self.memory: Counter[str] = Counter()
        self.dense_names: list[str] = []
        self.kernel_weights: list[KernelWeight] = []

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weight, bias = source.read(*product.weights), _read_bias(source, product)
        return lambda: self.build(weight, bias)

    def read_experts(self, source: WeightSource, experts: ExpertProducts) -> BuildExperts:
        """Read the experts as stacked tensors."""
        gate_up, down = read_stack(source, experts.gate_up), read_stack(source, experts.down)
        gate_up_bias = read_stacked_bias(source, experts.gate_up)
        down_bias = read_stacked_bias(source, experts.down)

        def build() -> Experts:
            self.memory[self.name] += gate_up.nbytes + down.nbytes
            stacked = StackedWeights(gate_up, down, gate_up_bias, down_bias)
            return stacked_experts(stacked, experts.activation, experts.ranks)

        return build

    def read_ends(self, source: WeightSource, ends: Ends) -> BuildEnds:
        head = source.read(ends.head)
        if not ends.tied:
            table = read_table(source, ends.embedding, self.memory)
            return lambda: (table, self.build(head, None))
        return lambda: (self.build_tied_table(head), self.build(head, None))

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        rows, columns = source.joined_shape(*product.weights)
        return Counter({self.name: rows * columns * self.dtype.itemsize})

    def ends_bytes(self, source: WeightSource, ends: Ends) -> Counter[str]:
        size = self.product_bytes(source, Product((ends.head,)))
        if not ends.tied:
            return size + table_bytes(source, ends.embedding)
        return size + size if is_reordered_by_onednn(source.device, self.dtype) else size

    def build(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Return the layer of a weight [out, in], which must not change afterwards."""
        self.memory[self.name] += weight.nbytes
        return make_linear(weight, bias)

    def build_tied_table(self, table: torch.Tensor) -> EmbeddingTable:
        """Return the embedding. A head that oneDNN reorders leaves the table beside it."""
        if is_reordered_by_onednn(table.device, table.dtype):
            self.memory[self.name] += table.nbytes
        return DenseTable(table)


class FixedRowsFormat(DenseFormat):
    """DenseFormat for products that give a row the same bits in a batch of any size."""

    def build(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        self.memory[self.name] += weight.nbytes
        return FixedRowsLinear(weight, bias)


class Bf16Format(DenseFormat):
    """bfloat16 in the layout of the kernels. A tied weight exists once."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(torch.bfloat16)
        self._kernels = kernels

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weight = self._read(source, *product.weights)
        bias = _read_bias(source, product)
        return lambda: self._build_linear(weight, bias)

    def read_experts(self, source: WeightSource, experts: ExpertProducts) -> BuildExperts:
        return _read_each_expert(self, source, experts)

    def read_ends(self, source: WeightSource, ends: Ends) -> BuildEnds:
        head = self._read(source, ends.head)
        if ends.tied:
            return lambda: (KernelTable(head, self.dtype), self._build_linear(head, None))
        table = read_table(source, ends.embedding, self.memory)
        return lambda: (table, self._build_linear(head, None))

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        shape = Bf16Shape(*source.joined_shape(*product.weights))
        return Counter({self.name: self._kernels.bf16_bytes(shape)})

    def ends_bytes(self, source: WeightSource, ends: Ends) -> Counter[str]:
        size = self.product_bytes(source, Product((ends.head,)))
        return size if ends.tied else size + table_bytes(source, ends.embedding)

    def build(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._build_linear(Bf16Weight.from_dense(self._kernels, weight), bias)

    def _read(self, source: WeightSource, *names: str) -> Bf16Weight:
        """Lay out weights one below the other, from the mapped file itself if it has bfloat16."""
        weight, first = Bf16Weight(self._kernels, source.joined_shape(*names)), 0
        for name in names:
            first = weight.put_rows(first, *source.read_rows(name, self.dtype))
        return weight

    def _build_linear(self, weight: KernelWeight, bias: torch.Tensor | None) -> Linear:
        self.memory[self.name] += weight.nbytes
        self.kernel_weights.append(weight)
        return KernelLinear([weight], bias)


class PackedFormat:
    """The quantisation blocks of a file, rearranged for the kernels; their values stay.

    `dense` is for weights that are not in blocks. Activations of `dtype` are quantised to 8 bits
    for each product, in blocks as well. Weights in FP8 stay so; their activations are bfloat16.
    """

    name = "packed"

    def __init__(self, kernels: Kernels, dense: DenseFormat, dtype: torch.dtype) -> None:
        self.memory = dense.memory
        self.dense_names: list[str] = []
        self.kernel_weights = dense.kernel_weights
        self._kernels = kernels
        self._dense = dense
        self._dtype = dtype

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weights = self.read_packed(source, product.weights)
        if not weights:
            return self.read_dense(source, product)
        bias = _read_bias(source, product)
        return lambda: self.build(weights, bias)

    def read_experts(self, source: WeightSource, experts: ExpertProducts) -> BuildExperts:
        return _read_each_expert(self, source, experts)

    def read_dense(self, source: WeightSource, product: Product) -> BuildLinear:
        """Read a product whose weights cannot be in blocks."""
        return self._dense.read_product(source, product)

    def read_ends(self, source: WeightSource, ends: Ends) -> BuildEnds:
        """Read embedding and head; a tied weight exists once and is unpacked row by row on use."""
        head = self.read_packed(source, [ends.head])
        if not head:
            return self._dense.read_ends(source, ends)
        if not ends.tied:
            table = read_table(source, ends.embedding, self.memory)
            return lambda: (table, self.build_head(head))
        return lambda: (KernelTable(head[0], self._dtype), self.build_head(head))

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        if num_bytes := self.packed_bytes(source, product.weights):
            return Counter({self.name: num_bytes})
        return self._dense.product_bytes(source, product)

    def ends_bytes(self, source: WeightSource, ends: Ends) -> Counter[str]:
        head = self.packed_bytes(source, [ends.head])
        if not head:
            return self._dense.ends_bytes(source, ends)
        size = Counter({self.name: head})
        return size if ends.tied else size + table_bytes(source, ends.embedding)

    def packed_bytes(self, source: WeightSource, names: Sequence[str]) -> int:
        """Return the bytes of the result of `read_packed`; 0 if the weights stay dense."""
        if not all(_is_packable(source, name) for name in names):
            return 0
        return sum(
            self._bytes_alike(source, form[0], tuple(alike))
            for form, alike in groupby(names, source.form_of)
        )

    def _bytes_alike(self, source: WeightSource, stored_as: str, names: tuple[str, ...]) -> int:
        shape = source.joined_shape(*names)
        if stored_as != FP8:
            return self._bytes_in_blocks(stored_as, *shape)
        columns, wide = source.fp8_scales(names[0])
        num_bytes: int = self._kernels.fp8_bytes(fp8_shape(shape, columns, wide=wide))
        return num_bytes

    def _bytes_in_blocks(self, block_type: str, rows: int, columns: int) -> int:
        num_bytes: int = self._kernels.packed_bytes(packed_shape(block_type, (rows, columns)))
        return num_bytes

    def read_packed(self, source: WeightSource, names: Sequence[str]) -> list[KernelWeight]:
        """Read weights in blocks, one below the other; empty, and noted, if they stay dense."""
        weights = self._pack(source, names)
        if not weights:
            self.dense_names.extend(f"{name} ({source.type_of(name)})" for name in names)
        return weights

    def build(self, weights: list[KernelWeight], bias: torch.Tensor | None) -> Linear:
        """Return the product of weights that lie one below the other."""
        self.memory[self.name] += sum(weight.nbytes for weight in weights)
        self.kernel_weights += weights
        return KernelLinear(weights, bias)

    def build_head(self, weights: list[KernelWeight]) -> Linear:
        """Return the product that computes logits, always in float32."""
        (weight,) = weights
        self.memory[self.name] += weight.nbytes
        self.kernel_weights.append(weight)
        return KernelLinear([weight], None, torch.float32)

    def _pack(self, source: WeightSource, names: Sequence[str]) -> list[KernelWeight]:
        if not all(_is_packable(source, name) for name in names):
            return []
        return [
            self._pack_alike(source, form[0], tuple(alike))
            for form, alike in groupby(names, source.form_of)
        ]

    def _pack_alike(
        self, source: WeightSource, block_type: str, names: tuple[str, ...]
    ) -> KernelWeight:
        """Pack weights of one type, one below the other; blocks of GGUF files are not copied."""
        if block_type == FP8:
            return self._pack_fp8(source, names)
        shape, order = source.joined_shape(*names), source.column_order(names[0])
        weight, first = PackedWeight(self._kernels, block_type, shape, order), 0
        for name in names:
            stored = source.read_blocks(name)
            if not source.has_parts(name):  # theirs were checked when the model was prepared
                check_scales(source.name_in_file(name), stored.type, stored.data)
            end = weight.put_blocks(first, stored.data, stored.row_order)
            if stored.factors is not None:
                in_order = slice(None) if stored.row_order is None else stored.row_order
                weight.put_factors(first, stored.factors[in_order])
            first = end
        return weight

    def _pack_fp8(self, source: WeightSource, names: tuple[str, ...]) -> Fp8Weight:
        columns, wide = source.fp8_scales(names[0])
        weight = Fp8Weight(self._kernels, source.joined_shape(*names), columns, wide=wide)
        first = 0
        for name in names:
            try:
                first = weight.put_rows(first, *source.read_fp8(name))
            except ValueError as reason:
                raise ModelError(f"tensor {source.name_in_file(name)}: {reason}") from None
        return weight


class Int8Format(PackedFormat):
    """Blocks of 8 bits (GGUF's Q8_0), quantised from any format of the file."""

    name = "int8"

    def packed_bytes(self, source: WeightSource, names: Sequence[str]) -> int:
        if all(source.type_of(name) == "Q8_0" for name in names):
            return super().packed_bytes(source, names)
        rows, columns = source.joined_shape(*names)
        return self._bytes_in_blocks("Q8_0", rows, columns) if is_packable("Q8_0", columns) else 0

    def _pack(self, source: WeightSource, names: Sequence[str]) -> list[KernelWeight]:
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
        self.kernel_weights = dense.kernel_weights
        self.read_ends = ends.read_ends
        self.ends_bytes = ends.ends_bytes
        self._dense = dense
        self._kernels = kernels

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        names = product.weights
        if not can_rotate(source.columns_of(names[0])):
            self.dense_names.extend(f"{name} ({source.type_of(name)})" for name in names)
            return self._dense.read_product(source, product)
        weight = RotatedWeight.from_dense(self._kernels, source.read(*names, dtype=torch.float32))
        bias = _read_bias(source, product)

        def build() -> Linear:
            self.memory[self.name] += weight.nbytes
            self.kernel_weights.append(weight)
            return KernelLinear([weight], bias)

        return build

    def read_experts(self, source: WeightSource, experts: ExpertProducts) -> BuildExperts:
        return _read_each_expert(self, source, experts)

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        rows, columns = source.joined_shape(*product.weights)
        if not can_rotate(columns):
            return self._dense.product_bytes(source, product)
        return Counter({self.name: self._kernels.rotated_bytes(RotatedShape(rows, columns))})


class MixedFormat:
    """Every product of a layer twice: in blocks for few rows, rotated for ROTATED_FROM and more.

    Embedding and head stay in blocks.
    """

    def __init__(self, blocks: PackedFormat, kernels: Kernels) -> None:
        self.name = f"{blocks.name}+int8"
        self.memory = blocks.memory
        self.dense_names = blocks.dense_names
        self.kernel_weights = blocks.kernel_weights
        self._blocks = blocks
        self._kernels = kernels

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weights = self._blocks.read_packed(source, product.weights)
        if not weights:
            return self._blocks.read_dense(source, product)
        bias = _read_bias(source, product)
        rotated = RotatedWeight.from_dense(self._kernels, _numbers_of(weights, torch.float32))

        def build() -> Linear:
            self.memory["int8"] += rotated.nbytes
            self.kernel_weights.append(rotated)
            few, many = self._blocks.build(weights, bias), KernelLinear([rotated], bias)
            return MixedLinear(few, many, ROTATED_FROM)

        return build

    def read_experts(self, source: WeightSource, experts: ExpertProducts) -> BuildExperts:
        return _read_each_expert(self, source, experts)

    def read_ends(self, source: WeightSource, ends: Ends) -> BuildEnds:
        return self._blocks.read_ends(source, ends)

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        size = self._blocks.product_bytes(source, product)
        if self._blocks.packed_bytes(source, product.weights):
            shape = RotatedShape(*source.joined_shape(*product.weights))
            size["int8"] = self._kernels.rotated_bytes(shape)
        return size

    def ends_bytes(self, source: WeightSource, ends: Ends) -> Counter[str]:
        return self._blocks.ends_bytes(source, ends)


def stacked_experts(stacked: StackedWeights, activation: Activation, ranks: ExpertRanks) -> Experts:
    """Return the fastest implementation of stacked experts on their device."""
    device = stacked.down.device
    if device.type != "cuda":
        return DenseExperts(stacked, activation, ranks.first)
    library = usable_flashinfer() if is_hopper(device) else None
    fits = library is not None and takes_experts(stacked, activation, ranks)
    if fits and has_prebuilt_experts():
        return FlashInferExperts(library, stacked, ranks)
    return TritonExperts(stacked, activation, ranks.first)


def _numbers_of(weights: Sequence[KernelWeight], dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that blocks stand for: [out, in]."""
    numbers = [weight.rows(torch.arange(weight.out_features), dtype) for weight in weights]
    return numbers[0] if len(numbers) == 1 else torch.cat(numbers)


def _is_packable(source: WeightSource, name: str) -> bool:
    """Return whether kernels multiply with a weight, or this rank's shard, as the file has it."""
    stored_as = source.type_of(name)
    return (
        stored_as in BLOCK_COLUMNS
        and is_packable(stored_as, source.columns_of(name))
        and not source.splits_block(name, BLOCK_COLUMNS[stored_as])
        and (stored_as != FP8 or is_packable(FP8, source.fp8_scales(name)[0]))
    )


def read_table(source: WeightSource, name: str, memory: Counter[str]) -> EmbeddingTable:
    """Read the embedding of a model whose head is another weight, and count its memory.

    On a CPU its rows stay in the mapped file, which takes no memory of its own.
    """
    kernels = row_kernels()
    if not _stays_mapped(source, name):
        table = source.read(name)
        memory[DENSE_NAMES[table.dtype]] += table.nbytes
        return DenseTable(table)
    source.prefetch(name)
    if source.type_of(name) not in BLOCK_TYPES:
        rows, _ = source.read_rows(name)
        return MappedTable(rows, source.dtype)
    assert kernels is not None
    blocks = source.read_blocks(name)
    check_scales(source.name_in_file(name), blocks.type, blocks.data)
    stored = blocks.data.reshape(blocks.rows, -1)
    return MappedBlockTable(kernels, blocks.type, stored, blocks.columns, source.dtype)


def table_bytes(source: WeightSource, name: str) -> Counter[str]:
    """Return what `read_table` would count, without reading."""
    if _stays_mapped(source, name):
        return Counter()
    rows, columns = source.joined_shape(name)
    return Counter({DENSE_NAMES[source.dtype]: rows * columns * source.dtype.itemsize})


def _stays_mapped(source: WeightSource, name: str) -> bool:
    in_blocks = source.type_of(name) in BLOCK_TYPES
    can_unpack = row_kernels() is not None and not source.has_factors(name)
    return source.device.type == "cpu" and (not in_blocks or can_unpack)


def _read_each_expert(
    weight_format: WeightFormat, source: WeightSource, experts: ExpertProducts
) -> BuildExperts:
    """Read the products of every expert in the format of other products."""
    pairs = [
        (weight_format.read_product(source, gate_up), weight_format.read_product(source, down))
        for gate_up, down in zip(experts.gate_up, experts.down, strict=True)
    ]
    inner_size = source.columns_of(experts.down[0].weights[0])
    return lambda: LinearExperts(
        [Expert(gate_up(), down()) for gate_up, down in pairs],
        inner_size,
        experts.activation,
        experts.ranks.first,
    )


def read_stack(source: WeightSource, products: Sequence[Product]) -> torch.Tensor:
    """Return the weights [products, out, in] of equal products."""
    stacked = source.read(*(name for product in products for name in product.weights))
    return stacked.view(len(products), -1, stacked.shape[1])


def read_stacked_bias(source: WeightSource, products: Sequence[Product]) -> torch.Tensor | None:
    """Return the biases [products, out] of equal products; None without any."""
    biases = [name for product in products for name in product.biases]
    return source.read(*biases).view(len(products), -1) if biases else None


def _read_bias(source: WeightSource, product: Product) -> torch.Tensor | None:
    return source.read(*product.biases) if product.biases else None
