"""Products with weights of 4 or 8 bits a number as Triton kernels, on any GPU.

A program multiplies a block of rows with a tile of the weight: codes become numbers of the
activations' dtype in registers, which are those that the whole weight would be converted to, and
products are summed in float32. So a weight takes the memory of its codes.

A byte of 4-bit codes has two columns that are 16 apart, which are multiplied one after the other:

    columns   0 … 15 | 16 … 31 | 32 … 47 | 48 … 63
    bytes     low      high      low       high
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch

_FEW_ROWS: Final = 16
_MANY_ROWS: Final = 64
_OUTPUTS: Final = 64
_BYTES: Final = 64
"""Of a tile, in each row of a weight."""


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out, in] on a device as codes; see worker.loader.quantised.Codes.

    codes: uint8 [out, bytes]. scales: [groups, out]. zeros: uint8 [groups, out] or None.
    table: float32 [16] or None. group: columns that share a scale.
    column_order: int64 [in], column i of the codes is column column_order[i]; None for the same.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    table: torch.Tensor | None
    group: int
    column_order: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return len(self.codes)

    @property
    def in_features(self) -> int:
        return self.group * len(self.scales)

    @property
    def bits(self) -> int:
        return 8 * self.codes.shape[1] // self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros


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
        assert x.shape[1] == weight.in_features
        assert x.stride(1) == out.stride(1) == 1
        assert all(
            each is None or each.is_contiguous()
            for each in (weight.codes, weight.scales, weight.zeros)
        )
        block = _FEW_ROWS if len(x) < _MANY_ROWS else _MANY_ROWS
        self._kernel[(-(-len(x) // block), -(-weight.out_features // _OUTPUTS))](
            x,
            weight.codes,
            weight.scales,
            weight.codes if weight.zeros is None else weight.zeros,
            weight.scales if weight.table is None else weight.table,
            weight.scales if bias is None else bias,
            out,
            len(x),
            weight.out_features,
            weight.codes.shape[1],
            x.stride(0),
            out.stride(0),
            bits=weight.bits,
            group=weight.group,
            has_zeros=weight.zeros is not None,
            has_table=weight.table is not None,
            biased=bias is not None,
            block_rows=block,
            block_outputs=_OUTPUTS,
            block_bytes=_BYTES,
        )


@functools.cache
def _product_kernel(interpreted: str | None = None) -> Any:
    """Return the kernel; interpreted: as in triton_kernels.py."""
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
        rows,
        outputs,
        row_bytes,
        x_stride,
        out_stride,
        bits: tl.constexpr,
        group: tl.constexpr,
        has_zeros: tl.constexpr,
        has_table: tl.constexpr,
        biased: tl.constexpr,
        block_rows: tl.constexpr,
        block_outputs: tl.constexpr,
        block_bytes: tl.constexpr,
    ):
        row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        is_row = row < rows
        column = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
        is_column = column < outputs
        x_begin = x + row.to(tl.int64)[:, None] * x_stride
        begin = codes + column.to(tl.int64)[None, :] * row_bytes
        total = tl.zeros((block_rows, block_outputs), dtype=tl.float32)
        for at in range(0, row_bytes, block_bytes):
            byte = at + tl.arange(0, block_bytes)
            inside = byte < row_bytes
            of_tile = inside[:, None] & is_column[None, :]
            stored = tl.load(begin + byte[:, None], mask=of_tile, other=0)
            # The column of the input that a byte's code, or its lower one, is multiplied with.
            place = byte if bits == 8 else byte // 16 * 32 + byte % 16
            part = (place // group)[:, None] * outputs + column[None, :]
            scale = tl.load(scales + part, mask=of_tile, other=0.0).to(tl.float32)
            zero = 1 << (bits - 1)
            if has_zeros:
                zero = tl.load(zeros + part, mask=of_tile, other=0).to(tl.float32)
            for half in tl.static_range(8 // bits):
                code = stored
                if bits == 4:
                    code = stored >> 4 if half else stored & 15
                number = (
                    tl.load(table + code.to(tl.int32)) if has_table else code.to(tl.float32) - zero
                )
                left = tl.load(
                    x_begin + place[None, :] + 16 * half,
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
