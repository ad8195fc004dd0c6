"""How a CPU holds the weights of linear layers, and which format a model gets.

    Bf16Format     bfloat16 in the layout of our own kernels
    PackedFormat   quantisation blocks, read from GGUF or made by quantised.py, or FP8
    Int8Format     blocks of 8 bits, quantised from any format of the file
    RotatedFormat  8 bits and one scale per output, rotated
    MixedFormat    PackedFormat for few rows, and the same rotated for many

Start at choose_format.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Final

import torch

from proto.errors import ModelError
from proto.messages.prepared_model import FP8, TensorIndex
from proto.settings.config import ModelConfig
from worker.cpu.kernel_choice import choose_products
from worker.cpu.kernel_structures import Bf16Shape, RotatedShape
from worker.cpu.kernels import Kernels
from worker.cpu.linear import KernelLinear, MixedLinear
from worker.cpu.weights import (
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
from worker.layers.activation import is_gated
from worker.layers.experts import Expert, LinearExperts
from worker.layers.linear import Linear
from worker.loader.block_types import BLOCK_COLUMNS
from worker.loader.files import check_scales
from worker.loader.formats import (
    DENSE_NAMES,
    PACKED,
    BuildEnds,
    BuildExperts,
    BuildLinear,
    DenseFormat,
    ExpertProducts,
    Product,
    WeightFormat,
    head_name,
    read_bias,
    read_table,
    table_bytes,
)
from worker.loader.kernel_choices import KernelChoice
from worker.loader.source import WeightSource
from worker.models.layer_device import LayerDevice

ROTATED_FROM: Final = 8
"""Rows of a step from which on rotated int8 weights, kept beside blocks of 4 bits, multiply faster
than the blocks; measured in docs/benchmarks/products.md, "Rotated int8 weights"."""
INT8: Final = "int8"
"""Weights of 8 bits that were quantised here, among those of `WeightFormat.memory`."""
_QUANTISED_SHARE: Final = 0.5
"""Part of the numbers in blocks from which on a model counts as quantised."""


def choose_format(
    config: ModelConfig, dtype: torch.dtype, index: TensorIndex, kernels: Kernels
) -> WeightFormat:
    """Return the format for a model's weights, with activations of `dtype`.

    "auto" gives dense weights if a float type was requested that has no block products or that
    promises exactness (--dtype float32, float16). Otherwise a quantised model stays `packed`, and a
    dense model becomes bfloat16 if the CPU multiplies it, or `int8`: a single format, so that
    memory holds the weights once and a row has the same bits in every batch. The choice depends on
    CPU, settings and file types alone, so every start of a daemon chooses alike.
    """
    if config.cpu_weights == "f32" or config.dtype == "float16":
        return DenseFormat(dtype)
    if config.cpu_weights == "auto" and config.dtype == "float32":
        return DenseFormat(dtype)
    dense = dense_format(dtype, kernels)
    blocks = PackedFormat(kernels, dense, dtype)
    int8 = RotatedFormat(Int8Format(kernels, dense, dtype), dense, kernels)
    match config.cpu_weights:
        case "bf16":
            return dense
        case "packed":
            return blocks
        case "int8":
            return int8
        case "packed+int8":
            return MixedFormat(blocks, kernels)
    if part_in_blocks(index) >= _QUANTISED_SHARE:
        return blocks
    return int8 if dtype == torch.float32 else dense


def dense_format(dtype: torch.dtype, kernels: Kernels) -> DenseFormat:
    """Return the format of weights that keep the activations' dtype."""
    return Bf16Format(kernels) if dtype == torch.bfloat16 else DenseFormat(dtype)


def part_in_blocks(index: TensorIndex) -> float:
    """Return the fraction of a model's numbers that kernels multiply as they are stored: 0 to 1.

    Not of its bytes: embedding and head of many quantised checkpoints are as they were, and four
    times as long.
    """
    numbers: Counter[bool] = Counter()
    for entry in index.tensors:
        numbers[entry.type in BLOCK_COLUMNS] += math.prod(entry.shape)
    return numbers[True] / max(1, numbers.total())


class OwnFormat:
    """What formats have in common whose products are kernels of ours."""

    shared_forms = frozenset({PACKED, INT8, DENSE_NAMES[torch.bfloat16]})
    memory: Counter[str]
    dense_names: list[str]
    kernel_weights: list[KernelWeight]

    @property
    def arithmetic(self) -> set[str]:
        return {weight.arithmetic for weight in self.kernel_weights}

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        return not self.dense_names or dtype == torch.bfloat16

    def choose_kernels(self, dtype: torch.dtype, folder: str) -> list[KernelChoice]:
        return choose_products(self.kernel_weights, dtype, folder)

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        raise NotImplementedError

    def count_product(
        self,
        form: str,
        weights: Sequence[KernelWeight],
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """Return the product of weights that lie one below the other; count their memory."""
        self.memory[form] += sum(weight.nbytes for weight in weights)
        self.kernel_weights += weights
        return KernelLinear(weights, bias, out_dtype)

    def read_experts(self, source: WeightSource, experts: ExpertProducts) -> BuildExperts:
        """Read the products of every expert in the format of other products."""
        pairs = [
            (self.read_product(source, gate_up), self.read_product(source, down))
            for gate_up, down in zip(experts.gate_up, experts.down, strict=True)
        ]
        return lambda: LinearExperts(
            [Expert(gate_up(), down()) for gate_up, down in pairs],
            source.device.gate(experts.activation, is_gated(experts.activation)),
            experts.ranks.first,
        )


class Bf16Format(OwnFormat, DenseFormat):
    """bfloat16 in the layout of the kernels. A tied weight exists once."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(torch.bfloat16)
        self.kernel_weights: list[KernelWeight] = []
        self._kernels = kernels

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weight = self._read(source, *product.weights)
        bias = read_bias(source, product)
        return lambda: self.count_product(self.name, [weight], bias)

    def read_ends(self, source: WeightSource, *, tied: bool) -> BuildEnds:
        head = self._read(source, head_name(tied=tied))
        table = None if tied else read_table(source, self.memory)
        return lambda: (
            table or head.embedding_table(self.dtype),
            self.count_product(self.name, [head], None),
        )

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        shape = Bf16Shape(*source.joined_shape(*product.weights))
        return Counter({self.name: self._kernels.bf16_bytes(shape)})

    def ends_bytes(self, source: WeightSource, *, tied: bool) -> Counter[str]:
        size = self.product_bytes(source, Product((head_name(tied=tied),)))
        return size if tied else size + table_bytes(source)

    def build(self, device: LayerDevice, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        laid_out = Bf16Weight.from_dense(self._kernels, weight)
        return self.count_product(self.name, [laid_out], bias)

    def _read(self, source: WeightSource, *names: str) -> Bf16Weight:
        """Lay out weights one below the other, from the mapped file itself if it has bfloat16."""
        shape, first = source.joined_shape(*names), 0
        weight = Bf16Weight(self._kernels, shape, source.describe(*names))
        for name in () if weight.is_filled else names:
            first = weight.put_rows(first, *source.read_rows(name, self.dtype))
        return weight


class PackedFormat(OwnFormat):
    """The quantisation blocks of a file, rearranged for the kernels; their values stay.

    `dense` is for weights that are not in blocks. Activations of `dtype` are quantised to 8 bits
    for each product, in blocks as well. Weights in FP8 stay so; their activations are bfloat16.
    """

    name = PACKED

    def __init__(self, kernels: Kernels, dense: DenseFormat, dtype: torch.dtype) -> None:
        self.memory = dense.memory
        self.dense_names: list[str] = []
        self.kernel_weights = dense.kernel_weights if isinstance(dense, Bf16Format) else []
        self._kernels = kernels
        self._dense = dense
        self._dtype = dtype

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weights = self.read_packed(source, product.weights)
        if not weights:
            return self.read_dense(source, product)
        bias = read_bias(source, product)
        return lambda: self.count_product(self.name, weights, bias)

    def read_dense(self, source: WeightSource, product: Product) -> BuildLinear:
        """Read a product whose weights cannot be in blocks."""
        return self._dense.read_product(source, product)

    def read_ends(self, source: WeightSource, *, tied: bool) -> BuildEnds:
        """Read embedding and head; a tied weight exists once and is unpacked row by row on use.

        Logits are always float32.
        """
        head = self.read_packed(source, [head_name(tied=tied)])
        if not head:
            return self._dense.read_ends(source, tied=tied)
        table = None if tied else read_table(source, self.memory)
        return lambda: (
            table or head[0].embedding_table(self._dtype),
            self.count_product(self.name, head, None, out_dtype=torch.float32),
        )

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        if num_bytes := self.packed_bytes(source, product.weights):
            return Counter({self.name: num_bytes})
        return self._dense.product_bytes(source, product)

    def ends_bytes(self, source: WeightSource, *, tied: bool) -> Counter[str]:
        head = self.packed_bytes(source, [head_name(tied=tied)])
        if not head:
            return self._dense.ends_bytes(source, tied=tied)
        size = Counter({self.name: head})
        return size if tied else size + table_bytes(source)

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
        described, first = source.describe(*names), 0
        weight = PackedWeight(self._kernels, block_type, shape, order, described)
        for name in () if weight.is_filled else names:
            stored = source.read_blocks(name)
            if not source.is_joined(name):  # theirs were checked when the model was prepared
                check_scales(source.name_in_file(name), stored.type, stored.data)
            end = weight.put_blocks(first, stored.data, stored.row_order)
            if stored.factors is not None:
                in_order = slice(None) if stored.row_order is None else stored.row_order
                weight.put_factors(first, stored.factors[in_order])
            first = end
        return weight

    def _pack_fp8(self, source: WeightSource, names: tuple[str, ...]) -> Fp8Weight:
        columns, wide = source.fp8_scales(names[0])
        shape, described = source.joined_shape(*names), source.describe(*names)
        weight = Fp8Weight(self._kernels, shape, columns, wide=wide, source=described)
        first = 0
        for name in () if weight.is_filled else names:
            try:
                first = weight.put_rows(first, *source.read_fp8(name))
            except ValueError as reason:
                raise ModelError(f"tensor {source.name_in_file(name)}: {reason}") from None
        return weight


class Int8Format(PackedFormat):
    """Blocks of 8 bits (GGUF's Q8_0), quantised from any format of the file."""

    name = INT8

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
        shape, described = source.joined_shape(*names), source.describe(*names)
        weight = PackedWeight(self._kernels, "Q8_0", shape, source=described)
        if not weight.is_filled:
            weight.put_dense(source.read(*names, dtype=torch.float32))
        return [weight]


class RotatedFormat(OwnFormat):
    """8 bits and one scale per output for the layers, for any number of rows.

    Embedding and head, which lose more by one scale per output, are in the format of `ends`.
    """

    def __init__(self, ends: PackedFormat, dense: DenseFormat, kernels: Kernels) -> None:
        self.name = ends.name
        self.memory = dense.memory
        self.dense_names = ends.dense_names
        self.kernel_weights = ends.kernel_weights
        self.read_ends = ends.read_ends
        self.ends_bytes = ends.ends_bytes
        self._dense = dense
        self._kernels = kernels

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        names = product.weights
        if not can_rotate(source.columns_of(names[0])):
            self.dense_names.extend(f"{name} ({source.type_of(name)})" for name in names)
            return self._dense.read_product(source, product)
        shape, described = source.joined_shape(*names), source.describe(*names)
        weight = RotatedWeight(self._kernels, shape, described)
        if not weight.is_filled:
            weight.put_dense(source.read(*names, dtype=torch.float32))
        bias = read_bias(source, product)
        return lambda: self.count_product(self.name, [weight], bias)

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        rows, columns = source.joined_shape(*product.weights)
        if not can_rotate(columns):
            return self._dense.product_bytes(source, product)
        return Counter({self.name: self._kernels.rotated_bytes(RotatedShape(rows, columns))})


class MixedFormat(OwnFormat):
    """Every product of a layer twice: in blocks for few rows, rotated for ROTATED_FROM and more.

    Embedding and head stay in blocks.
    """

    def __init__(self, blocks: PackedFormat, kernels: Kernels) -> None:
        self.name = f"{blocks.name}+{INT8}"
        self.memory = blocks.memory
        self.dense_names = blocks.dense_names
        self.kernel_weights = blocks.kernel_weights
        self._blocks = blocks
        self._kernels = kernels

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        return False  # the number of rows decides which of both multiplies

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weights = self._blocks.read_packed(source, product.weights)
        if not weights:
            return self._blocks.read_dense(source, product)
        bias = read_bias(source, product)
        shape, described = source.joined_shape(*product.weights), source.describe(*product.weights)
        rotated = RotatedWeight(self._kernels, shape, described)
        if not rotated.is_filled:
            rotated.put_dense(_numbers_of(weights, torch.float32))

        def build() -> Linear:
            many = self.count_product(INT8, [rotated], bias)
            few = self.count_product(self._blocks.name, weights, bias)
            return MixedLinear(few, many, ROTATED_FROM)

        return build

    def read_ends(self, source: WeightSource, *, tied: bool) -> BuildEnds:
        return self._blocks.read_ends(source, tied=tied)

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        size = self._blocks.product_bytes(source, product)
        if self._blocks.packed_bytes(source, product.weights):
            shape = RotatedShape(*source.joined_shape(*product.weights))
            size[INT8] = self._kernels.rotated_bytes(shape)
        return size

    def ends_bytes(self, source: WeightSource, *, tied: bool) -> Counter[str]:
        return self._blocks.ends_bytes(source, tied=tied)


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
