"""Norms over the last dimension.

    RMSNorm     x / sqrt(mean(x²) + eps) * weight                 (Zhang and Sennrich, 2019)
    LayerNorm   the same of x - mean(x), plus a bias if there is one          (Ba et al., 2016)

Computed in float32 and rounded once. `Device.norm` makes one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class NormWeight:
    """What a norm multiplies by and adds: weight [size], bias [size] or None.

    The weight may be wider than the rows: its precision then counts until the result is rounded.
    is_layer_norm: LayerNorm instead of RMSNorm. Only a LayerNorm has a bias.
    """

    weight: torch.Tensor
    eps: float
    is_layer_norm: bool = False
    bias: torch.Tensor | None = None


class Norm(ABC):
    """An RMSNorm or LayerNorm with its weight."""

    def __init__(self, weight: NormWeight) -> None:
        self.weight = weight

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., size] as a new contiguous tensor of its shape and dtype."""

    @abstractmethod
    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [N, size] plus the norm of x, both contiguous, in residual's memory."""

    def with_mean_square(self, x: torch.Tensor, mean_square: torch.Tensor) -> torch.Tensor:
        """Return the RMSNorm of x [..., size], a part of wider rows of which the mean is given."""
        scale = torch.rsqrt(mean_square + self.weight.eps)
        return (x.float() * scale * self.weight.weight).to(x.dtype)
