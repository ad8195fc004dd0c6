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

_FEW_ROWS: Final = 16
_MANY_ROWS: Final = 64
_OUTPUTS: Final = 64
_INPUTS: Final = 64


@dataclass(frozen=True, slots=True)
class PairBlocks:
    """Pairs sorted by expert, and the blocks of the grouped product; tensors on the device.

    order: int64 [pairs], the pair at each sorted place; those of other ranks' experts come last.
    rows: int64 [pairs], the row of each sorted pair. experts, first, end: int32 [blocks], the
    expert of each block and its sorted pairs [first, end); unused blocks are empty.
    """

    order: torch.Tensor
    rows: torch.Tensor
    experts: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor


def sort_pairs(chosen: torch.Tensor, first_expert: int, num_experts: int, block: int) -> PairBlocks:
    """Return the blocks of `block` pairs of experts [first_expert, first_expert + num_experts).

    chosen: int64 [T, top_k].
    """
    pairs = chosen.numel()
    own = (chosen - first_expert).flatten()
    is_own = (own >= 0) & (own < num_experts)
    sorted_experts, order = torch.where(is_own, own, num_experts).sort(stable=True)
    numbers = torch.arange(num_experts + 1, device=chosen.device)
    starts = torch.searchsorted(sorted_experts, numbers)  # of each expert, and of foreign pairs
    counts = starts[1:] - starts[:-1]
    block_ends = ((counts + block - 1) // block).cumsum(0)
    most = min(pairs, -(-pairs // block) + min(num_experts, pairs) - 1) if pairs else 0
    blocks = torch.arange(most, device=chosen.device)
    experts = torch.searchsorted(block_ends, blocks, right=True)
    is_used = experts < num_experts
    experts = experts.clamp_max(num_experts - 1)
    first_blocks = block_ends - (counts + block - 1) // block
    first = starts[experts] + (blocks - first_blocks[experts]) * block
    end = torch.minimum(first + block, starts[experts + 1])
    return PairBlocks(
        order,
        order // chosen.shape[1],
        experts.int(),
        torch.where(is_used, first, 0).int(),
        torch.where(is_used, end, 0).int(),
    )


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
        block = _FEW_ROWS if per_expert < _MANY_ROWS else _MANY_ROWS
        pairs = sort_pairs(chosen, self._first, self._num_experts, block)
        gate_up = x.new_zeros(num_rows * top_k, _outputs(stacked.gate_up))
        self._multiply(x, pairs, pairs.rows, stacked.gate_up, stacked.gate_up_bias, gate_up, block)
        inner = self._gate(gate_up, self._inner.rows(gate_up))
        output = inner.new_zeros(num_rows * top_k, _outputs(stacked.down), dtype=torch.float32)
        places = torch.arange(len(inner), device=x.device)
        self._multiply(inner, pairs, places, stacked.down, stacked.down_bias, output, block)
        total = torch.empty_like(output)
        total[pairs.order] = output * weights.flatten()[pairs.order].unsqueeze(1)
        return total.view(num_rows, top_k, -1).sum(1)

    def _multiply(
        self,
        x: torch.Tensor,
        pairs: PairBlocks,
        rows: torch.Tensor,
        weight: torch.Tensor | CodedWeight,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        block: int,
    ) -> None:
        """Write the product of x[rows[i]] and the weight of pair i's expert to out[i]."""
        if isinstance(weight, CodedWeight):
            self._multiply_codes(x, pairs, rows, weight, bias, out, block)
            return
        _, outputs, inputs = weight.shape
        assert x.stride(1) == 1
        assert weight.is_contiguous()
        self._kernel[(len(pairs.experts), -(-outputs // _OUTPUTS))](
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
            block_rows=block,
            block_outputs=_OUTPUTS,
            block_inputs=_INPUTS,
        )


def _outputs(weight: torch.Tensor | CodedWeight) -> int:
    return weight.out_features if isinstance(weight, CodedWeight) else weight.shape[1]


def _columns(weight: torch.Tensor | CodedWeight) -> int:
    return weight.in_features if isinstance(weight, CodedWeight) else weight.shape[2]


@functools.cache
def _grouped_kernel(interpreted: str | None = None) -> Any:
    """Return the kernel; interpreted: as in triton_kernels.py."""
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
            place = tl.arange(0, block_inputs)
            x_begin = x + row[:, None] * x_stride + place[None, :]
            begin = weight + (expert * outputs + column[None, :]) * inputs + place[:, None]
            total = tl.zeros((block_rows, block_outputs), dtype=tl.float32)
            for at in range(0, inputs, block_inputs):
                inside = place < inputs - at
                left = tl.load(x_begin + at, mask=is_pair[:, None] & inside[None, :], other=0.0)
                right = tl.load(begin + at, mask=inside[:, None] & is_column[None, :], other=0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
            if biased:
                added = tl.load(bias + expert * outputs + column, mask=is_column, other=0.0)
                total += added.to(tl.float32)[None, :]
            to = out + pair.to(tl.int64)[:, None] * outputs + column[None, :]
            tl.store(to, total.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])

    return triton.jit(multiply_block)
