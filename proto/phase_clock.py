"""How long each part of a process's start took, by the clock that all processes share.

Owns the marks between the parts. They begin where the parent started the process, so that the
first one has Python's own start in it.
"""

import time

from proto.lifecycle import Phase


class PhaseClock:
    """begun: seconds of the monotonic clock."""

    def __init__(self, begun: float) -> None:
        self._begun = self._last = begun
        self._phases: list[Phase] = []

    def end(self, what: str) -> None:
        """What was done since the last mark."""
        now = time.monotonic()
        self._phases.append(Phase(what, now - self._last))
        self._last = now

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._begun

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All that have ended, in order."""
        return tuple(self._phases)
