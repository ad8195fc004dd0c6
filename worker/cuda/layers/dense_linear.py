"""Linear layers with dense weights on a GPU, for --batch-invariant and for products of heads."""

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F

from worker.layers.linear import DenseLinear, HeadLinears, Linear

FIXED_ROWS: Final = 128
"""Rows of each product of FixedRowsLinear. By the ratio of FLOPs to bytes, 128 rows take little
longer than one; a step of 1,024 rows reads the weight 8 times."""


class FixedRowsLinear(Linear):
    """The weight [out, in] as it is; a row has the same bits in a batch of any size.

    A library chooses kernels and the order of their sums by the number of rows. Here each product
    has FIXED_ROWS of them, of which the last ones may be zeros.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = len(x)
        padded = F.pad(x, (0, 0, 0, -num_rows % FIXED_ROWS))
        output = x.new_empty(len(padded), len(self.weight))
        for first in range(0, len(padded), FIXED_ROWS):
            rows = slice(first, first + FIXED_ROWS)
            output[rows] = F.linear(padded[rows], self.weight, self._bias)
        return output[:num_rows]


class StackedHeadLinears(HeadLinears):
    """Dense products of all heads in one call; their weights are kept only in it."""

    def __init__(self, linears: Sequence[DenseLinear]) -> None:
        super().__init__(())
        # [heads, in, out]
        self._stacked = torch.stack([each.weight for each in linears]).transpose(1, 2)

    def into(self, x: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(torch.bmm(x.transpose(0, 1), self._stacked).transpose(0, 1))
