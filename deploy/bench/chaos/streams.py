"""Streamed completions and their comparison, token by token, with answers without disturbance.

`CompletionStream` is one completion, `compare_streams` compares two, `request_bodies` lists the
requests that are sent while processes die.
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

# ---- Noise of seeded sampling ----
#
# A sampled token is the argmax of logit/T - ln(-ln u) with u = (x + 1/2) / 2^32; x is word
# (id mod 4) of Philox-4x32-10 with the seed as key and (id div 4, position, choice, 0) as counter.
# Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).


_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_WORD: Final = 0xFFFFFFFF


def gumbel_noise(seed: int, choice: int, position: int, token_id: int) -> float:
    """Return the noise that sampling adds to logit/T of a token. position: in the output."""
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


class InvalidStreamError(TokendError):
    """The stream failed: an error status, an error event, or an end without [DONE]."""


@dataclass(eq=False)
class CompletionStream:
    """A streamed completion.

    body: of the request; it must set `return_token_ids`. choices: token ids by choice.
    reasons: finish reasons by choice. token_times: monotonic seconds at which tokens arrived.
    ended: whether the stream has ended or failed. changed: notified at each event and at the end.
    """

    body: dict[str, Any]
    choices: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    ended: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.choices.values()))

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def mid_generation(self) -> bool:
        """Whether it has some but not all of its tokens."""
        return self.num_tokens > 0 and len(self.reasons) < self.num_choices and not self.ended

    def first_token_after(self, moment: float) -> float | None:
        """Return the time of the first token after `moment`; None if there is none yet."""
        index = bisect_right(self.token_times, moment)
        return self.token_times[index] if index < len(self.token_times) else None

    async def receive(self, client: httpx.AsyncClient) -> "CompletionStream":
        """Send the request and receive its tokens; raises InvalidStreamError or httpx.HTTPError.

        Each choice must end with a finish reason, and the stream with [DONE].
        """
        body = self.body | {"stream": True, "stream_options": {"include_usage": True}}
        done = False
        try:
            async with client.stream("POST", PATH, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise InvalidStreamError(f"status {response.status_code}: {text[:500]}")
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        await self._note_event(json.loads(line.removeprefix("data: ")))
        finally:
            await self._note_end()
        if not done or len(self.reasons) != self.num_choices:
            raise InvalidStreamError(
                f"the stream ended early: [DONE] {done}, reasons {self.reasons}"
            )
        return self

    async def wait_for_tokens(self, num_tokens: int) -> None:
        """Wait until the stream has this many tokens, or has ended."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.ended or self.num_tokens >= num_tokens)

    async def _note_end(self) -> None:
        async with self.changed:
            self.ended = True
            self.changed.notify_all()

    async def _note_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise InvalidStreamError(f"error event: {event['error']}")
        self.usage = event.get("usage") or self.usage
        async with self.changed:
            for choice in event["choices"]:
                self.prompt_token_ids = choice.get("prompt_token_ids") or self.prompt_token_ids
                tokens = self.choices.setdefault(choice["index"], [])
                if choice["token_ids"]:
                    tokens += choice["token_ids"]
                    self.token_times.append(time.monotonic())
                if choice["finish_reason"]:
                    self.reasons[choice["index"]] = choice["finish_reason"]
            self.changed.notify_all()


# ---- Comparison ----
#
# In float32 a disturbed stream must have the same tokens, except for ties: if a prompt is computed
# in other chunks, sums are rounded differently, and either of two tokens whose scores are closer
# than TIE_GAP may be sampled. The text after a tie differs, so nothing after it is compared.
#
# Score of a token: log-probability / T plus the noise of sampling, computed by the daemon at rest.


TIE_GAP: Final = 1e-3
MAX_TIE_RATE: Final = 1 / 500
"""Maximum ties per compared token; more are a fault."""


@dataclass(frozen=True)
class TokenDifference:
    """The first token of a choice that differs. position: in the output, from 0."""

    expected: CompletionStream
    choice: int
    position: int
    token_id: int

    def describe(self) -> str:
        body = self.expected.body
        expected = self.expected.choices[self.choice][self.position]
        return (
            f"…{body['prompt'][-30:]!r}, choice {self.choice}, token {self.position}: "
            f"{self.token_id} instead of {expected}"
        )


@dataclass
class StreamComparison:
    """Result of comparisons.

    num_tokens: compared tokens. differences: first different token of each choice.
    other_errors: wrong number of tokens, finish reason or usage.
    """

    num_tokens: int = 0
    differences: list[TokenDifference] = field(default_factory=list)
    other_errors: list[str] = field(default_factory=list)

    def merge(self, other: "StreamComparison") -> None:
        self.num_tokens += other.num_tokens
        self.differences += other.differences
        self.other_errors += other.other_errors


def compare_streams(
    expected: CompletionStream, got: CompletionStream, *, whole: bool = True
) -> StreamComparison:
    """Compare a stream with the expected one. whole: False if the client has disconnected early."""
    comparison = StreamComparison()
    for choice, tokens in expected.choices.items():
        others = got.choices.get(choice, [])
        position = _first_difference(tokens, others)
        comparison.num_tokens += position
        if position < min(len(tokens), len(others)):
            comparison.num_tokens += 1
            comparison.differences.append(
                TokenDifference(expected, choice, position, others[position])
            )
        elif len(others) > len(tokens) or (whole and len(others) < len(tokens)):
            comparison.other_errors.append(
                f"{len(others)} tokens instead of {len(tokens)}: {got.body}"
            )
    if whole and not comparison.differences:
        if got.reasons != expected.reasons:
            comparison.other_errors.append(
                f"{got.reasons} instead of {expected.reasons}: {got.body}"
            )
        for name in ("prompt_tokens", "completion_tokens"):
            if got.usage.get(name) != expected.usage.get(name):
                comparison.other_errors.append(f"{name} {got.usage} instead of {expected.usage}")
    return comparison


async def reference_answers(url: str, bodies: Sequence[dict[str, Any]]) -> list[CompletionStream]:
    """Send all requests at the same time and return the streams."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        return await asyncio.gather(*(CompletionStream(body).receive(client) for body in bodies))


async def score_gap(client: httpx.AsyncClient, difference: TokenDifference) -> float:
    """Return the difference between the scores of the expected and the received token."""
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
    """Return the log-probability of a token after others, from a prompt that ends with it."""
    body = {"prompt": [*before, token_id], "max_tokens": 1, "prompt_logprobs": 0}
    response = await client.post(PATH, json=body)
    if response.status_code != 200:
        raise InvalidStreamError(f"log-probability request failed: {response.text[:500]}")
    row = response.json()["choices"][0]["prompt_logprobs"][-1]
    return float(row[str(token_id)]["logprob"])


def _first_difference(tokens: list[int], others: list[int]) -> int:
    """Return the first position that differs, or the length of the shorter list."""
    pairs = enumerate(zip(tokens, others, strict=False))
    shorter = min(len(tokens), len(others))
    return next((index for index, (one, other) in pairs if one != other), shorter)


# ---- Requests ----
#
# Prompts with common prefixes; greedy, seeded, with several choices, three priorities, a stop
# string and grammars. Each is sent many times, so its answer is known.


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
_SEEDED: Final = ("My name is", SHARED + "On Friday", "In the year 1900", "To", _LONG + "In autumn")
_SEVERAL: Final = (("Two roads diverged in", 2), (SHARED + "That night", 3), ("Roses are", 2))
_WORDS: Final = "([a-z]{2,9}[ ,]){1000}"
_LINES: Final = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1000}
"""Grammars that need more tokens than the requests allow."""


def request_bodies(num_tokens: int) -> list[dict[str, Any]]:
    """Return the request bodies. num_tokens: max_tokens of each."""
    bodies: list[dict[str, Any]] = [{"prompt": text, "temperature": 0} for text in _GREEDY]
    bodies += [
        {"prompt": text, "temperature": 0.8, "seed": seed} for seed, text in enumerate(_SEEDED)
    ]
    bodies += [{"prompt": text, "temperature": 0.9, "seed": 70 + n, "n": n} for text, n in _SEVERAL]
    bodies.append({"prompt": "A, B, C, D,", "temperature": 0, "stop": [" M"]})
    bodies += [
        {"prompt": "They wrote", "seed": seed, "ignore_eos": False, "structured_outputs": grammar}
        for seed, grammar in enumerate(({"regex": _WORDS}, {"json": _LINES}))
    ]
    return [
        {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
        | {"priority": number % 3}
        | body
        for number, body in enumerate(bodies)
    ]
