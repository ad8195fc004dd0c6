"""How often processes may be started again. Owns the count; starts nothing."""

import time
from collections.abc import Callable
from typing import Final

_FREE: Final = 2
_FIRST: Final = 0.25
_LONGEST: Final = 4.0
_FORGIVEN_SECONDS: Final = 600.0


class RestartBudget:
    """How often in a row processes may be started again, and how soon.

        restarts so far   0  1  2    3    4  5  6  …
        seconds to wait   0  0  0.25 0.5  1  2  4  4

    "In a row" is without a completed step in between. What happened long ago does
    not count either: an idle daemon completes no step for days. most: in a row.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._spent = 0
        self._last = 0.0

    @property
    def exhausted(self) -> bool:
        """One more is too much."""
        self._forget_old()
        return self._spent >= self.most

    def spend(self) -> float:
        """Count a restart; returns the seconds to wait before it."""
        self._forget_old()
        self._last = self._clock()
        self._spent += 1
        if self._spent <= _FREE:
            return 0.0
        return float(min(_LONGEST, _FIRST * 2 ** (self._spent - _FREE - 1)))

    def renew(self) -> None:
        """A step was completed."""
        self._spent = 0

    def _forget_old(self) -> None:
        if self._clock() - self._last > _FORGIVEN_SECONDS:
            self._spent = 0
