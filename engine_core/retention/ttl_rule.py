"""For how long the KV of a turn that is over is kept for the next one, and what that is worth.

    rule     as long as it pays by the odds (`ToolTimes`)
    fixed    2 s, where the tool usually takes no longer: what Continuum's public code does
    none     not at all

What is saved by keeping it: the next turn neither waits in the queue as one that has lost its KV
(η times that delay, `TurnCounts`) nor computes or loads its context (`SwapRule.seconds`, linear
in the tokens: the paper's is quadratic, by a profile; ours is measured in steps, whose chunks
have the attention to their context in them).

Owns what was observed. A mistake in here costs pins, never a step: it is logged once, and
from then on nothing is kept.
"""

import logging
import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

from engine_core.scheduler.preemption import SwapRule
from proto.config import PinPolicyName

# How long tools take: from the end of a job's turn to the arrival of its next one.
#
#     tool A    0.2 0.3 0.3 0.4 … 8.1          by tool, the last ones of each
#     all       0.2 0.3 … 31 ∞                 of all tools; ∞: the job has never come back
#
# Owns windows of what was observed, of a bounded number of tools. Knows neither jobs nor clocks.
#
# The rule is that of Continuum (arXiv 2511.02230): keep KV for the τ of {0} and the observed
# durations for which P(d ≤ τ)·B − τ is largest, where B is what is saved, in seconds. Durations are
# those of the tool where there are more than FEW of it, else of all tools; until there are some, as
# if drawn from Exp(1), for which that is τ = ln B, or 0 if B ≤ 1.


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


# Whether jobs that have had many turns have few before them.
#
# Owns sums over jobs that are over. A job of N turns was seen at k = 1 … N, with N - k to come;
# η = −Corr(k, N − k) is 1 where all jobs have the same number of turns, and less where
# they differ: then more jobs than seemed so will soon leave room, and waiting in the queue again
# costs less (arXiv 2511.02230, by whose rule the delay of a job in the queue counts η times).


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


logger = logging.getLogger("tokend.pins")

FIXED_SECONDS: Final = 2.0
PROVISIONAL_SECONDS: Final = 2.0
"""Until it is known what the job waits for."""
MAX_SECONDS: Final = 3600.0
"""Nothing is kept for longer, whatever a client says."""
_WEIGHT: Final = 0.1
"""Of a new delay in the mean."""


@dataclass(frozen=True, slots=True)
class Worth:
    """seconds: for which KV is kept after its turn, 0 for not at all. gain: seconds saved by it."""

    seconds: float
    gain: float


NOTHING: Final = Worth(0.0, 0.0)


class TTLRule(Protocol):
    """Decides, and is told what happens to jobs."""

    def provisional(self, num_tokens: int) -> Worth:
        """A turn of so many tokens has just ended."""
        ...

    def decide(self, tool: str, num_tokens: int) -> Worth:
        """It is known which tool its job waits for."""
        ...

    def observe(self, tool: str, seconds: float) -> None:
        """The next turn came so long after one that waited for this tool; infinity: never."""
        ...

    def learn_delay(self, seconds: float) -> None:
        """A later turn of a job whose KV was not kept has waited so long in the queue."""
        ...

    def learn_turns(self, num_turns: int) -> None:
        """A job of so many turns is over."""
        ...


class NoRetention:
    """Nothing is ever kept."""

    def provisional(self, num_tokens: int) -> Worth:
        return NOTHING

    def decide(self, tool: str, num_tokens: int) -> Worth:
        return NOTHING

    def observe(self, tool: str, seconds: float) -> None:
        """Nothing depends on it."""

    def learn_delay(self, seconds: float) -> None:
        """Nothing depends on it."""

    def learn_turns(self, num_turns: int) -> None:
        """Nothing depends on it."""


class ExpectedBenefitTTL:
    """The published rule. costs: of KV that is not on the device."""

    def __init__(self, costs: SwapRule) -> None:
        self._costs = costs
        self._times = ToolTimes()
        self._turns = TurnCounts()
        self._delay = 0.0

    def provisional(self, num_tokens: int) -> Worth:
        return Worth(PROVISIONAL_SECONDS, self._benefit(num_tokens))

    def decide(self, tool: str, num_tokens: int) -> Worth:
        return Worth(*self._times.best(tool, self._benefit(num_tokens)))

    def observe(self, tool: str, seconds: float) -> None:
        self._times.observe(tool, seconds)

    def learn_delay(self, seconds: float) -> None:
        self._delay += _WEIGHT * (seconds - self._delay) if self._delay else seconds

    def learn_turns(self, num_turns: int) -> None:
        self._turns.learn(num_turns)

    def _benefit(self, num_tokens: int) -> float:
        return self._turns.eta * self._delay + self._costs.seconds(num_tokens)


class Fixed:
    """The threshold of the public code."""

    def __init__(self) -> None:
        self._times = ToolTimes()

    def provisional(self, num_tokens: int) -> Worth:
        return Worth(PROVISIONAL_SECONDS, 0.0)

    def decide(self, tool: str, num_tokens: int) -> Worth:
        typical = self._times.typical(tool)
        is_short = typical is None or typical <= FIXED_SECONDS
        return Worth(FIXED_SECONDS, 0.0) if is_short else NOTHING

    def observe(self, tool: str, seconds: float) -> None:
        self._times.observe(tool, seconds)

    def learn_delay(self, seconds: float) -> None:
        """Nothing depends on it."""

    def learn_turns(self, num_turns: int) -> None:
        """Nothing depends on it."""


class GuardedTTL:
    """Another rule, as long as it makes no mistake."""

    def __init__(self, inner: TTLRule) -> None:
        self._inner = inner

    def provisional(self, num_tokens: int) -> Worth:
        try:
            return self._inner.provisional(num_tokens)
        except Exception:
            return self._give_up()

    def decide(self, tool: str, num_tokens: int) -> Worth:
        try:
            return self._inner.decide(tool, num_tokens)
        except Exception:
            return self._give_up()

    def observe(self, tool: str, seconds: float) -> None:
        try:
            self._inner.observe(tool, seconds)
        except Exception:
            self._give_up()

    def learn_delay(self, seconds: float) -> None:
        try:
            self._inner.learn_delay(seconds)
        except Exception:
            self._give_up()

    def learn_turns(self, num_turns: int) -> None:
        try:
            self._inner.learn_turns(num_turns)
        except Exception:
            self._give_up()

    def _give_up(self) -> Worth:
        logger.exception("no KV is kept between turns any more")
        self._inner = NoRetention()
        return NOTHING


def by_client(ttl_ms: float | None) -> float | None:
    """Seconds for which a client wants KV to be kept; None where it says nothing that is a time."""
    if ttl_ms is None or math.isnan(ttl_ms):
        return None
    return min(max(ttl_ms / 1000.0, 0.0), MAX_SECONDS)


def make_ttl_rule(name: PinPolicyName, costs: SwapRule) -> TTLRule:
    """The rule of --pin-policy."""
    if name == "none":
        return NoRetention()
    return GuardedTTL(ExpectedBenefitTTL(costs) if name == "rule" else Fixed())
