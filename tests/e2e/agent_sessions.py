"""Agent sessions at a real daemon: turns that extend the conversation, and unrelated load."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.daemon import Daemon

BLOCK_SIZE = 16
LIMIT_SECONDS = 300.0
NUM_TOKENS = 8
"""Tokens of every output."""


def token_ids(number: int, seed: object) -> list[int]:
    """Random token ids that share no prefix with those of other seeds."""
    return random.Random(str(seed)).choices(range(100, 40_000), k=number)


@dataclass(frozen=True)
class Turn:
    """A turn's prompt and output tokens. num_cached: prompt tokens found in the prefix cache."""

    prompt: list[int]
    tokens: list[int]
    num_cached: int


def complete(daemon: Daemon, prompt: Sequence[int], **fields: Any) -> Turn:
    """Complete greedily with a fixed length; fails on any status but 200."""
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
class AgentSession:
    """An agent session. hint: fields of every turn. context: all tokens so far."""

    daemon: Daemon
    name: str
    hint: dict[str, Any] = field(default_factory=dict)
    context: list[int] = field(default_factory=list)

    def turn(self, num_new: int, **hint: Any) -> Turn:
        """Send the next turn, with `num_new` new prompt tokens."""
        new = token_ids(num_new, f"{self.name} {len(self.context)}")
        hints = {"job_id": self.name, **self.hint, **hint}
        turn = complete(self.daemon, [*self.context, *new], agent_hint=hints)
        self.context = [*turn.prompt, *turn.tokens]
        return turn


def fill_cache(daemon: Daemon, num_blocks: int, seed: object, size: int = 20) -> None:
    """Send requests without a session, one by one, that use at least `num_blocks` blocks."""
    for number in range(num_blocks // size + 1):
        ids = token_ids(size * BLOCK_SIZE - NUM_TOKENS, f"churn {seed} {number}")
        complete(daemon, ids)
