"""Matrix products with weights that kernels of ours lay out; see packed_weight.py,
rotated_weight.py and bf16_weight.py for the arithmetic.

Owns what makes one product of weights of several types, which lie side by side in its result.
"""

import ctypes
from itertools import accumulate

import torch

from worker.layers.kernel_weight import KernelWeight
from worker.layers.linear import Linear
from worker.layers.packed_weight import PackedWeight


class BlockLinear:
    """One weight [out, in]."""

    def __init__(self, weight: KernelWeight, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    @property
    def parts(self) -> tuple[ctypes.Structure, ...]:
        """As `worker.kernels.Part`; valid as long as this lives."""
        return (self._weight.part(self._bias),)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight.multiply(x, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._weight.multiply_add(residual, x, self._bias)


class BlockHead:
    """The product that ends a model: float32 scores, whatever the activations are."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.empty(x.shape[0], self._weight.out_features, dtype=torch.float32)
        return self._weight.multiply(x, out=result)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._weight.multiply_add(residual, x)


class JoinedLinear:
    """Weights of several types, one below the other: each has a range of the columns.

    out  [ weight 0 | weight 1 | … ]
    """

    def __init__(self, weights: list[PackedWeight], bias: torch.Tensor | None) -> None:
        ends = list(accumulate(weight.out_features for weight in weights))
        self._out_features = ends[-1]
        self._parts = [
            (
                weight,
                slice(end - weight.out_features, end),
                None if bias is None else bias[end - weight.out_features : end],
            )
            for weight, end in zip(weights, ends, strict=True)
        ]

    @property
    def parts(self) -> tuple[ctypes.Structure, ...]:
        """As `worker.kernels.Part`, in order; valid as long as this lives."""
        return tuple(weight.part(bias) for weight, _, bias in self._parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], self._out_features, dtype=x.dtype)
        for weight, columns, bias in self._parts:
            weight.multiply(x, bias, out[:, columns])
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))


def block_linear(weights: list[PackedWeight], bias: torch.Tensor | None) -> Linear:
    """The product of these weights, one below the other, with a bias [out] of x's dtype."""
    if len(weights) == 1:
        return BlockLinear(weights[0], bias)
    return JoinedLinear(weights, bias)
