"""Whether a stream has the tokens that it has undisturbed.

In float32 it must, but for ties: where a prompt is computed in other portions, sums are
rounded otherwise, and two tokens whose scores lie closer than TIE_GAP may change places.
What follows a tie is another text, so nothing after it is compared.

Owns the undisturbed answers. The scores of the two tokens are asked of the daemon itself,
when nothing disturbs it: log-probability / T and the noise of the draw.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from deploy.loadtest.chaos.draws import gumbel_noise
from deploy.loadtest.chaos.stream import PATH, BrokenStreamError, Stream

TIE_GAP: Final = 1e-3
MAX_TIE_RATE: Final = 1 / 500
"""Ties a token; more are no ties any more."""


@dataclass(frozen=True)
class Difference:
    """The first token of a choice that is another; position: of output tokens, from 0."""

    expected: Stream
    choice: int
    position: int
    token_id: int

    def describe(self) -> str:
        body = self.expected.body
        wanted = self.expected.choices[self.choice][self.position]
        return (
            f"…{body['prompt'][-30:]!r}, choice {self.choice}, token {self.position}: "
            f"{self.token_id} instead of {wanted}"
        )


@dataclass
class Verdict:
    """num_tokens: that were compared. wrong: what is no question of tokens."""

    num_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: "Verdict") -> None:
        self.num_tokens += other.num_tokens
        self.differences += other.differences
        self.wrong += other.wrong


def compare(expected: Stream, got: Stream, *, whole: bool = True) -> Verdict:
    """whole: its client has heard it to the end; otherwise it has a part of the tokens."""
    verdict = Verdict()
    for choice, tokens in expected.choices.items():
        others = got.choices.get(choice, [])
        position = _first_difference(tokens, others)
        verdict.num_tokens += position
        if position < min(len(tokens), len(others)):
            verdict.num_tokens += 1
            verdict.differences.append(Difference(expected, choice, position, others[position]))
        elif len(others) > len(tokens) or (whole and len(others) < len(tokens)):
            verdict.wrong.append(f"{len(others)} tokens instead of {len(tokens)}: {got.body}")
    if whole and not verdict.differences:
        if got.reasons != expected.reasons:
            verdict.wrong.append(f"{got.reasons} instead of {expected.reasons}: {got.body}")
        for name in ("prompt_tokens", "completion_tokens"):
            if got.usage.get(name) != expected.usage.get(name):
                verdict.wrong.append(f"{name} {got.usage} instead of {expected.usage}")
    return verdict


async def undisturbed(url: str, bodies: Sequence[dict[str, Any]]) -> list[Stream]:
    """The answers to all of them, asked at once."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        return await asyncio.gather(*(Stream(body).run(client) for body in bodies))


async def gap(client: httpx.AsyncClient, difference: Difference) -> float:
    """Between the scores of the two tokens."""
    expected, choice = difference.expected, difference.choice
    tokens = expected.choices[choice]
    before = expected.prompt_token_ids + tokens[: difference.position]
    pair = (tokens[difference.position], difference.token_id)
    scores = []
    for token_id in pair:
        score = await _logprob(client, before, token_id)
        temperature = expected.body["temperature"]
        if temperature:
            noise = gumbel_noise(expected.body["seed"], choice, difference.position, token_id)
            score = score / temperature + noise
        scores.append(score)
    return abs(scores[0] - scores[1])


async def _logprob(client: httpx.AsyncClient, before: list[int], token_id: int) -> float:
    """Of a token after others, from a prompt that ends with it."""
    body = {"prompt": [*before, token_id], "max_tokens": 1, "prompt_logprobs": 0}
    response = await client.post(PATH, json=body)
    if response.status_code != 200:
        raise BrokenStreamError(f"no log-probability: {response.text[:500]}")
    row = response.json()["choices"][0]["prompt_logprobs"][-1]
    return float(row[str(token_id)]["logprob"])


def _first_difference(tokens: list[int], others: list[int]) -> int:
    """Or the length of the shorter one."""
    pairs = enumerate(zip(tokens, others, strict=False))
    shorter = min(len(tokens), len(others))
    return next((place for place, (one, other) in pairs if one != other), shorter)
