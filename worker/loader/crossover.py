"""From how many rows on the second of two forms is the faster one: measured, not guessed.

Owns the measurement, which takes the products of a few layers in turn, so that the weights
come from memory as in a real step. Knows nothing of how they are held.
"""

import time
from collections.abc import Sequence
from typing import Final, Protocol

import torch

from worker.layers.linear import Linear

ROWS: Final = (2, 4, 8, 16, 32, 64, 128, 256)
"""Where the forms are compared. The crossover is one of these, or past all of them."""
NEVER: Final = 1 << 62
"""As a crossover: no step has so many rows."""
_REPETITIONS: Final = 3
_CLEARLY: Final = 0.95
"""What the second form's time must be of the first's to be taken: a draw goes to the first."""


class Stopwatch(Protocol):
    """Seconds that the products of some rows take, all of them one after the other."""

    def __call__(self, linears: Sequence[Linear], x: torch.Tensor) -> float: ...


def best_of(linears: Sequence[Linear], x: torch.Tensor) -> float:
    """The least of a few repetitions: what disturbs a measurement makes it longer."""
    return min(_seconds(linears, x) for _ in range(_REPETITIONS))


@torch.inference_mode()
def measured_crossover(
    few: Sequence[Linear],
    many: Sequence[Linear],
    in_features: int,
    dtype: torch.dtype,
    seconds: Stopwatch = best_of,
) -> int:
    """The least of ROWS from which on `many` is always the faster; NEVER where it is not.

    few, many: the same products in both forms, all of them of [N, in_features].
    """
    found = NEVER
    for rows in reversed(ROWS):
        x = torch.ones(rows, in_features, dtype=dtype)
        if seconds(many, x) > _CLEARLY * seconds(few, x):
            break
        found = rows
    return found


def _seconds(linears: Sequence[Linear], x: torch.Tensor) -> float:
    started = time.perf_counter()
    for linear in linears:
        linear(x)
    return time.perf_counter() - started
