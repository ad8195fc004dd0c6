"""Linear layers, x @ weight.T + bias.

A device has layers of its own for the formats of its weights (worker/cpu/linear.py,
worker/cuda/layers). ResidualLinear ends an attention or an MLP. VocabParallelHead is the head of a
model whose ranks hold the rows of some tokens each.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from worker.layers.norm import Norm
from worker.parallel.group import RankGroup


class Linear(ABC):
    """x @ weight.T + bias."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] to a new contiguous [N, out]."""

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product to out [N, out], whose rows may be a stride apart."""
        out.copy_(self(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [N, out] plus the product of x [N, in]; may reuse residual's memory."""
        return residual.add_(self(x))


class DenseLinear(Linear):
    """The weight [out, in] as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self._transposed = weight.t()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        residual.addmm_(x, self._transposed)
        return residual if self._bias is None else residual.add_(self._bias)


class HeadLinears:
    """A product for each head: x [T, heads, in] to [T, heads, out], with weights of their own."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = linears

    def into(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Write the products to output [T, heads, out], whose heads may be a stride apart."""
        for head, linear in enumerate(self.linears):
            linear.into(x[:, head], output[:, head])


class PartOutput:
    """What happens to the output of an attention or MLP while it is added to the residual.

    group: the ranks, each of which computed a summand. norm: norm of the output, in models normed
    after each part (Gemma 2, section 2), or None.

    Sums over ranks are taken in float32, in rank order on every rank, and rounded once: all ranks
    go on with the same bits, and a row does not depend on the rows beside it (Shoeybi et al.,
    Megatron-LM, section 3).
    """

    def __init__(self, group: RankGroup, norm: Norm | None = None) -> None:
        self.group = group
        self.norm = norm

    @property
    def is_plain(self) -> bool:
        """Whether the output is added as it is."""
        return self.norm is None and self.group.size == 1

    def add_to(self, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return residual plus output, both [T, hidden]; may reuse residual's memory."""
        if self.norm is not None:
            return self.norm.add_to(residual, self._sum_over_ranks(output))
        if self.group.size == 1:
            return residual.add_(output)
        total = residual.float()  # the residual itself if it is float32
        for summand in self.group.gather(output).unbind():
            total += summand
        return residual.copy_(total) if total is not residual else residual

    def _sum_over_ranks(self, output: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return output
        return sum_in_float32(self.group.gather(output)).to(output.dtype)


class ResidualLinear:
    """The product that ends an attention or MLP. Its bias, if any, is that of one rank only."""

    def __init__(self, linear: Linear, output: PartOutput) -> None:
        self.linear = linear
        self.output = output
        if output.is_plain:
            self.add_to = linear.add_to  # type: ignore[method-assign]  # one fused product

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.output.add_to(residual, self.linear(x))


def sum_in_float32(summands: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first dimension, added in order; a new float32 tensor."""
    first, *others = summands.unbind()
    total = first.to(torch.float32, copy=True)
    for summand in others:
        total += summand
    return total


class VocabParallelHead(Linear):
    """Logits of all tokens; each rank computes those of its range of `vocab`."""

    def __init__(self, linear: Linear, group: RankGroup, vocab: Sequence[range]) -> None:
        self._linear = linear
        self._group = group
        self._sizes = [len(tokens) for tokens in vocab]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        own = self._linear(x)
        # ranks  | 0 … 33 | 34 … 66 · | 67 … 99 · |    all as wide as the widest
        padded = own.new_zeros(len(own), max(self._sizes))
        padded[:, : own.shape[1]] = own
        parts = zip(self._group.gather(padded), self._sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in parts], dim=1)
