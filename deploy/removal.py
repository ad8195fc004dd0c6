"""How a process that hangs is taken away: it shows where it is, and then it is killed.

    cut off ── 0.1 s ──▶ SIGUSR1, SIGCONT ── 0.5 s ──▶ SIGKILL

It is cut off from the others before anything is done to it, because one that was only
stopped goes on where it was for the moment in which it shows its stacks.
"""

import signal
import time
from collections.abc import Callable
from typing import Final, Protocol

CUT_OFF_SECONDS: Final = 0.1
"""For the others to hear that they have nothing to do with it any more."""
STACKS_SECONDS: Final = 0.5
"""For a handler to run in a process that may not be scheduled often."""
_PATIENCE_SECONDS: Final = 10.0


class Removable(Protocol):
    """A process that can be ended."""

    def has_ended(self) -> bool: ...

    def show_stacks(self) -> None: ...

    def signal(self, number: signal.Signals) -> None: ...


class Removal:
    """Of one process, from the moment at which the others have been told. since: that moment."""

    def __init__(self, process: Removable, clock: Callable[[], float] = time.monotonic) -> None:
        self._process = process
        self._clock = clock
        self.since = clock()
        until_stacks = self.since + CUT_OFF_SECONDS
        self._steps = [
            (until_stacks, process.show_stacks),
            (until_stacks + STACKS_SECONDS, lambda: process.signal(signal.SIGKILL)),
        ]

    @property
    def done(self) -> bool:
        """It is gone."""
        return self._process.has_ended()

    @property
    def overdue(self) -> bool:
        """Killed long ago and still there: it is stuck in the kernel, and nothing here helps."""
        return self._clock() - self.since > _PATIENCE_SECONDS and not self.done

    def seconds_to_next_step(self) -> float | None:
        """None when nothing is left but waiting."""
        return max(0.0, self._steps[0][0] - self._clock()) if self._steps else None

    def press(self) -> None:
        """Take the steps whose time has come."""
        while self._steps and self._steps[0][0] <= self._clock():
            self._steps.pop(0)[1]()
