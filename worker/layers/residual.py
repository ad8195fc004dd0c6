"""What a block adds to the residual: its last product, perhaps normed first."""

from typing import Protocol

import torch

from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm


class ResidualLinear(Protocol):
    """The end of a block; any Linear is one."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [N, out] plus what becomes of x [N, in]; may reuse residual's memory."""
        ...


class NormedAddition:
    """The norm of a product: blocks that are normed before and after (Gemma 2, section 2)."""

    def __init__(self, linear: Linear, norm: RMSNorm) -> None:
        self.linear = linear
        self.norm = norm

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.norm.add_to(residual, self.linear(x))
