"""Products with weights of 4 or 8 bits a number by a Triton kernel, on any GPU.

A program multiplies a block of rows with a tile of the weight: codes become numbers of the
activations' dtype in registers, which are those that the whole weight would be converted to, and
products are summed in float32. So a weight takes the memory of its codes. The same kernel
multiplies with the experts of a mixture, whose weights are stacked: a program then multiplies a
block of pairs with a tile of the weight of their expert (triton_experts.py).

A byte of 4-bit codes has two columns that are 16 apart, which are multiplied one after the other:

    columns   0 … 15 | 16 … 31 | 32 … 47 | 48 … 63
    bytes     low      high      low       high
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch

from worker.layers.embedding import EmbeddingTable
from worker.layers.linear import Linear

if TYPE_CHECKING:
    from worker.cuda.layers.triton_experts import PairBlocks

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

    def embedding_table(self, dtype: torch.dtype) -> EmbeddingTable:
        """Return an embedding, perhaps a tied head, whose rows are converted on use."""
        return EmbeddingTable(dtype, lambda token_ids: self.rows(token_ids, dtype))

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


class TritonCodedLinear(Linear):
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self._out_features)
        for weight, columns in self._parts:
            order = weight.column_order
            ordered = x if order is None else x.index_select(1, order)
            bias = None if self._bias is None else self._bias[columns]
            self._multiply(ordered, weight, bias, out[:, columns])
        return out

    def _multiply(
        self, x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Write the product of x [N, in] to out [N, out]; rows of both may be a stride apart."""
        block = _FEW_ROWS if len(x) < _MANY_ROWS else _MANY_ROWS
        multiply_codes(-(-len(x) // block), x, weight, bias, out, block)


def multiply_codes(
    num_blocks: int,
    x: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    block: int,
    pairs: "PairBlocks | None" = None,
    rows: torch.Tensor | None = None,
) -> None:
    """Queue a product of num_blocks blocks of `block` rows of x [N, in], or of pairs with experts.

    Writes the products to out [N, out]; rows of x and out may be a stride apart. bias: [out].

    pairs: of rows with their experts; `weight` is then a stack without a column order, bias is
    [experts, out], and the product of x[rows[i]] and the weight of pair i's expert goes to out[i].
    """
    from worker.cuda.kernels.products import multiply_tile

    assert x.shape[1] == weight.in_features
    assert x.stride(1) == out.stride(1) == 1
    assert all(
        each is None or each.is_contiguous() for each in (weight.codes, weight.scales, weight.zeros)
    )
    # The kernel takes a pointer for every tensor. Any tensor stands in for one that is absent; the
    # compile-time flags below keep the kernel from reading it.
    absent = weight.codes
    of_pairs = (absent,) * 4 if pairs is None else (rows, pairs.experts, pairs.first, pairs.end)
    multiply_tile[(num_blocks, -(-weight.out_features // _OUTPUTS))](
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
