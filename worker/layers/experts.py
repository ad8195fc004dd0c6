"""The experts of a mixture: gated MLPs, of which each row is computed by a few.

    DenseExperts        stacked tensors [experts, out, in], in plain torch
    LinearExperts       a pair of linear layers for each expert, in any format of a weight
    FlashInferExperts   stacked tensors, on a GPU of compute capability 9.0 where the library's
                        kernels are prebuilt (flashinfer_kernels.py)
    TritonExperts       stacked tensors and codes, on all GPUs (triton_experts.py)

Rows are sorted by expert, so that each expert multiplies all its rows at once:

    experts of rows   0: 2 0   1: 1 2   2: 2 1
    sorted            0: row 0   1: rows 1 2   2: rows 0 1 2
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from worker.layers.activation import Activation, Gate, make_gate
from worker.layers.linear import Linear
from worker.layers.scratch import RowBuffer


@dataclass(frozen=True, slots=True)
class Expert:
    """The products of one gated MLP; gate_up: hidden to gate ‖ up."""

    gate_up: Linear
    down: Linear


class Experts(Protocol):
    """All experts of a layer that this rank has."""

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of the chosen experts' outputs, a new float32 [T, hidden].

        x: [T, hidden]. weights: float32 [T, top_k]. chosen: int64 [T, top_k], experts of the whole
        layer; those of other ranks add nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class StackedWeights:
    """Weights of all experts: gate_up [experts, 2 * inner, hidden], down [experts, hidden, inner].

    Biases are [experts, 2 * inner] and [experts, hidden], or None.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """How the experts of a layer are divided among ranks.

    first: the number of this rank's first expert among those of all ranks. total: all of them.
    are_whole: a rank has whole experts, else a part of the inner columns of each.
    """

    total: int
    first: int = 0
    rank: int = 0
    size: int = 1
    are_whole: bool = False


class DenseExperts:
    """Experts as stacked tensors, in plain torch."""

    def __init__(self, stacked: StackedWeights, activation: Activation, first: int = 0) -> None:
        """first: the number of the first expert among those of all ranks."""
        self.stacked = stacked
        self._first = first
        num_experts, _, inner = stacked.down.shape
        self._num_experts = num_experts
        self._gate: Gate = make_gate(activation, stacked.down.device)
        self._inner = RowBuffer(inner)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        stacked, top_k = self.stacked, chosen.shape[1]
        # Rows of other ranks' experts are computed by an own one and left out of the sum.
        numbers_here = (chosen - self._first).flatten()
        own = numbers_here.clamp(0, self._num_experts - 1)
        is_foreign = own != numbers_here
        experts, order = own.sort(stable=True)
        numbers = torch.arange(self._num_experts, device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        rows = order // top_k
        gate_up = _multiply_groups(x[rows], stacked.gate_up, ends)
        if stacked.gate_up_bias is not None:
            gate_up += stacked.gate_up_bias[experts]
        inner = self._gate(gate_up, self._inner.rows(gate_up))
        output = _multiply_groups(inner, stacked.down, ends)
        if stacked.down_bias is not None:
            output += stacked.down_bias[experts]
        summands = output.float() * weights.flatten()[order].unsqueeze(1)
        summands.masked_fill_(is_foreign[order].unsqueeze(1), 0.0)
        total = torch.empty_like(summands)
        total[order] = summands
        return total.view(len(x), top_k, -1).sum(1)


def _multiply_groups(x: torch.Tensor, stacked: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return [rows, out]: rows up to ends[i] times the transpose of stacked[i] [out, in]."""
    output = x.new_empty(len(x), stacked.shape[1])
    first = 0
    for weight, end in zip(stacked, ends.tolist(), strict=True):
        if end > first:
            output[first:end] = F.linear(x[first:end], weight)
        first = end
    return output


class LinearExperts:
    """Experts whose products are linear layers of any kind, one after the other; on a CPU."""

    def __init__(
        self,
        experts: Sequence[Expert],
        inner_size: int,
        activation: Activation,
        first: int = 0,
    ) -> None:
        """inner_size: columns of a down projection. first: as in DenseExperts."""
        self.experts = experts
        self.first = first
        self._gate: Gate = make_gate(activation, torch.device("cpu"))
        self._inner = RowBuffer(inner_size)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32)
        for number in sorted(set(chosen.flatten().tolist())):
            if not self.first <= number < self.first + len(self.experts):
                continue
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            expert = self.experts[number - self.first]
            gate_up = expert.gate_up(x[rows])
            inner = self._gate(gate_up, self._inner.rows(gate_up))
            output = expert.down(inner).float() * weights[rows, slots, None]
            total.index_add_(0, rows, output)
        return total
