"""For how long the KV of a turn that is over is kept for the next one, and what that is worth.

    rule     as long as it pays by the odds (tool_times.py)
    fixed    2 s, where the tool usually takes no longer: what Continuum's public code does
    none     not at all

What is saved by keeping it: the next turn neither waits in the queue as one that has lost its KV
(η times that delay, turn_counts.py) nor computes or loads its context (`SwapRule.seconds`, linear
in the tokens: the paper's is quadratic, by a profile; ours is measured in steps, whose chunks
have the attention to their context in them).

Owns what was observed. A mistake in here costs pins, never a step: it is logged once, and
from then on nothing is kept.
"""

import logging
import math
from dataclasses import dataclass
from typing import Final, Protocol

from engine_core.scheduler.swap_rule import SwapRule
from engine_core.scheduler.tool_times import ToolTimes
from engine_core.scheduler.turn_counts import TurnCounts
from proto.config import PinPolicyName

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


class PinRule(Protocol):
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


class NoPins:
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


class ByOdds:
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


class Guarded:
    """Another rule, as long as it makes no mistake."""

    def __init__(self, inner: PinRule) -> None:
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
        self._inner = NoPins()
        return NOTHING


def by_client(ttl_ms: float | None) -> float | None:
    """Seconds for which a client wants KV to be kept; None where it says nothing that is a time."""
    if ttl_ms is None or math.isnan(ttl_ms):
        return None
    return min(max(ttl_ms / 1000.0, 0.0), MAX_SECONDS)


def pin_rule_of(name: PinPolicyName, costs: SwapRule) -> PinRule:
    """The rule of --pin-policy."""
    if name == "none":
        return NoPins()
    return Guarded(ByOdds(costs) if name == "rule" else Fixed())
