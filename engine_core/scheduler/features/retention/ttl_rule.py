"""TTL rules: how long the KV of an ended turn is retained, and what that is worth.

    rule     as long as the expected benefit grows: Continuum's rule (arXiv 2511.02230)
    fixed    2 s, if the tool usually takes no longer: what Continuum's public code does
    none     not at all

The benefit of retained KV: the next turn neither waits in the queue like one that has lost its KV
(η times that delay, `TurnCounts`), nor computes or loads its context (`SwapRule.seconds`, linear in
the tokens; the paper's cost is quadratic, by a profile, while ours is measured in steps, whose
chunks include the attention to their context).
"""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

from engine_core.scheduler.preemption import SwapRule
from proto.settings.config import PinPolicyName

MIN_TOOL_SAMPLES: Final = 100
"""A tool's own durations are used if there are more samples than this, otherwise all tools'."""
MIN_SAMPLES: Final = 16
"""With fewer samples of all tools, the durations of a cold start are assumed."""
WINDOW: Final = 512
"""Maximum samples of a tool, or of all of them, that are remembered."""
MAX_TOOLS: Final = 512
"""Maximum tools with samples of their own, of all tenants."""
MAX_TOOLS_OF_TENANT: Final = 128
"""Maximum tools of one tenant; the tool that was seen longest ago is forgotten."""

_TENANT_DIGITS: Final = 16


class Durations:
    """The last durations, in seconds; infinite if the session did not return."""

    __slots__ = ("_in_order", "_sorted")

    def __init__(self) -> None:
        self._in_order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add_sample(self, seconds: float) -> None:
        """Add a duration; the oldest one is dropped if there are too many."""
        self._in_order.append(seconds)
        insort(self._sorted, seconds)
        if len(self._sorted) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]

    def median(self) -> float:
        """Return the median; 0 without samples."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0

    def best_ttl(self, benefit: float) -> tuple[float, float]:
        """Return (τ, gain): the τ with the largest gain P(d ≤ τ)·benefit − τ, in seconds."""
        best = gain = 0.0
        share = benefit / len(self._sorted)
        saved = 0.0
        for seconds in self._sorted:
            saved += share
            if seconds >= benefit:  # no probability is worth that
                break
            if saved - seconds > gain:
                best, gain = seconds, saved - seconds
        return best, gain


class ToolDurations:
    """Durations of tools, from the end of a turn to the arrival of the next one.

        tool A    0.2 0.3 0.3 0.4 … 8.1          the last ones of each tool
        all       0.2 0.3 … 31 ∞                 of all tools; ∞: the session did not return

    The rule of Continuum: retain KV for the τ among 0 and the observed durations d with the largest
    P(d ≤ τ)·B − τ, where B is the benefit in seconds. Until there are samples, d is assumed to be
    distributed as Exp(1): then τ = ln B, or 0 if B ≤ 1.

    A session without a tool waits for the tool "". A name may begin with its tenant: 16 digits and
    a slash. A tenant with many invented names costs other tenants only the tools that they have
    beyond an equal share.
    """

    def __init__(self) -> None:
        self._all = Durations()
        self._tenants: dict[str, dict[str, Durations]] = {}  # those seen last at the end
        self._num_tools = 0

    def __len__(self) -> int:
        """Return the number of tools with samples of their own."""
        return self._num_tools

    def add_sample(self, tool: str, seconds: float) -> None:
        """Add the duration of a call; infinity if the session did not return."""
        self._all.add_sample(seconds)
        tenant = _tenant_of(tool)
        tools = self._tenants.pop(tenant, {})
        self._tenants[tenant] = tools
        known = tools.pop(tool, None)
        durations = Durations() if known is None else known
        self._num_tools += known is None
        tools[tool] = durations
        durations.add_sample(seconds)
        if len(tools) > MAX_TOOLS_OF_TENANT:
            self._forget_one(tenant)
        elif self._num_tools > MAX_TOOLS:
            self._forget_one(max(self._tenants, key=self._num_tools_of))

    def best_ttl(self, tool: str, benefit: float) -> tuple[float, float]:
        durations = self._known(tool)
        if durations is not None:
            return durations.best_ttl(benefit)
        if benefit <= 1.0:
            return 0.0, 0.0
        return math.log(benefit), benefit - 1.0 - math.log(benefit)

    def median(self, tool: str) -> float | None:
        """Return the median duration of a tool in seconds; None while unknown."""
        durations = self._known(tool)
        return None if durations is None else durations.median()

    def _known(self, tool: str) -> Durations | None:
        tools = self._tenants.get(_tenant_of(tool))
        own = None if tools is None else tools.get(tool)
        if own is not None and len(own) > MIN_TOOL_SAMPLES:
            return own
        return self._all if len(self._all) >= MIN_SAMPLES else None

    def _num_tools_of(self, tenant: str) -> int:
        return len(self._tenants[tenant])

    def _forget_one(self, tenant: str) -> None:
        """Forget the tenant's tool that was seen longest ago."""
        tools = self._tenants[tenant]
        del tools[next(iter(tools))]
        self._num_tools -= 1
        if not tools:
            del self._tenants[tenant]


def _tenant_of(tool: str) -> str:
    return tool[:_TENANT_DIGITS] if tool[_TENANT_DIGITS : _TENANT_DIGITS + 1] == "/" else ""


_MEMORY: Final = 4096.0
"""Number of turns after which the sums are halved."""


class TurnCounts:
    """Correlation between the turns that a session has had and those to come, as sums.

    A session of N turns was seen at k = 1 … N, with N − k to come. η = −Corr(k, N − k) is 1 if all
    sessions have the same number of turns, and less if they differ: then more sessions end soon and
    leave room, and another wait in the queue costs less. By the paper's rule that delay counts η
    times.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 6

    def add_session(self, num_turns: int) -> None:
        n = float(num_turns)
        total = n * (n + 1) / 2  # of k
        squares = n * (n + 1) * (2 * n + 1) / 6
        rest = n * n - total
        rest_squares = n**3 - 2 * n * total + squares
        sums = self._sums
        for index, each in enumerate((n, total, rest, squares, rest_squares, n * total - squares)):
            sums[index] += each
        if sums[0] > _MEMORY:
            self._sums = [total / 2 for total in sums]

    @property
    def eta(self) -> float:
        """0 to 1; 1 until the sums allow a correlation."""
        n, k, rest, kk, rr, kr = self._sums
        variance = (n * kk - k * k) * (n * rr - rest * rest)
        if variance <= 0.0:
            return 1.0
        return min(1.0, max(0.0, -(n * kr - k * rest) / math.sqrt(variance)))


FIXED_SECONDS: Final = 2.0
PROVISIONAL_SECONDS: Final = 2.0
"""TTL until it is known which tool the session waits for."""
MAX_SECONDS: Final = 3600.0
"""Maximum TTL, also of clients."""
_WEIGHT: Final = 0.1
"""Weight of a new delay in the running mean."""


@dataclass(frozen=True, slots=True)
class TTLDecision:
    """seconds: TTL of the KV after its turn; 0: not retained. value: expected gain, in seconds."""

    seconds: float
    value: float


NOT_RETAINED: Final = TTLDecision(0.0, 0.0)


class TTLRule(Protocol):
    """Decides how long KV is retained, and learns from what happens to sessions.

    A rule replaces what it needs: by default nothing is retained, and nothing learnt. A protocol,
    because interpreted classes of tests cannot extend a compiled one; without the `return` a method
    would count as abstract.
    """

    def provisional(self, num_tokens: int) -> TTLDecision:
        """Decide when a turn of `num_tokens` tokens has just ended."""
        return NOT_RETAINED

    def decide(self, tool: str, num_tokens: int) -> TTLDecision:
        """Decide when it is known which tool the session waits for."""
        return NOT_RETAINED

    def learn_duration(self, tool: str, seconds: float) -> None:
        """Learn the time from a turn that waited for a tool to the next one; infinity: never."""
        return None

    def learn_queueing_delay(self, seconds: float) -> None:
        """Learn how long a later turn whose KV was not retained has waited in the queue."""
        return None

    def learn_num_turns(self, num_turns: int) -> None:
        """Learn the number of turns of a session that has ended."""
        return None


class NoRetention(TTLRule):
    """The rule none."""


class ExpectedBenefitTTL(TTLRule):
    """The rule of Continuum's paper. costs: seconds until KV is on the device again."""

    def __init__(self, costs: SwapRule) -> None:
        self._costs = costs
        self._durations = ToolDurations()
        self._turns = TurnCounts()
        self._delay = 0.0

    def provisional(self, num_tokens: int) -> TTLDecision:
        return TTLDecision(PROVISIONAL_SECONDS, self._benefit(num_tokens))

    def decide(self, tool: str, num_tokens: int) -> TTLDecision:
        return TTLDecision(*self._durations.best_ttl(tool, self._benefit(num_tokens)))

    def learn_duration(self, tool: str, seconds: float) -> None:
        self._durations.add_sample(tool, seconds)

    def learn_queueing_delay(self, seconds: float) -> None:
        self._delay += _WEIGHT * (seconds - self._delay) if self._delay else seconds

    def learn_num_turns(self, num_turns: int) -> None:
        self._turns.add_session(num_turns)

    def _benefit(self, num_tokens: int) -> float:
        return self._turns.eta * self._delay + self._costs.seconds(num_tokens)


class FixedTTL(TTLRule):
    """The rule of Continuum's public code: 2 s for tools that usually take no longer."""

    def __init__(self) -> None:
        self._durations = ToolDurations()

    def provisional(self, num_tokens: int) -> TTLDecision:
        return TTLDecision(PROVISIONAL_SECONDS, 0.0)

    def decide(self, tool: str, num_tokens: int) -> TTLDecision:
        typical = self._durations.median(tool)
        is_short = typical is None or typical <= FIXED_SECONDS
        return TTLDecision(FIXED_SECONDS, 0.0) if is_short else NOT_RETAINED

    def learn_duration(self, tool: str, seconds: float) -> None:
        self._durations.add_sample(tool, seconds)


def by_client(ttl_ms: float | None) -> float | None:
    """Return the TTL that a client wants, in seconds; None if it gives no valid one."""
    if ttl_ms is None or math.isnan(ttl_ms):
        return None
    return min(max(ttl_ms / 1000.0, 0.0), MAX_SECONDS)


def make_ttl_rule(name: PinPolicyName, costs: SwapRule) -> TTLRule:
    """Return the rule of --pin-policy."""
    if name == "none":
        return NoRetention()
    return ExpectedBenefitTTL(costs) if name == "rule" else FixedTTL()
