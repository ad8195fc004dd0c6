"""Whether who was preempted gets its KV back from where the connector has kept it.

Blocks are kept as they become full, so a preemption moves nothing: the choice is made when the
request is admitted again, with what is missing on the device by then.

    recompute   num_tokens at the rate of prompts        seconds a token, from steps
    swap        a load of num_tokens                      setup + seconds a token, from loads

auto takes what is less (where the two cross is the break-even of swapping), by what steps and
loads have taken so far. While either is not known it loads, and so learns. Knows no requests.
The same means say what it costs that the KV of tokens is not on the device (`seconds`).
"""

from typing import Final, Protocol

from proto.config import PreemptionMode

_WEIGHT: Final = 0.25
"""Of a new measurement in the mean."""
_MOST: Final = 4.0
"""A measurement counts as at most this multiple of the mean: others may have had the cores."""
_FEW_TOKENS: Final = 16
"""Steps with fewer of a prompt say little about the rate of prompts."""


class SwapRule(Protocol):
    """Decides for requests that were preempted; is told what loads and steps have taken."""

    def loads(self, num_tokens: int) -> bool:
        """Whether so many tokens are to be loaded, and not computed."""
        ...

    def seconds(self, num_tokens: int) -> float:
        """How long it takes until the KV of so many tokens is back; 0 while that is not known."""
        ...

    def learn_load(self, num_tokens: int, seconds: float) -> None:
        """A load of so many tokens took this long, its time in a queue included."""
        ...

    def learn_step(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts took this long."""
        ...


class ByRates:
    """Takes what is faster by the means of what was measured."""

    def __init__(self) -> None:
        self._setup = 0.0  # the least that any load has taken; 0: none yet
        self._load_seconds = 0.0
        self._compute_seconds = 0.0  # of a token; 0: not known

    def loads(self, num_tokens: int) -> bool:
        if not self._setup or not self._compute_seconds:
            return True
        return self._seconds_to_load(num_tokens) < num_tokens * self._compute_seconds

    def seconds(self, num_tokens: int) -> float:
        computed = num_tokens * self._compute_seconds
        if not self._setup:
            return computed
        loaded = self._seconds_to_load(num_tokens)
        return min(computed, loaded) if computed else loaded

    def learn_load(self, num_tokens: int, seconds: float) -> None:
        if num_tokens <= 0 or seconds <= 0.0:
            return
        self._setup = min(self._setup, seconds) if self._setup else seconds
        self._load_seconds = _mean(self._load_seconds, (seconds - self._setup) / num_tokens)

    def learn_step(self, num_prompt_tokens: int, seconds: float) -> None:
        if num_prompt_tokens >= _FEW_TOKENS and seconds > 0.0:
            self._compute_seconds = _mean(self._compute_seconds, seconds / num_prompt_tokens)

    def _seconds_to_load(self, num_tokens: int) -> float:
        return self._setup + num_tokens * self._load_seconds


class Always(ByRates):
    """The setting has decided for those that were preempted."""

    def __init__(self, loads: bool) -> None:
        super().__init__()
        self._loads = loads

    def loads(self, num_tokens: int) -> bool:
        return self._loads


def swap_rule_of(mode: PreemptionMode) -> SwapRule:
    """The rule of --preemption."""
    return ByRates() if mode == "auto" else Always(mode == "swap")


def _mean(known: float, measured: float) -> float:
    if not known:
        return measured
    return known + _WEIGHT * (min(measured, _MOST * known) - known)
