"""The experts of a mixture: gated MLPs, of which each row is computed by a few.

DenseExperts has stacked tensors, LinearExperts a pair of linear layers for each expert, in any
format of a weight. A GPU has kernels for stacks (worker/cuda/layers).

Rows are sorted by expert, so that each expert multiplies all its rows at once:

    experts of rows   0: 2 0   1: 1 2   2: 2 1
    sorted            0: row 0   1: rows 1 2   2: rows 0 1 2
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from worker.layers.activation import Gate
from worker.layers.adapters import StepAdapters
from worker.layers.linear import Linear


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
    """Experts as stacked tensors, in plain torch.

    gate: their activation. first: the number of the first expert among those of all ranks.
    """

    def __init__(self, stacked: StackedWeights, gate: Gate, first: int = 0) -> None:
        self.stacked = stacked
        self.gate = gate
        self.first = first
        self._num_experts = len(stacked.down)

    def __len__(self) -> int:
        return self._num_experts

    def gate_up(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return gate ‖ up of this rank's expert number `index` for rows [N, hidden]."""
        bias = self.stacked.gate_up_bias
        return F.linear(x, self.stacked.gate_up[index], None if bias is None else bias[index])

    def down(self, index: int, inner: torch.Tensor) -> torch.Tensor:
        """Return the output of that expert for rows [N, inner]."""
        bias = self.stacked.down_bias
        return F.linear(inner, self.stacked.down[index], None if bias is None else bias[index])

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        stacked, top_k = self.stacked, chosen.shape[1]
        # Rows of other ranks' experts are computed by an own one and left out of the sum.
        numbers_here = (chosen - self.first).flatten()
        own = numbers_here.clamp(0, self._num_experts - 1)
        is_foreign = own != numbers_here
        experts, order = own.sort(stable=True)
        numbers = torch.arange(self._num_experts, device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        rows = order // top_k
        gate_up = _multiply_groups(x[rows], stacked.gate_up, ends)
        if stacked.gate_up_bias is not None:
            gate_up += stacked.gate_up_bias[experts]
        inner = self.gate(gate_up)
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
    """Experts whose products are linear layers of any kind, one after the other.

    The host reads the choice of experts. Arguments as in DenseExperts.
    """

    def __init__(self, experts: Sequence[Expert], gate: Gate, first: int = 0) -> None:
        self.experts = experts
        self.first = first
        self.gate = gate

    def __len__(self) -> int:
        return len(self.experts)

    def gate_up(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """As in DenseExperts."""
        return self.experts[index].gate_up(x)

    def down(self, index: int, inner: torch.Tensor) -> torch.Tensor:
        """As in DenseExperts."""
        return self.experts[index].down(inner)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        def compute(index: int, rows: torch.Tensor) -> torch.Tensor:
            return self.down(index, self.gate(self.gate_up(index, x[rows])))

        return sum_of_experts(
            x, weights, chosen, range(self.first, self.first + len(self)), compute
        )


def sum_of_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    numbers: range,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return what Experts return, one expert after the other; the host reads the choice.

    numbers: of this rank's experts. compute: returns the output of one of them, by its place in
    this range, for some rows of x.
    """
    total = torch.zeros(x.shape, dtype=torch.float32)
    for number in sorted(set(chosen.flatten().tolist()) & set(numbers)):
        rows, slots = (chosen == number).nonzero(as_tuple=True)
        output = compute(number - numbers.start, rows).float() * weights[rows, slots, None]
        total.index_add_(0, rows, output)
    return total


class AdaptedExperts:
    """Experts to whose products the adapters of a step add their parts.

    base: the experts themselves, which compute a step without adapters. products: numbers of gate ‖
    up and of down of each.
    """

    def __init__(
        self,
        base: DenseExperts | LinearExperts,
        adapters: StepAdapters,
        products: Sequence[tuple[int, int]],
    ) -> None:
        self.base = base
        self.adapters = adapters
        self.products = products

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        if not self.adapters.groups:
            return self.base(x, weights, chosen)

        def compute(index: int, rows: torch.Tensor) -> torch.Tensor:
            base, adapters, (gate_up, down) = self.base, self.adapters, self.products[index]
            with adapters.selecting(rows):
                own = x[rows]
                both = base.gate_up(index, own)
                adapters.add(gate_up, own, both)
                inner = base.gate(both)
                output = base.down(index, inner)
                adapters.add(down, inner, output)
            return output

        numbers = range(self.base.first, self.base.first + len(self.base))
        return sum_of_experts(x, weights, chosen, numbers, compute)
