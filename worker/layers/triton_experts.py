"""The experts of a mixture as Triton kernels: one grouped product for all of them.

Weights are dense stacks, or stacks of codes, whose kernel is that of triton_codes.py.

Pairs of a row and one of its experts are sorted by expert. A program multiplies a block of pairs of
one expert with a tile of its weight; blocks of pairs do not cross experts:

    pairs    | expert 0: 5 rows       | expert 2: 2 rows |
    blocks   [0 1 2 3] [4 - - -]      [5 6 - -]             of 4 pairs

The number of blocks is not known on the host, so as many programs are launched as there can be, and
those beyond the last block return at once. Nothing waits for the device.
"""

import functools
import os
from dataclasses import dataclass
from typing import Any, Final

import torch

from worker.layers.activation import Activation, Gate, make_gate
from worker.layers.experts import StackedWeights
from worker.layers.scratch import RowBuffer
from worker.layers.triton_codes import CodedExperts, CodedWeight, GroupedCodedProduct

_MANY_ROWS_FROM: Final = 24
"""Rows of an expert from which larger tiles are faster, on an H100."""
_FEW_PAIRS: Final = 128
_MANY_PAIRS: Final = 1024
"""Pairs that a program of the sort examines at a time, for few pairs and for more."""
_COMBINED: Final = 1024
"""Columns of a sum of experts that a program computes."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of the grouped product multiplies, and how it is compiled.

    rows, outputs, inputs: of a block. warps, stages: of 32 threads, and of loads ahead.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


_FEW_ROWS: Final = Tile(16, 64, 256, 4, 3)
_MANY_ROWS: Final = Tile(64, 128, 64, 8, 3)
"""The fastest, or within 2 % of it, of 16 for mixtures of 8 and of 128 experts on an H100."""


@dataclass(frozen=True, slots=True)
class PairBlocks:
    """Pairs sorted by expert, and the blocks of the grouped product; tensors on the device.

    rows: int64 [pairs], the row of each sorted pair; those of other ranks' experts come last.
    identity: int64 [pairs], 0, 1, 2, …, the rows of a product whose input is sorted already.
    sorted_index: int32 [pairs], where each pair is among the sorted ones, -1 for another rank's.
    experts, first, end: int32 [blocks], the expert of each block and its sorted pairs
    [first, end); unused blocks are empty.
    """

    rows: torch.Tensor
    identity: torch.Tensor
    sorted_index: torch.Tensor
    experts: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor

    @staticmethod
    def empty(chosen: torch.Tensor, num_experts: int, block: int) -> "PairBlocks":
        """Return unwritten pairs, with as many blocks as the experts of `chosen` can need."""
        pairs = chosen.numel()
        most = min(pairs, -(-pairs // block) + min(num_experts, pairs) - 1) if pairs else 0
        rows, identity = (chosen.new_empty(pairs, dtype=torch.int64) for _ in range(2))
        blocks = (chosen.new_empty(most, dtype=torch.int32) for _ in range(3))
        return PairBlocks(rows, identity, chosen.new_empty(pairs, dtype=torch.int32), *blocks)


class TritonExperts:
    """Experts as stacked tensors or codes, on any GPU."""

    def __init__(
        self, stacked: StackedWeights | CodedExperts, activation: Activation, first: int = 0
    ) -> None:
        """first: as in DenseExperts."""
        self._stacked = stacked
        self._first = first
        down = stacked.down.codes if isinstance(stacked.down, CodedWeight) else stacked.down
        self._num_experts = len(down)
        self._gate: Gate = make_gate(activation, down.device)
        self._inner = RowBuffer(_columns(stacked.down))
        self._multiply_codes = GroupedCodedProduct()

    @functools.cached_property
    def _kernel(self) -> Any:
        return _grouped_kernel(os.environ.get("TRITON_INTERPRET"))

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        stacked, (num_rows, top_k) = self._stacked, chosen.shape
        per_expert = num_rows * top_k // self._num_experts
        tile = _FEW_ROWS if per_expert < _MANY_ROWS_FROM else _MANY_ROWS
        pairs = PairBlocks.empty(chosen, self._num_experts, tile.rows)
        self._sort(chosen, pairs, tile.rows)
        gate_up = x.new_empty(num_rows * top_k, _outputs(stacked.gate_up))
        self._multiply(x, pairs, pairs.rows, stacked.gate_up, stacked.gate_up_bias, gate_up, tile)
        inner = self._gate(gate_up, self._inner.rows(gate_up))
        output = inner.new_empty(num_rows * top_k, _outputs(stacked.down), dtype=torch.float32)
        self._multiply(inner, pairs, pairs.identity, stacked.down, stacked.down_bias, output, tile)
        total = output.new_empty(num_rows, output.shape[1])
        self._combine(output, weights, pairs, total)
        return total

    def _sort(self, chosen: torch.Tensor, pairs: PairBlocks, block: int) -> None:
        """Write the pairs of chosen int64 [T, top_k], sorted by expert, in blocks of `block`."""
        assert chosen.is_contiguous()
        num_pairs, num_experts = chosen.numel(), self._num_experts
        if num_pairs:
            _sort_kernel(os.environ.get("TRITON_INTERPRET"))[(num_experts + 1,)](
                chosen,
                pairs.rows,
                pairs.identity,
                pairs.sorted_index,
                pairs.experts,
                pairs.first,
                pairs.end,
                num_pairs,
                chosen.shape[1],
                self._first,
                num_experts,
                len(pairs.experts),
                bins=1 << (num_experts + 1).bit_length(),
                block_size=block,
                chunk_size=_FEW_PAIRS if num_pairs <= _FEW_PAIRS else _MANY_PAIRS,
            )

    def _combine(
        self, output: torch.Tensor, weights: torch.Tensor, pairs: PairBlocks, total: torch.Tensor
    ) -> None:
        """Write the weighted sums of each row's experts, in their order, to `total`.

        output: float32 [pairs, hidden], sorted. weights: [T, top_k]. total: float32 [T, hidden].
        """
        num_rows, hidden = total.shape
        if num_rows:
            grid = num_rows, -(-hidden // _COMBINED)
            _combine_kernel(os.environ.get("TRITON_INTERPRET"))[grid](
                output,
                weights.contiguous(),
                pairs.sorted_index,
                total,
                hidden,
                weights.shape[1],
                block_size=_COMBINED,
            )

    def _multiply(
        self,
        x: torch.Tensor,
        pairs: PairBlocks,
        rows: torch.Tensor,
        weight: torch.Tensor | CodedWeight,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        tile: Tile,
    ) -> None:
        """Write the product of x[rows[i]] and the weight of pair i's expert to out[i]."""
        if isinstance(weight, CodedWeight):
            self._multiply_codes(x, pairs, rows, weight, bias, out, tile.rows)
            return
        _, outputs, inputs = weight.shape
        assert x.stride(1) == 1
        assert weight.is_contiguous()
        self._kernel[(len(pairs.experts), -(-outputs // tile.outputs))](
            x,
            rows,
            pairs.experts,
            pairs.first,
            pairs.end,
            weight,
            weight if bias is None else bias,
            out,
            x.stride(0),
            outputs,
            inputs,
            biased=bias is not None,
            block_rows=tile.rows,
            block_outputs=tile.outputs,
            block_inputs=tile.inputs,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _outputs(weight: torch.Tensor | CodedWeight) -> int:
    return weight.out_features if isinstance(weight, CodedWeight) else weight.shape[1]


def _columns(weight: torch.Tensor | CodedWeight) -> int:
    return weight.in_features if isinstance(weight, CodedWeight) else weight.shape[2]


@functools.cache
def _grouped_kernel(interpreted: str | None = None) -> Any:
    """Return the kernel of the grouped product; interpreted: as in triton_kernels.py."""
    import triton
    import triton.language as tl

    def multiply_block(  # type: ignore[no-untyped-def]
        x,
        rows,
        experts,
        firsts,
        ends,
        weight,
        bias,
        out,
        x_stride,
        outputs,
        inputs,
        biased: tl.constexpr,
        block_rows: tl.constexpr,
        block_outputs: tl.constexpr,
        block_inputs: tl.constexpr,
    ):
        """Write a tile [block_rows, block_outputs] of the grouped product to `out`.

        Grid: (blocks, tiles of outputs). x: [T, inputs], its rows x_stride apart. rows: int64
        [pairs]. experts, firsts, ends: int32 [blocks], as in PairBlocks. weight: [experts, outputs,
        inputs]. bias: [experts, outputs]. out: [pairs, outputs].
        """
        block = tl.program_id(0)
        first = tl.load(firsts + block)
        end = tl.load(ends + block)
        if first < end:
            expert = tl.load(experts + block).to(tl.int64)
            pair = first + tl.arange(0, block_rows)
            is_pair = pair < end
            row = tl.load(rows + pair, mask=is_pair, other=0)
            column = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
            is_column = column < outputs
            offset = tl.arange(0, block_inputs)
            x_begin = x + row[:, None] * x_stride + offset[None, :]
            begin = weight + (expert * outputs + column[None, :]) * inputs + offset[:, None]
            total = tl.zeros((block_rows, block_outputs), dtype=tl.float32)
            for start in range(0, inputs, block_inputs):
                inside = offset < inputs - start
                left = tl.load(x_begin + start, mask=is_pair[:, None] & inside[None, :], other=0.0)
                right = tl.load(begin + start, mask=inside[:, None] & is_column[None, :], other=0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
            if biased:
                added = tl.load(bias + expert * outputs + column, mask=is_column, other=0.0)
                total += added.to(tl.float32)[None, :]
            to = out + pair.to(tl.int64)[:, None] * outputs + column[None, :]
            tl.store(to, total.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])

    return triton.jit(multiply_block)


@functools.cache
def _sort_kernel(interpreted: str | None = None) -> Any:
    """Return the kernel that sorts pairs; a program writes the pairs and blocks of one expert.

    The last program writes those of other ranks' experts, and empties unused blocks. Each counts
    the pairs of all experts itself, so that one launch is enough.
    """
    import triton
    import triton.language as tl

    def sort_pairs(  # type: ignore[no-untyped-def]
        chosen,
        rows,
        identity,
        sorted_index,
        experts,
        firsts,
        ends,
        num_pairs,
        top_k,
        first_expert,
        num_experts,
        num_blocks,
        bins: tl.constexpr,
        block_size: tl.constexpr,
        chunk_size: tl.constexpr,
    ):
        """Write the sorted pairs and the blocks of this program's expert, as in PairBlocks.

        Grid: (num_experts + 1,). chosen: int64 [T, top_k], the experts of all ranks, of which this
        one has num_experts from first_expert on. Counts have a bin for each of these, one for
        other ranks' experts and one for what is behind the last pair; bins: this number, or the
        next power of two above. block_size: pairs of a block. chunk_size: pairs read at a time.
        """
        own = tl.program_id(0)
        bin_index = tl.arange(0, bins)
        counts = tl.zeros((bins,), dtype=tl.int32)
        for first_pair in range(0, num_pairs, chunk_size):
            pair = first_pair + tl.arange(0, chunk_size)
            expert = tl.load(chosen + pair, mask=pair < num_pairs, other=0).to(tl.int32)
            expert -= first_expert
            expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)
            expert = tl.where(pair < num_pairs, expert, num_experts + 1)
            counts += tl.histogram(expert, bins)
        start = tl.sum(tl.where(bin_index < own, counts, 0), axis=0)
        count = tl.sum(tl.where(bin_index == own, counts, 0), axis=0)
        needed = tl.where(bin_index < num_experts, (counts + block_size - 1) // block_size, 0)
        first_block = tl.sum(tl.where(bin_index < own, needed, 0), axis=0)
        next_index = start
        for first_pair in range(0, num_pairs, chunk_size):
            pair = first_pair + tl.arange(0, chunk_size)
            expert = tl.load(chosen + pair, mask=pair < num_pairs, other=0).to(tl.int32)
            expert -= first_expert
            expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)
            is_own = (expert == own) & (pair < num_pairs)
            index = next_index + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
            tl.store(rows + index, (pair // top_k).to(tl.int64), mask=is_own)
            tl.store(identity + index, index.to(tl.int64), mask=is_own)
            tl.store(sorted_index + pair, tl.where(own < num_experts, index, -1), mask=is_own)
            next_index += tl.sum(is_own.to(tl.int32), axis=0)
        if own < num_experts:
            for own_block in range(0, (count + block_size - 1) // block_size):
                block = first_block + own_block
                first = start + own_block * block_size
                tl.store(experts + block, own)
                tl.store(firsts + block, first)
                tl.store(ends + block, tl.minimum(first + block_size, start + count))
        else:
            for first_unused in range(first_block, num_blocks, chunk_size):
                unused = first_unused + tl.arange(0, chunk_size)
                is_block = unused < num_blocks
                tl.store(experts + unused, tl.zeros((chunk_size,), tl.int32), mask=is_block)
                tl.store(firsts + unused, tl.zeros((chunk_size,), tl.int32), mask=is_block)
                tl.store(ends + unused, tl.zeros((chunk_size,), tl.int32), mask=is_block)

    return triton.jit(sort_pairs)


@functools.cache
def _combine_kernel(interpreted: str | None = None) -> Any:
    """Return the kernel that sums the experts of a row; interpreted: as in triton_kernels.py."""
    import triton
    import triton.language as tl

    def combine(  # type: ignore[no-untyped-def]
        output,
        weights,
        sorted_index,
        total,
        hidden,
        top_k,
        block_size: tl.constexpr,
    ):
        """Write the weighted sum of a row's experts to `total`, for a block of columns.

        Grid: (T, blocks of columns). Arrays are those of `TritonExperts._combine`; sorted_index:
        int32 [T, top_k]. Experts of other ranks add nothing.
        """
        row = tl.program_id(0)
        column = tl.program_id(1) * block_size + tl.arange(0, block_size)
        is_column = column < hidden
        result = tl.zeros((block_size,), dtype=tl.float32)
        for choice in range(0, top_k):
            pair = row * top_k + choice
            index = tl.load(sorted_index + pair).to(tl.int64) + tl.zeros_like(column)
            weight = tl.load(weights + pair).to(tl.float32)
            found = tl.load(
                output + index.to(tl.int64) * hidden + column,
                mask=is_column & (index >= 0),
                other=0.0,
            )
            result += weight * found
        tl.store(total + row.to(tl.int64) * hidden + column, result, mask=is_column)

    return triton.jit(combine)
