"""Products with weights of 4 or 8 bits a number as a Triton kernel, on any GPU.

A program multiplies a block of rows with a tile of the weight: codes become numbers of the
activations' dtype in registers, which are those that the whole weight would be converted to, and
products are summed in float32. So a weight takes the memory of its codes. The same kernel
multiplies with the experts of a mixture, whose weights are stacked: a program then multiplies a
block of pairs with a tile of the weight of their expert (triton_experts.py).

A byte of 4-bit codes has two columns that are 16 apart, which are multiplied one after the other:

    columns   0 … 15 | 16 … 31 | 32 … 47 | 48 … 63
    bytes     low      high      low       high
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from worker.layers.triton_experts import PairBlocks

_FEW_ROWS: Final = 16
_MANY_ROWS: Final = 64
_OUTPUTS: Final = 64
_BYTES: Final = 64
"""Bytes of each row of a weight that a tile has."""


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out, in] on a device as codes; see worker.loader.quantised.Codes.

    codes: uint8 [out, bytes]. scales: [groups, out]. zeros: uint8 [groups, out] or None.
    table: float32 [16] or None. group: columns that share a scale.
    column_order: int64 [in], column i of the codes is column column_order[i]; None for the same.
    is_float: codes are numbers of E4M3.

    Of a stack of weights, one for each expert, codes, scales and zeros have a dimension in front.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    table: torch.Tensor | None
    group: int
    column_order: torch.Tensor | None = None
    is_float: bool = False

    @property
    def out_features(self) -> int:
        return self.codes.shape[-2]

    @property
    def in_features(self) -> int:
        return 8 * self.codes.shape[-1] // self.bits

    @property
    def bits(self) -> int:
        columns = self.group * self.scales.shape[-2]
        return 8 if self.is_float else 8 * self.codes.shape[-1] // columns

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows by int64 [N] row numbers, a new [N, in] of `dtype`; not of a stack."""
        codes = self.codes.index_select(0, ids)
        if self.bits == 4:
            halves = codes.view(len(ids), -1, 16)
            codes = torch.cat((halves & 15, halves >> 4), -1).flatten(1)
        if self.is_float:
            numbers = codes.view(torch.float8_e4m3fn).float()
        elif self.table is not None:
            numbers = self.table[codes.int()]
        else:
            zeros = 1 << self.bits - 1 if self.zeros is None else self._of_columns(self.zeros, ids)
            numbers = codes.float() - zeros
        numbers = (numbers * self._of_columns(self.scales, ids)).to(dtype)
        if self.column_order is None:
            return numbers
        result = torch.empty_like(numbers)
        result[:, self.column_order] = numbers
        return result

    def _of_columns(self, of_groups: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return what these rows have for each group as float32, once for each column."""
        own = of_groups.index_select(1, ids).t().float()
        wide = own[:, :, None].expand(-1, -1, self.group)
        return wide.reshape(len(ids), -1)[:, : self.in_features]


@dataclass(frozen=True, slots=True)
class CodedExperts:
    """Weights of all experts, one or both as a stack of codes; fields as in StackedWeights."""

    gate_up: torch.Tensor | CodedWeight
    down: torch.Tensor | CodedWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class TritonCodedLinear:
    """Coded weights, one below the other, each of which gives a range of the result's columns."""

    def __init__(self, weights: Sequence[CodedWeight], bias: torch.Tensor | None = None) -> None:
        """bias: [out] of all, or None."""
        ends = list(accumulate(weight.out_features for weight in weights))
        self._out_features = ends[-1]
        self._parts = [
            (weight, slice(end - weight.out_features, end))
            for weight, end in zip(weights, ends, strict=True)
        ]
        self._bias = bias

    @functools.cached_property
    def _kernel(self) -> Any:
        return _product_kernel(os.environ.get("TRITON_INTERPRET"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self._out_features)
        for weight, columns in self._parts:
            order = weight.column_order
            ordered = x if order is None else x.index_select(1, order)
            bias = None if self._bias is None else self._bias[columns]
            self._multiply(ordered, weight, bias, out[:, columns])
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))

    def _multiply(
        self, x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Write the product of x [N, in] to out [N, out]; rows of both may be a stride apart."""
        block = _FEW_ROWS if len(x) < _MANY_ROWS else _MANY_ROWS
        _launch(self._kernel, -(-len(x) // block), x, weight, bias, out, block)


class GroupedCodedProduct:
    """Products of pairs of a row and an expert with the weights of their experts."""

    @functools.cached_property
    def _kernel(self) -> Any:
        return _product_kernel(os.environ.get("TRITON_INTERPRET"))

    def __call__(
        self,
        x: torch.Tensor,
        pairs: "PairBlocks",
        rows: torch.Tensor,
        weight: CodedWeight,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        block: int,
    ) -> None:
        """Write the product of x[rows[i]] and the weight of pair i's expert to out[i].

        weight: a stack without a column order. bias: [experts, out] or None.
        """
        assert weight.column_order is None
        _launch(self._kernel, len(pairs.experts), x, weight, bias, out, block, pairs, rows)


def _launch(
    kernel: Any,
    num_blocks: int,
    x: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    block: int,
    pairs: "PairBlocks | None" = None,
    rows: torch.Tensor | None = None,
) -> None:
    """Queue the kernel for num_blocks blocks of `block` rows of x, or of pairs with experts.

    bias: [out], or [experts, out] of a stack. pairs, rows: as in GroupedCodedProduct, for a stack;
    None for a single weight.
    """
    assert x.shape[1] == weight.in_features
    assert x.stride(1) == out.stride(1) == 1
    assert all(
        each is None or each.is_contiguous() for each in (weight.codes, weight.scales, weight.zeros)
    )
    # The kernel takes a pointer for every tensor. Any tensor stands in for one that is absent; the
    # compile-time flags below keep the kernel from reading it.
    absent = weight.codes
    of_pairs = (absent,) * 4 if pairs is None else (rows, pairs.experts, pairs.first, pairs.end)
    kernel[(num_blocks, -(-weight.out_features // _OUTPUTS))](
        x,
        weight.codes,
        weight.scales,
        absent if weight.zeros is None else weight.zeros,
        absent if weight.table is None else weight.table,
        absent if bias is None else bias,
        out,
        *of_pairs,
        len(x),
        weight.out_features,
        weight.codes.shape[-1],
        weight.scales.shape[-2],
        x.stride(0),
        out.stride(0),
        bits=weight.bits,
        group=weight.group,
        has_zeros=weight.zeros is not None,
        has_table=weight.table is not None,
        is_float=weight.is_float,
        biased=bias is not None,
        is_grouped=pairs is not None,
        block_rows=block,
        block_outputs=_OUTPUTS,
        block_bytes=_BYTES,
    )


@functools.cache
def _product_kernel(interpreted: str | None = None) -> Any:
    """Return the kernel of products with codes; interpreted: as in triton_kernels.py."""
    import triton
    import triton.language as tl

    def multiply_tile(  # type: ignore[no-untyped-def]
        x,
        codes,
        scales,
        zeros,
        table,
        bias,
        out,
        pair_rows,
        experts,
        firsts,
        ends,
        rows,
        outputs,
        row_bytes,
        groups,
        x_stride,
        out_stride,
        bits: tl.constexpr,
        group: tl.constexpr,
        has_zeros: tl.constexpr,
        has_table: tl.constexpr,
        is_float: tl.constexpr,
        biased: tl.constexpr,
        is_grouped: tl.constexpr,
        block_rows: tl.constexpr,
        block_outputs: tl.constexpr,
        block_bytes: tl.constexpr,
    ):
        """Write a tile [block_rows, block_outputs] of x times the numbers of the codes to `out`.

        Grid: (blocks, tiles of outputs). x: [rows, in], its rows x_stride apart. codes: uint8
        [outputs, row_bytes]. scales, zeros: [groups, outputs]. table: float32 [16]. bias:
        [outputs]. out: [rows, outputs], its rows out_stride apart. is_grouped: codes, scales, zeros
        and bias are stacks; block i is of the pairs from firsts[i] to ends[i], of expert
        experts[i]; pair p multiplies row pair_rows[p] of x and is row p of `out`.
        """
        first = tl.program_id(0) * block_rows
        end = rows
        if is_grouped:
            # A block of pairs: nothing is multiplied for one without any.
            first = tl.load(firsts + tl.program_id(0))
            end = tl.load(ends + tl.program_id(0))
        row = first + tl.arange(0, block_rows)
        is_row = row < end
        column = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
        is_column = column < outputs
        x_row = row.to(tl.int64)
        end_byte = row_bytes
        if is_grouped:
            x_row = tl.load(pair_rows + row, mask=is_row, other=0)
            expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
            codes += expert * outputs * row_bytes
            scales += expert * groups * outputs
            zeros += expert * groups * outputs
            bias += expert * outputs
            end_byte = tl.where(first < end, row_bytes, 0)
        x_begin = x + x_row[:, None] * x_stride
        begin = codes + column.to(tl.int64)[None, :] * row_bytes
        total = tl.zeros((block_rows, block_outputs), dtype=tl.float32)
        for first_byte in range(0, end_byte, block_bytes):
            byte = first_byte + tl.arange(0, block_bytes)
            inside = byte < row_bytes
            of_tile = inside[:, None] & is_column[None, :]
            stored = tl.load(begin + byte[:, None], mask=of_tile, other=0)
            # The column of x that a byte's code, or its lower one, is multiplied with.
            x_column = byte if bits == 8 else byte // 16 * 32 + byte % 16
            scale_index = (x_column // group)[:, None] * outputs + column[None, :]
            scale = tl.load(scales + scale_index, mask=of_tile, other=0.0).to(tl.float32)
            zero = 1 << (bits - 1)
            if has_zeros:
                zero = tl.load(zeros + scale_index, mask=of_tile, other=0).to(tl.float32)
            for half in tl.static_range(8 // bits):
                code = stored
                if bits == 4:
                    code = stored >> 4 if half else stored & 15
                if is_float:
                    # E4M3 has the leading bits of a float16 that is 2^-8 of it
                    wide = code.to(tl.uint16)
                    halves = (wide & 0x80) << 8 | (wide & 0x7F) << 7
                    number = halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
                elif has_table:
                    number = tl.load(table + code.to(tl.int32))
                else:
                    number = code.to(tl.float32) - zero
                left = tl.load(
                    x_begin + x_column[None, :] + 16 * half,
                    mask=is_row[:, None] & inside[None, :],
                    other=0.0,
                )
                right = (number * scale).to(left.dtype)
                total = tl.dot(left, right, total, input_precision="ieee")
        if biased:
            added = tl.load(bias + column, mask=is_column, other=0.0)
            total += added.to(tl.float32)[None, :]
        to = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])

    return triton.jit(multiply_tile)
