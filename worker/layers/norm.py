"""RMSNorm (Zhang and Sennrich, 2019)."""

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in float32.

    The weight may be wider than x: its precision then counts until the result is rounded.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._size = list(weight.shape)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of x's shape and dtype."""
        wide = x.to(self._weight.dtype)
        return F.rms_norm(wide, self._size, self._weight, self._eps).to(x.dtype)
