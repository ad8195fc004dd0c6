"""A circuit breaker: when to stop calling a disk or server that fails.

    closed ──failures in a row──▶ open ──pause has ended──▶ half-open: one failure opens it again
       ▲                            ▲                              │
       └────────── success ─────────┴───── failure: twice as long ─┘

It only counts; the caller decides what a failure is. Not thread-safe.
"""

import time
from collections.abc import Callable
from typing import Final

MAX_BACKOFF: Final = 16
"""Longest pause, as a multiple of the first one."""


class CircuitBreaker:
    """Counts failures in a row and pauses calls after too many of them.

    seconds: length of the first pause. allowed: failures in a row that do not open it.
    """

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
        """Whether calls must be skipped for now."""
        return self._clock() < self._open_until

    @property
    def seconds_left(self) -> float:
        """Seconds until calls are allowed again; 0 if they are allowed now."""
        return max(0.0, self._open_until - self._clock())

    def record_success(self) -> None:
        self._failures = 0
        self._seconds = self._first
        self._open_until = -float("inf")

    def record_failure(self) -> None:
        """Count a failure; while open, failures of earlier calls are ignored."""
        if self.is_open:
            return
        self._failures += 1
        if self._failures > self._allowed:
            self._open_until = self._clock() + self._seconds
            self._seconds = min(2.0 * self._seconds, MAX_BACKOFF * self._first)
