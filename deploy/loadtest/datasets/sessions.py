"""A client's conversation with a server, and where its chances come from."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from deploy.loadtest.openai.client import Ask


class Session(Protocol):
    """Requests of one client, each after the other's answer.

    needs_answers: later requests contain what the server answered.
    """

    needs_answers: bool

    def next_ask(self, answer: str) -> Ask | None:
        """What follows on this answer (empty at first); None when the session is over."""
        ...


class OneRequest:
    """A session of a single request."""

    needs_answers = False

    def __init__(self, ask: Ask) -> None:
        self._asks = [ask]

    def next_ask(self, answer: str) -> Ask | None:
        return self._asks.pop() if self._asks else None


@dataclass(frozen=True)
class Draws:
    """Chances of the sessions of a run: each has its own, so that their order is of no matter.

    Of every 1 / check_share sessions one is checked, the first among them. What is checked is
    the same whatever the seed is, and all else is new with each seed: answers can be compared
    between rounds, and few of the prompts of a round are in the server's cache.
    """

    seed: int
    check_share: float = 0.0

    def checked(self, index: int) -> bool:
        return math.ceil((index + 1) * self.check_share) > math.ceil(index * self.check_share)

    def rng(self, index: int) -> random.Random:
        """Of one session."""
        return random.Random(f"{self.name(index)}:{index}")

    def name(self, index: int) -> str:
        """Of the round that a session belongs to: those that are checked belong to all."""
        return "checked" if self.checked(index) else f"seed {self.seed}"


@dataclass(frozen=True)
class Sizes:
    """Tokens of a request: uniform from `mean * (1 - spread)`, rounded down, to
    `mean * (1 + spread)`, rounded up, and at least one, as `--random-range-ratio` of vLLM."""

    input_tokens: int
    output_tokens: int
    spread: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """(input, output)"""
        return self._one(rng, self.input_tokens), self._one(rng, self.output_tokens)

    def _one(self, rng: random.Random, mean: int) -> int:
        low, high = math.floor(mean * (1 - self.spread)), math.ceil(mean * (1 + self.spread))
        return rng.randint(max(1, low), max(1, high))


class Dataset(Protocol):
    """Where sessions come from."""

    def sessions(self, draws: Draws) -> Iterator[Session]:
        """In the order in which they begin; may be without end."""
        ...
