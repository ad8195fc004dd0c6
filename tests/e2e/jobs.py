"""Agents at a real daemon: jobs whose turns repeat what was said, and load that belongs to none."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.daemon import Daemon

BLOCK_SIZE = 16
LIMIT_SECONDS = 300.0
NUM_TOKENS = 8
"""Of an answer."""


def token_ids(number: int, seed: object) -> list[int]:
    """A prompt that no other seed's begins like."""
    return random.Random(str(seed)).choices(range(100, 40_000), k=number)


@dataclass(frozen=True)
class Turn:
    """prompt, tokens: of it and its answer. num_cached: tokens of the prompt whose KV was there."""

    prompt: list[int]
    tokens: list[int]
    num_cached: int


def complete(daemon: Daemon, prompt: Sequence[int], **fields: Any) -> Turn:
    """Greedy and of one length; fails on any status but 200."""
    body = {
        "prompt": list(prompt),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    response = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=LIMIT_SECONDS)
    assert response.status_code == 200, response.text
    answer = response.json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Turn(list(prompt), answer["choices"][0]["token_ids"], cached)


@dataclass
class Job:
    """hint: beside the job's id, of every turn. said: prompt and answers so far."""

    daemon: Daemon
    name: str
    hint: dict[str, Any] = field(default_factory=dict)
    said: list[int] = field(default_factory=list)

    def turn(self, num_new: int, **hint: Any) -> Turn:
        """The next one, with so many new tokens."""
        new = token_ids(num_new, f"{self.name} {len(self.said)}")
        hints = {"job_id": self.name, **self.hint, **hint}
        turn = complete(self.daemon, [*self.said, *new], agent_hint=hints)
        self.said = [*turn.prompt, *turn.tokens]
        return turn


def churn(daemon: Daemon, num_blocks: int, seed: object, size: int = 20) -> None:
    """Requests of nobody's job, one after the other, that use so many blocks together."""
    for number in range(num_blocks // size + 1):
        ids = token_ids(size * BLOCK_SIZE - NUM_TOKENS, f"churn {seed} {number}")
        complete(daemon, ids)
