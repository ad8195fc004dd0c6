"""How a GPU holds the weights of quantised Hugging Face checkpoints.

    FP8                         multiplied as FP8 on compute capability 9.0 (fp8_linear.py)
    FP8, 4 and 8 bits, NF4,     codes, scales and zeros as they are (triton_codes.py): also FP8 of
    MXFP4                       other GPUs, without rounded inputs, of experts and embeddings
    all others                  numbers of the activations' dtype

Products of single heads are converted, too: they are multiplied as stacked tensors.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import groupby
from typing import Final, TypeVar

import torch

from proto.errors import ModelError
from proto.messages.prepared_model import FP8, TensorIndex
from worker.cuda.layers.dense_linear import FixedRowsLinear
from worker.cuda.layers.flashinfer_kernels import usable_flashinfer
from worker.cuda.layers.fp8_linear import (
    BLOCK,
    Fp8BlockLinear,
    Fp8RowLinear,
    has_fp8_products,
    takes_rows,
)
from worker.cuda.layers.triton_codes import CodedExperts, CodedWeight, TritonCodedLinear
from worker.cuda.layers.triton_experts import TritonExperts
from worker.layers.embedding import EmbeddingTable
from worker.layers.experts import Experts
from worker.layers.linear import Linear
from worker.loader.block_types import BLOCK_COLUMNS
from worker.loader.formats import (
    EMBEDDING,
    HEAD,
    PACKED,
    BuildEnds,
    BuildExperts,
    BuildLinear,
    DenseFormat,
    ExpertProducts,
    Product,
    read_bias,
    read_stack,
    read_stacked_bias,
    read_table,
    table_bytes,
)
from worker.loader.source import WeightSource
from worker.models.layer_device import LayerDevice


class _Holding(Enum):
    """How the weights of a product are held.

    NUMBERS: converted, as all others of their kind. CONVERTED: although their kind may stay as it
    is, because kernels do not take these shapes.
    """

    CODES = auto()
    FP8_ROWS = auto()
    FP8_BLOCKS = auto()
    NUMBERS = auto()
    CONVERTED = auto()


_CODED: Final = ("INT4_32", "INT4_128", "INT8_32", "INT8_128", "NF4", "MXFP4", FP8)
_BLOCKS_OF_CODES: Final = BLOCK_COLUMNS | {FP8: 1}
"""Columns between which a rank's part of a weight may begin."""
_FP8_NAME: Final = "fp8"
_NAN: Final = 0x7F
"""The code of NaN in E4M3, without its sign."""


Part = TypeVar("Part")


def _stack_like(weight: CodedWeight, count: int) -> CodedWeight:
    """Return a stack of `count` weights of this shape, to be filled in."""

    def stacked(each: torch.Tensor) -> torch.Tensor:
        return each.new_empty(count, *each.shape)

    zeros = None if weight.zeros is None else stacked(weight.zeros)
    return replace(weight, codes=stacked(weight.codes), scales=stacked(weight.scales), zeros=zeros)


def multiplies_blocks(index: TensorIndex, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether weights of a model are in FP8 with scales that Fp8BlockLinear takes."""
    blocks = (entry.options for entry in index.tensors if entry.type == FP8)
    found = any(
        each["rows"] == each["columns"] == BLOCK and "none_inputs" not in each for each in blocks
    )
    return found and has_fp8_products(device, dtype)


class FixedRowsFormat(DenseFormat):
    """DenseFormat for products that give a row the same bits in a batch of any size."""

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        return True

    def build(self, device: LayerDevice, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        self.memory[self.name] += weight.nbytes
        return FixedRowsLinear(weight, bias)


class GpuFormat(DenseFormat):
    """DenseFormat, except weights that kernels multiply as the checkpoint has them."""

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        names = product.weights
        holding = self._holding(source, product)
        if holding is _Holding.CONVERTED:
            self.dense_names.extend(f"{name} ({source.type_of(name)})" for name in names)
        if holding in (_Holding.NUMBERS, _Holding.CONVERTED):
            return super().read_product(source, product)
        bias = read_bias(source, product)
        if holding is _Holding.CODES:
            weights = self._read_coded(source, names)
            return self._counted_codes(weights, TritonCodedLinear(weights, bias))
        codes, scales = self._read_fp8(source, names)
        if holding is _Holding.FP8_ROWS:
            given = [source.input_scale(name) for name in names]
            largest = None if None in given else max(scale for scale in given if scale)
            linear: Linear = Fp8RowLinear(codes, scales, bias, largest)
        else:
            scales = scales[::BLOCK].contiguous()
            linear = Fp8BlockLinear(usable_flashinfer(), codes, scales, bias)
        return self._counted(_FP8_NAME, codes.nbytes + scales.nbytes, linear)

    def read_experts(self, source: WeightSource, experts: ExpertProducts) -> BuildExperts:
        """Read the experts as stacks, of codes if those of all experts are of one kind."""
        both = experts.gate_up, experts.down
        are_coded = [self._is_coded_stack(source, products) for products in both]
        if not any(are_coded):
            return super().read_experts(source, experts)
        stacks = [
            self._read_coded_stack(source, products) if is_coded else read_stack(source, products)
            for products, is_coded in zip(both, are_coded, strict=True)
        ]
        biases = [read_stacked_bias(source, products) for products in both]
        stacked = CodedExperts(stacks[0], stacks[1], *biases)

        def build() -> Experts:
            for stack in stacks:
                is_float = isinstance(stack, CodedWeight) and stack.is_float
                form = PACKED if isinstance(stack, CodedWeight) else self.name
                self.memory[_FP8_NAME if is_float else form] += stack.nbytes
            gate = source.device.gate(experts.activation)
            return TritonExperts(stacked, gate, experts.ranks.first)

        return build

    def read_ends(self, source: WeightSource, *, tied: bool) -> BuildEnds:
        """Read embedding and head; a tied weight exists once."""
        if not tied:
            build_table = self._read_table(source)
            build_head = self.read_product(source, Product((HEAD,)))
            return lambda: (build_table(), build_head())
        if not self._is_coded(source, (EMBEDDING,)):
            return super().read_ends(source, tied=True)
        weights = self._read_coded(source, (EMBEDDING,))
        table = weights[0].embedding_table(self.dtype)
        build = self._counted_codes(weights, TritonCodedLinear(weights))
        return lambda: (table, build())

    def ends_bytes(self, source: WeightSource, *, tied: bool) -> Counter[str]:
        is_coded = self._is_coded(source, (EMBEDDING,))
        if tied and not is_coded:
            return super().ends_bytes(source, tied=True)
        table = self._coded_bytes(source, (EMBEDDING,)) if is_coded else table_bytes(source)
        return table if tied else self.product_bytes(source, Product((HEAD,))) + table

    def _read_table(self, source: WeightSource) -> Callable[[], EmbeddingTable]:
        if not self._is_coded(source, (EMBEDDING,)):
            table = read_table(source, self.memory)
            return lambda: table
        weights = self._read_coded(source, (EMBEDDING,))
        return self._counted_codes(weights, weights[0].embedding_table(self.dtype))

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        holding = self._holding(source, product)
        if holding in (_Holding.NUMBERS, _Holding.CONVERTED):
            return super().product_bytes(source, product)
        if holding is _Holding.CODES:
            return self._coded_bytes(source, product.weights)
        rows, columns = source.joined_shape(*product.weights)
        num_scales = rows if holding is _Holding.FP8_ROWS else rows * columns // BLOCK**2
        return Counter({_FP8_NAME: rows * columns + 4 * num_scales})

    def _holding(self, source: WeightSource, product: Product) -> _Holding:
        names = product.weights
        if product.is_one_head or not self._is_quantised(source, names):
            return _Holding.NUMBERS
        if product.is_expert:
            has_order = any(source.column_order(name) is not None for name in names)
            is_coded = not has_order and self._is_coded(source, names)
            return _Holding.CODES if is_coded else _Holding.CONVERTED
        if self._multiplies_fp8(source, names):
            if self._has_fp8_rows(source, names):
                return _Holding.FP8_ROWS
            if self._has_fp8_blocks(source, names):
                return _Holding.FP8_BLOCKS
        return _Holding.CODES if self._is_coded(source, names) else _Holding.CONVERTED

    def _counted(self, form: str, num_bytes: int, part: Part) -> Callable[[], Part]:
        def build() -> Part:
            self.memory[form] += num_bytes
            return part

        return build

    def _counted_codes(self, weights: Sequence[CodedWeight], part: Part) -> Callable[[], Part]:
        form = _FP8_NAME if weights[0].is_float else PACKED
        return self._counted(form, sum(weight.nbytes for weight in weights), part)

    def _coded_bytes(self, source: WeightSource, names: Sequence[str]) -> Counter[str]:
        form = _FP8_NAME if source.type_of(names[0]) == FP8 else PACKED
        return Counter({form: sum(map(source.code_bytes, names))})

    def _is_quantised(self, source: WeightSource, names: Sequence[str]) -> bool:
        """Return whether all weights are of a kind that may stay as it is."""
        kinds = {source.type_of(name) for name in names}
        return kinds <= set(_CODED) and all(map(source.is_joined, names))

    def _multiplies_fp8(self, source: WeightSource, names: Sequence[str]) -> bool:
        """Return whether the device may multiply these weights as FP8."""
        return has_fp8_products(source.torch_device, self.dtype) and all(
            source.type_of(name) == FP8 and source.rounds_inputs(name) for name in names
        )

    def _is_coded(self, source: WeightSource, names: Sequence[str]) -> bool:
        """Return whether the kernels of codes read these weights."""
        return self._is_quantised(source, names) and not any(
            source.splits_block(name, _BLOCKS_OF_CODES[source.type_of(name)]) for name in names
        )

    def _is_coded_stack(self, source: WeightSource, products: Sequence[Product]) -> bool:
        """Return whether all these experts are codes of one kind; note those that are converted."""
        names = [name for product in products for name in product.weights]
        holdings = {self._holding(source, product) for product in products}
        if holdings == {_Holding.CODES}:
            forms = {source.code_form(name) for name in names}
            if len(forms) == 1:
                return True
        if holdings != {_Holding.NUMBERS}:
            self.dense_names.extend(f"{name} ({source.type_of(name)})" for name in names)
        return False

    def _read_coded_stack(self, source: WeightSource, products: Sequence[Product]) -> CodedWeight:
        """Read the weights of equal products as a stack, one expert after the other."""
        stack: CodedWeight | None = None
        for number, product in enumerate(products):
            (weight,) = self._read_coded(source, product.weights)
            if stack is None:
                stack = _stack_like(weight, len(products))
            for name in ("codes", "scales", "zeros"):
                own, whole = getattr(weight, name), getattr(stack, name)
                if whole is not None:
                    whole[number].copy_(own)
        assert stack is not None
        return stack

    def _read_coded(self, source: WeightSource, names: Sequence[str]) -> list[CodedWeight]:
        """Read weights; neighbours with the same form become one."""
        found, device = [], source.torch_device
        for _, alike in groupby(names, source.code_form):
            own = list(alike)
            parts = [source.read_codes(name) for name in own]
            zeros = [part.zeros for part in parts if part.zeros is not None]
            order, table = source.column_order(own[0]), parts[0].table
            found.append(
                CodedWeight(
                    codes=torch.cat([part.codes for part in parts]).to(device),
                    scales=torch.cat([part.scales for part in parts]).t().contiguous().to(device),
                    zeros=torch.cat(zeros).t().contiguous().to(device) if zeros else None,
                    table=None if table is None else table.to(device),
                    group=parts[0].group,
                    column_order=None if order is None else order.to(device),
                    is_float=parts[0].is_float,
                )
            )
        return found

    def _has_fp8_rows(self, source: WeightSource, names: Sequence[str]) -> bool:
        """Return whether every row of the weights has one scale."""
        shape = source.joined_shape(*names)
        blocks = [source.fp8_block(name) for name in names if source.type_of(name) == FP8]
        return (
            len(blocks) == len(names)
            and all(columns == shape[1] for columns, _ in blocks)
            and takes_rows(*shape)
        )

    def _has_fp8_blocks(self, source: WeightSource, names: Sequence[str]) -> bool:
        """Return whether every block of 128 x 128 has one scale, and FlashInfer is there."""
        return (
            all(source.type_of(name) == FP8 for name in names)
            and all(source.fp8_block(name) == (BLOCK, BLOCK) for name in names)
            and source.joined_shape(*names)[1] % BLOCK == 0
            and usable_flashinfer() is not None
        )

    def _read_fp8(
        self, source: WeightSource, names: Sequence[str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes [out, in] and the scales of each row, [out, groups], on the device."""
        codes, scales = [], []
        for name in names:
            stored, own, order = source.read_fp8(name)
            raw = stored.contiguous().view(torch.uint8)
            if ((raw & _NAN) == _NAN).any():
                raise ModelError(f"tensor {source.name_in_file(name)}: a number is NaN")
            rows = slice(None) if order is None else torch.from_numpy(order)
            codes.append(raw[rows])
            scales.append(own[rows])
        joined = torch.cat(codes).view(torch.float8_e4m3fn).to(source.torch_device)
        return joined, torch.cat(scales).to(source.torch_device)
