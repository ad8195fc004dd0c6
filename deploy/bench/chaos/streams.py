"""One streamed completion as its client sees it, token by token.

Owns what has arrived. A status, an error event, an end without [DONE] or without a finish
reason for each choice is an exception: nothing that looks like a failure is passed over.
"""

import asyncio
import json
import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from proto.errors import TokendError

# The noise of one draw, from its definition, without numpy.
#
# A token is the argmax of logit/T - ln(-ln u) with u = (x + 1/2) / 2^32; x is word (id mod 4)
# of Philox-4x32-10 with the seed as key and (id div 4, position, choice, 0) as counter.
# Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).


_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_WORD: Final = 0xFFFFFFFF


def gumbel_noise(seed: int, choice: int, position: int, token_id: int) -> float:
    """What is added to logit/T of this token at this output position (from 0)."""
    word = _philox((token_id // 4, position, choice, 0), (seed & _WORD, seed >> 32))[token_id % 4]
    return -math.log(-math.log((word + 0.5) * 2.0**-32))


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, third = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (third >> 32) ^ c1 ^ k0,
            third & _WORD,
            (first >> 32) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


PATH = "/v1/completions"


class BrokenStreamError(TokendError):
    """The stream is not what a stream must be."""


@dataclass(eq=False)
class Stream:
    """body: of the request, without what makes it a stream; it must ask for token ids.

    choices: token ids by number. reasons: why each choice ended. moments: monotonic
    seconds at which tokens came.
    """

    body: dict[str, Any]
    choices: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    over: bool = False
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.choices.values()))

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def mid_generation(self) -> bool:
        """It has tokens and is to get more."""
        return self.num_tokens > 0 and len(self.reasons) < self.num_choices and not self.over

    def heard_after(self, moment: float) -> float | None:
        """When the first token after a moment came; None as long as there is none."""
        place = bisect_right(self.moments, moment)
        return self.moments[place] if place < len(self.moments) else None

    async def run(self, client: httpx.AsyncClient) -> "Stream":
        """Until its end; raises BrokenStreamError or httpx.HTTPError."""
        body = self.body | {"stream": True, "stream_options": {"include_usage": True}}
        done = False
        try:
            async with client.stream("POST", PATH, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise BrokenStreamError(f"status {response.status_code}: {text[:500]}")
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        await self._take(json.loads(line.removeprefix("data: ")))
        finally:
            await self._end()
        if not done or len(self.reasons) != self.num_choices:
            raise BrokenStreamError(f"it ended early: [DONE] {done}, reasons {self.reasons}")
        return self

    async def reach(self, num_tokens: int) -> None:
        """Wait until it has so many tokens, or is over."""
        async with self.moved:
            await self.moved.wait_for(lambda: self.over or self.num_tokens >= num_tokens)

    async def _end(self) -> None:
        async with self.moved:
            self.over = True
            self.moved.notify_all()

    async def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise BrokenStreamError(f"an error event: {event['error']}")
        self.usage = event.get("usage") or self.usage
        async with self.moved:
            for choice in event["choices"]:
                self.prompt_token_ids = choice.get("prompt_token_ids") or self.prompt_token_ids
                tokens = self.choices.setdefault(choice["index"], [])
                if choice["token_ids"]:
                    tokens += choice["token_ids"]
                    self.moments.append(time.monotonic())
                if choice["finish_reason"]:
                    self.reasons[choice["index"]] = choice["finish_reason"]
            self.moved.notify_all()


# Whether a stream has the tokens that it has undisturbed.
#
# In float32 it must, but for ties: where a prompt is computed in other portions, sums are
# rounded otherwise, and two tokens whose scores lie closer than TIE_GAP may change places.
# What follows a tie is another text, so nothing after it is compared.
#
# Owns the undisturbed answers. The scores of the two tokens are asked of the daemon itself,
# when nothing disturbs it: log-probability / T and the noise of the draw.


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


# What is asked while processes die.
#
# Prompts that share a beginning, greedy, seeded and several choices, of three priorities,
# one that ends at a stop string, some that keep to a grammar. Each is asked over and over, so its
# answer is known.


SHARED: Final = (
    "The lighthouse keeper wrote in his log every evening, whatever the weather was, and what he "
    "wrote was read by nobody. He noted the wind, the swell, and the ships that he had seen. "
)
_LONG: Final = SHARED * 6
_GREEDY: Final = (
    "Once upon a time",
    "The capital of France is",
    SHARED + "On Monday",
    "1 2 3",
    _LONG + "In spring",
)
_SEEDED: Final = (
    "My name is",
    SHARED + "On Friday",
    "In the year 1900",
    "To",
    _LONG + "In autumn",
)
_SEVERAL: Final = (("Two roads diverged in", 2), (SHARED + "That night", 3), ("Roses are", 2))
_WORDS: Final = "([a-z]{2,9}[ ,]){1000}"
_LINES: Final = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1000}
"""Grammars that no answer here completes."""


def bodies(num_tokens: int) -> list[dict[str, Any]]:
    """The requests; each choice gets so many tokens, but where it stops."""
    asked: list[dict[str, Any]] = [{"prompt": text, "temperature": 0} for text in _GREEDY]
    asked += [
        {"prompt": text, "temperature": 0.8, "seed": seed} for seed, text in enumerate(_SEEDED)
    ]
    asked += [{"prompt": text, "temperature": 0.9, "seed": 70 + n, "n": n} for text, n in _SEVERAL]
    asked.append({"prompt": "A, B, C, D,", "temperature": 0, "stop": [" M"]})
    asked += [
        {"prompt": "They wrote", "seed": seed, "ignore_eos": False, "structured_outputs": grammar}
        for seed, grammar in enumerate(({"regex": _WORDS}, {"json": _LINES}))
    ]
    return [
        {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
        | {"priority": number % 3}
        | each
        for number, each in enumerate(asked)
    ]
