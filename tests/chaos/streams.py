"""A mix of streams that run while a process dies."""

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

SHARED = (
    "The lighthouse keeper wrote in his log every evening, whatever the weather was, and what he "
    "wrote was read by nobody. He noted the wind, the swell, and the ships that he had seen. "
)
NUM_TOKENS = 28
WORDS = "([a-z]{3,8} ){40}"
NAMES = {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 30}
"""Grammars that no text of NUM_TOKENS tokens completes."""
TIE_GAP = 1e-3
"""Between the two best log-probabilities: closer ones may change places when recomputed."""


def requests() -> list[dict[str, Any]]:
    """Greedy with log-probabilities, seeded, n = 2; some share a prefix, two have a grammar."""
    greedy = [
        {"prompt": text, "temperature": 0, "logprobs": 2}
        for text in ("Once upon a time", "The capital of France is", SHARED + "On Monday", "1 2 3")
    ]
    seeded = [
        {"prompt": text, "temperature": 0.8, "seed": seed}
        for seed, text in enumerate(("My name is", SHARED + "On Friday", "In the year 1900", "To"))
    ]
    pair = {"prompt": "Two roads diverged in", "temperature": 0.9, "seed": 7, "n": 2}
    words = {"prompt": "The words are", "temperature": 0, "structured_outputs": {"regex": WORDS}}
    names = {
        "prompt": "Names: ",
        "temperature": 0.8,
        "seed": 5,
        "structured_outputs": {"json": NAMES},
    }
    bound = [each | {"ignore_eos": False} for each in (words, names)]
    bodies = [*greedy, *seeded, pair, *bound]
    return [
        {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True} | body
        for body in bodies
    ]


@dataclass
class Stream:
    """A request and its output.

    choices: token ids by index. gaps: of greedy tokens. arrivals: of events, in monotonic seconds.
    """

    body: dict[str, Any]
    choices: dict[int, list[int]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.choices.values()))

    def longest_pause(self, since: float) -> float:
        """Return the longest time between two events after a moment, in seconds."""
        times = [since, *(each for each in self.arrivals if each > since)]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    async def run(self, client: httpx.AsyncClient) -> "Stream":
        """Stream to the end; fails on an error event, an error status, or an end without [DONE]."""
        body = self.body | {"stream": True, "stream_options": {"include_usage": True}}
        done = False
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    await self._take(json.loads(line.removeprefix("data: ")))
        assert done, "the stream ended without [DONE]"
        assert len(self.reasons) == self.body.get("n", 1)
        return self

    async def reach(self, num_tokens: int) -> None:
        """Wait until the stream has `num_tokens` tokens."""
        async with self.moved:
            await self.moved.wait_for(lambda: self.num_tokens >= num_tokens)

    async def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        self.usage = event.get("usage") or self.usage
        self.arrivals.append(time.monotonic())
        async with self.moved:
            for choice in event["choices"]:
                tokens = self.choices.setdefault(choice["index"], [])
                tokens += choice["token_ids"]
                for best in (choice["logprobs"] or {}).get("top_logprobs") or []:
                    first, second, *_ = sorted(best.values(), reverse=True)
                    self.gaps.append(first - second)
                if choice["finish_reason"]:
                    self.reasons[choice["index"]] = choice["finish_reason"]
            self.moved.notify_all()


def assert_same(expected: Stream, got: Stream) -> None:
    """The tokens are the same except after ties of greedy choices; none is missing or repeated."""
    assert got.reasons == expected.reasons
    assert got.choices.keys() == expected.choices.keys()
    for number, tokens in expected.choices.items():
        others = got.choices[number]
        assert len(others) == len(tokens) == expected.body["max_tokens"]
        if others != tokens:
            place = next(i for i in range(len(tokens)) if others[i] != tokens[i])
            gap = expected.gaps[place] if expected.gaps else None
            print(f"{expected.body['prompt']!r}, token {place}: gap {gap}")
            assert gap is not None, f"seeded stream differs: {expected.body}"
            assert gap < TIE_GAP, f"differs at {place}: {expected.body}"
    for name in ("prompt_tokens", "completion_tokens"):
        assert got.usage[name] == expected.usage[name]


async def run_undisturbed(url: str, bodies: Iterable[dict[str, Any]]) -> list[Stream]:
    """Run all requests concurrently, without faults."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await asyncio.gather(*(Stream(body).run(client) for body in bodies))
