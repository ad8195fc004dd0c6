"""When to leave somebody alone who does not answer.

    closed ──failures in a row──▶ open ──its time is over──▶ closed, one failure from being open
       ▲                            ▲                              │
       └────────── success ─────────┴───── failure: twice as long ─┘

Owns only the counting; whoever uses it says what a failure is. One thread at a time.
"""

import time
from collections.abc import Callable
from typing import Final

MOST: Final = 16
"""The longest time open, as a multiple of the first."""


class Breaker:
    """seconds: open for the first time. allowed: failures in a row that do not open it."""

    def __init__(
        self,
        seconds: float,
        allowed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first = seconds
        self._allowed = allowed
        self._clock = clock
        self._seconds = seconds
        self._failures = 0
        self._open_until = -float("inf")

    @property
    def is_open(self) -> bool:
        """Nothing is to be asked."""
        return self._clock() < self._open_until

    @property
    def seconds_left(self) -> float:
        """Until something may be asked; 0 if it may now."""
        return max(0.0, self._open_until - self._clock())

    def succeeded(self) -> None:
        self._failures = 0
        self._seconds = self._first
        self._open_until = -float("inf")

    def failed(self) -> None:
        """Failures of what was asked before it opened count only once."""
        if self.is_open:
            return
        self._failures += 1
        if self._failures > self._allowed:
            self._open_until = self._clock() + self._seconds
            self._seconds = min(2.0 * self._seconds, MOST * self._first)
