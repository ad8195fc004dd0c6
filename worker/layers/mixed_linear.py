"""A product that has its weight in two forms, and takes the one that is faster for so many rows.

Few rows are bound by the bytes of the weight, many by the arithmetic. The arithmetic of the two
forms differs, so what a request's tokens are may depend on what else is in its steps.
"""

import torch

from worker.layers.linear import Linear


class Crossover:
    """The least number of rows for which the second form is taken; all layers share one."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


class MixedLinear:
    """`few` below the crossover, `many` from it on."""

    def __init__(self, few: Linear, many: Linear, crossover: Crossover) -> None:
        self.few = few
        self.many = many
        self._crossover = crossover

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        form = self.few if x.shape[0] < self._crossover.rows else self.many
        return form(x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        form = self.few if x.shape[0] < self._crossover.rows else self.many
        return form.add_to(residual, x)
