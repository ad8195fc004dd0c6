"""How long tools take: from the end of a job's turn to the arrival of its next one.

    tool A    0.2 0.3 0.3 0.4 … 8.1          by tool, the last ones of each
    all       0.2 0.3 … 31 ∞                 of all tools; ∞: the job has never come back

Owns windows of what was observed, of a bounded number of tools. Knows neither jobs nor clocks.

The rule is that of Continuum (arXiv 2511.02230): keep KV for the τ of {0} and the observed
durations for which P(d ≤ τ)·B − τ is largest, where B is what is saved, in seconds. Durations are
those of the tool where there are more than FEW of it, else of all tools; until there are some, as
if drawn from Exp(1), for which that is τ = ln B, or 0 if B ≤ 1.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Final

FEW: Final = 100
"""Samples of a tool that do not yet say more about it than those of all tools."""
FEWEST: Final = 16
"""Samples, of all tools, that say more than the cold start."""
WINDOW: Final = 512
"""Samples of a tool, or of all of them, that are remembered."""
MAX_TOOLS: Final = 128
"""That are told apart; the one that was not seen for longest is forgotten."""


class Durations:
    """The last of them, in seconds; infinite ones are of who has not come back."""

    __slots__ = ("_in_order", "_sorted")

    def __init__(self) -> None:
        self._in_order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, seconds: float) -> None:
        """One more; the oldest goes where there are too many."""
        self._in_order.append(seconds)
        insort(self._sorted, seconds)
        if len(self._sorted) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]

    def typical(self) -> float:
        """The median; 0 of nothing."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0

    def best(self, benefit: float) -> tuple[float, float]:
        """(τ, gain): what is gained, in seconds, by waiting for so long at most."""
        best = gain = 0.0
        share = benefit / len(self._sorted)
        saved = 0.0
        for seconds in self._sorted:
            saved += share
            if seconds >= benefit:  # no odds are worth that
                break
            if saved - seconds > gain:
                best, gain = seconds, saved - seconds
        return best, gain


class ToolTimes:
    """Durations by tool. A job that waits for no tool waits for "", which is one."""

    def __init__(self) -> None:
        self._all = Durations()
        self._tools: dict[str, Durations] = {}

    def observe(self, tool: str, seconds: float) -> None:
        """A call of this tool took so long; infinitely long if nobody came back."""
        self._all.add(seconds)
        durations = self._tools.pop(tool, None) or Durations()
        self._tools[tool] = durations
        durations.add(seconds)
        if len(self._tools) > MAX_TOOLS:
            del self._tools[next(iter(self._tools))]

    def best(self, tool: str, benefit: float) -> tuple[float, float]:
        """(τ, gain), in seconds, for a benefit in seconds."""
        durations = self._known(tool)
        if durations is not None:
            return durations.best(benefit)
        if benefit <= 1.0:
            return 0.0, 0.0
        return math.log(benefit), benefit - 1.0 - math.log(benefit)

    def typical(self, tool: str) -> float | None:
        """What a call of it usually takes, in seconds; None while nothing is known."""
        durations = self._known(tool)
        return None if durations is None else durations.typical()

    def _known(self, tool: str) -> Durations | None:
        own = self._tools.get(tool)
        if own is not None and len(own) > FEW:
            return own
        return self._all if len(self._all) >= FEWEST else None
