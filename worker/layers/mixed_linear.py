"""A product that has its weight in two forms, and takes the one that is faster for so many rows.

Few rows are bound by the bytes of the weight, many by the arithmetic. The arithmetic of the two
forms differs, so what a request's tokens are may depend on what else is in its steps.
"""

import torch

from worker.layers.linear import Linear


class MixedLinear:
    """`few` below so many rows, `many` from there on."""

    def __init__(self, few: Linear, many: Linear, many_from: int) -> None:
        self.many_from = many_from
        self._few = few
        self._many = many

    def form(self, num_rows: int) -> Linear:
        """What multiplies so many rows."""
        return self._few if num_rows < self.many_from else self._many

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(x.shape[0])(x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.form(x.shape[0]).add_to(residual, x)
