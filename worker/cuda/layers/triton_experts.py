"""The experts of a mixture by Triton kernels: one grouped product for all of them.

Weights are dense stacks, or stacks of codes, whose kernel is that of triton_codes.py.

Pairs of a row and one of its experts are sorted by expert. A program multiplies a block of pairs of
one expert with a tile of its weight; blocks of pairs do not cross experts:

    pairs    | expert 0: 5 rows       | expert 2: 2 rows |
    blocks   [0 1 2 3] [4 - - -]      [5 6 - -]             of 4 pairs

The number of blocks is not known on the host, so as many programs are launched as there can be, and
those beyond the last block return at once. Nothing waits for the device.
"""

from dataclasses import dataclass
from typing import Final

import torch

from worker.cuda.layers.triton_codes import CodedExperts, CodedWeight, multiply_codes
from worker.layers.activation import Gate
from worker.layers.experts import StackedWeights

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
    """Experts as stacked tensors or codes, on any GPU. gate, first: as in DenseExperts."""

    def __init__(self, stacked: StackedWeights | CodedExperts, gate: Gate, first: int = 0) -> None:
        self._stacked = stacked
        self._first = first
        down = stacked.down.codes if isinstance(stacked.down, CodedWeight) else stacked.down
        self._num_experts = len(down)
        self._gate = gate

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
        inner = self._gate(gate_up)
        output = inner.new_empty(num_rows * top_k, _outputs(stacked.down), dtype=torch.float32)
        self._multiply(inner, pairs, pairs.identity, stacked.down, stacked.down_bias, output, tile)
        total = output.new_empty(num_rows, output.shape[1])
        self._combine(output, weights, pairs, total)
        return total

    def _sort(self, chosen: torch.Tensor, pairs: PairBlocks, block: int) -> None:
        """Write the pairs of chosen int64 [T, top_k], sorted by expert, in blocks of `block`."""
        from worker.cuda.kernels.products import sort_pairs

        assert chosen.is_contiguous()
        num_pairs, num_experts = chosen.numel(), self._num_experts
        if num_pairs:
            sort_pairs[(num_experts + 1,)](
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
        from worker.cuda.kernels.products import combine

        num_rows, hidden = total.shape
        if num_rows:
            grid = num_rows, -(-hidden // _COMBINED)
            combine[grid](
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
        from worker.cuda.kernels.products import multiply_block

        if isinstance(weight, CodedWeight):
            assert weight.column_order is None
            multiply_codes(len(pairs.experts), x, weight, bias, out, tile.rows, pairs, rows)
            return
        _, outputs, inputs = weight.shape
        assert x.stride(1) == 1
        assert weight.is_contiguous()
        multiply_block[(len(pairs.experts), -(-outputs // tile.outputs))](
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
