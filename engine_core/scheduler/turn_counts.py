"""Whether jobs that have had many turns have few before them.

Owns sums over jobs that are over. A job of N turns was seen at k = 1 … N, with N - k to come;
η = −Corr(k, N − k) is 1 where all jobs have the same number of turns, and less where
they differ: then more jobs than seemed so will soon leave room, and waiting in the queue again
costs less (arXiv 2511.02230, by whose rule the delay of a job in the queue counts η times).
"""

import math
from typing import Final

_MEMORY: Final = 4096.0
"""Turns after which the sums are halved."""


class TurnCounts:
    """Sums of weights, k, N - k, their squares and their product."""

    def __init__(self) -> None:
        self._sums = [0.0] * 6

    def learn(self, num_turns: int) -> None:
        """A job is over that had so many turns."""
        n = float(num_turns)
        total = n * (n + 1) / 2  # of k
        squares = n * (n + 1) * (2 * n + 1) / 6
        rest = n * n - total
        rest_squares = n**3 - 2 * n * total + squares
        sums = self._sums
        for index, each in enumerate((n, total, rest, squares, rest_squares, n * total - squares)):
            sums[index] += each
        if sums[0] > _MEMORY:
            self._sums = [each / 2 for each in sums]

    @property
    def eta(self) -> float:
        """0 to 1; 1 until there is something to correlate."""
        n, k, rest, kk, rr, kr = self._sums
        variance = (n * kk - k * k) * (n * rr - rest * rest)
        if variance <= 0.0:
            return 1.0
        return min(1.0, max(0.0, -(n * kr - k * rest) / math.sqrt(variance)))
