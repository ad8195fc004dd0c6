"""How many tokens of prompts may join those who decode in a step.

Whoever decodes waits for all of a step, so a prompt's chunk is a gap between two tokens of
everybody else. The pace lets a step take a multiple of what one takes that only decodes:

    time of a step   |<---- decodes, learnt by their number ---->|<-- tokens * time of a token -->|
                     |<------------------- at most stretch * decodes ---------------------------->|

Two things matter more than even gaps: steps that are short anyway, where small chunks would cost
prompts much and gain nobody anything; and prompts that pile up, which are computed within
PATIENCE_STEPS.

Owns what was learnt. Knows neither requests nor clocks: the workers say what a step took.
"""

from typing import Final, Protocol

SHORT_SECONDS: Final = 0.02
"""A step of this length is no gap that anybody notices."""
PATIENCE_STEPS: Final = 48
"""So many steps may what waits now take."""
MULTIPLE: Final = 16
"""Kernels take rows in groups of so many."""
WEIGHT: Final = 0.125
"""Of a new measurement in the mean."""
LONGEST_OUTLIER: Final = 2.0
"""What took more than this multiple of its mean, because others had the cores, counts as this."""


class PromptPace(Protocol):
    """Says how many tokens of prompts a step may have, and is told what steps took."""

    def prompt_tokens(self, num_decoding: int, num_missing: int) -> int:
        """For a step with so many sequences that decode; num_missing: of all prompts, by now."""
        ...

    def learn(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many of both has taken this long."""
        ...


class FullPace:
    """As many as a step has room for."""

    def __init__(self, step_budget: int) -> None:
        self._step_budget = step_budget

    def prompt_tokens(self, num_decoding: int, num_missing: int) -> int:
        return self._step_budget

    def learn(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Nothing depends on it."""


class LearntPace:
    """Keeps steps with a part of a prompt below `stretch` times those without.

    step_budget: all that a step has room for; so much goes into it until both times are known.
    """

    def __init__(self, step_budget: int, stretch: float) -> None:
        self._step_budget = step_budget
        self._stretch = stretch
        self._decode_seconds: dict[int, float] = {}  # by number of sequences
        self._token_seconds = 0.0  # 0: not known

    def prompt_tokens(self, num_decoding: int, num_missing: int) -> int:
        if not num_decoding or not self._decode_seconds or not self._token_seconds:
            return self._step_budget
        decode = self._decode(num_decoding)
        seconds = max(self._stretch * decode, SHORT_SECONDS) - decode
        paced = int(seconds / self._token_seconds) // MULTIPLE * MULTIPLE
        due = -(-num_missing // (PATIENCE_STEPS * MULTIPLE)) * MULTIPLE
        return min(max(paced, due, MULTIPLE), self._step_budget)

    def learn(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        if not num_decoding or seconds <= 0.0:
            return
        if not num_prompt_tokens:
            known = self._decode_seconds.get(num_decoding, 0.0)
            self._decode_seconds[num_decoding] = _mean(known, seconds)
        elif num_prompt_tokens >= MULTIPLE and self._decode_seconds:
            token_seconds = (seconds - self._decode(num_decoding)) / num_prompt_tokens
            if token_seconds > 0.0:
                self._token_seconds = _mean(self._token_seconds, token_seconds)

    def _decode(self, num_decoding: int) -> float:
        """Seconds of a step in which so many decode: on the line between numbers that are known."""
        known = self._decode_seconds
        if num_decoding in known:
            return known[num_decoding]
        fewer = max((each for each in known if each < num_decoding), default=min(known))
        more = min((each for each in known if each > num_decoding), default=max(known))
        if fewer >= more:  # nothing is known on one side
            return known[fewer]
        part = (num_decoding - fewer) / (more - fewer)
        return known[fewer] + part * (known[more] - known[fewer])


def _mean(known: float, seconds: float) -> float:
    """The running mean with one more; known: 0 where it is the first."""
    if not known:
        return seconds
    return known + WEIGHT * (min(seconds, LONGEST_OUTLIER * known) - known)


def pace_of(step_budget: int, stretch: float, *, chunked: bool) -> PromptPace:
    """The pace of a setting; 0, or prompts that are not cut into chunks: none."""
    return LearntPace(step_budget, stretch) if stretch and chunked else FullPace(step_budget)
