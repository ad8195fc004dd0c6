"""A product that has its weight in two forms, and takes the one that is faster for so many rows.

Few rows are bound by the bytes of the weight, many by the arithmetic. The arithmetic of the two
forms differs, so what a request's tokens are may depend on what else is in its steps.
"""

import torch

from worker.layers.linear import Linear


class MixedLinear:
    """`few` below so many rows, `many` from there on."""

    def __init__(self, few: Linear, many: Linear, many_from: int) -> None:
        self._few = few
        self._many = many
        self._many_from = many_from

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        form = self._few if x.shape[0] < self._many_from else self._many
        return form(x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        form = self._few if x.shape[0] < self._many_from else self._many
        return form.add_to(residual, x)
