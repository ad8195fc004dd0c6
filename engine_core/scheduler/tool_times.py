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
MAX_TOOLS: Final = 512
"""That are told apart, of all tenants."""
MAX_TOOLS_OF_TENANT: Final = 128
"""Of one tenant; its tool that was not seen for longest is forgotten."""

_TENANT_DIGITS: Final = 16


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
    """Durations by tool. A job that waits for no tool waits for "", which is one.

    A tool's name may begin with its tenant: 16 digits and a slash. Nobody's invented names
    cost another tenant more than the tools that it has beyond an equal share.
    """

    def __init__(self) -> None:
        self._all = Durations()
        self._tenants: dict[str, dict[str, Durations]] = {}  # those seen last at the end
        self._num_tools = 0

    def __len__(self) -> int:
        """Tools that are told apart."""
        return self._num_tools

    def observe(self, tool: str, seconds: float) -> None:
        """A call of this tool took so long; infinitely long if nobody came back."""
        self._all.add(seconds)
        tenant = _tenant_of(tool)
        tools = self._tenants.pop(tenant, {})
        self._tenants[tenant] = tools
        known = tools.pop(tool, None)
        durations = Durations() if known is None else known
        self._num_tools += known is None
        tools[tool] = durations
        durations.add(seconds)
        if len(tools) > MAX_TOOLS_OF_TENANT:
            self._forget_one(tenant)
        elif self._num_tools > MAX_TOOLS:
            self._forget_one(max(self._tenants, key=self._num_tools_of))

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
        tools = self._tenants.get(_tenant_of(tool))
        own = None if tools is None else tools.get(tool)
        if own is not None and len(own) > FEW:
            return own
        return self._all if len(self._all) >= FEWEST else None

    def _num_tools_of(self, tenant: str) -> int:
        return len(self._tenants[tenant])

    def _forget_one(self, tenant: str) -> None:
        """Its tool that was not seen for longest."""
        tools = self._tenants[tenant]
        del tools[next(iter(tools))]
        self._num_tools -= 1
        if not tools:
            del self._tenants[tenant]


def _tenant_of(tool: str) -> str:
    return tool[:_TENANT_DIGITS] if tool[_TENANT_DIGITS : _TENANT_DIGITS + 1] == "/" else ""
