"""Streamed completions in a closed loop: a fixed number is always under way."""

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx

LOWEST_TOKEN_ID = 1000
HIGHEST_TOKEN_ID = 30_000
"""Plain tokens in any vocabulary of the usual size: special ones lie at the ends."""


@dataclass(frozen=True)
class Load:
    """What is asked: prompts of random token ids, none like another."""

    num_requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.seed)
        return [
            [rng.randint(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID) for _ in range(self.input_tokens)]
            for _ in range(self.num_requests)
        ]


@dataclass
class Exchange:
    """One request; seconds on the monotonic clock. `arrivals`: one for each chunk of text."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    output_tokens: int = 0

    @property
    def time_to_first_token(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def time_per_output_token(self) -> float:
        """Mean over the tokens after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.output_tokens - 1)


@dataclass(frozen=True)
class LoadResult:
    """The exchanges of one load, and how long all of them took together."""

    exchanges: list[Exchange]
    seconds: float

    @property
    def output_tokens_per_second(self) -> float:
        return sum(each.output_tokens for each in self.exchanges) / self.seconds

    @property
    def first_token_ms(self) -> float:
        """Median."""
        return 1e3 * statistics.median(each.time_to_first_token for each in self.exchanges)

    @property
    def per_token_ms(self) -> float:
        """Median over the requests of the mean of each."""
        return 1e3 * statistics.median(each.time_per_output_token for each in self.exchanges)


@dataclass(frozen=True)
class Figures:
    """What one server did with one request after the other, and with many at once."""

    alone: LoadResult
    together: LoadResult


def run_load(url: str, model: str, load: Load) -> LoadResult:
    """Send the load; raises httpx.HTTPError or ValueError when a request fails."""
    return asyncio.run(_run(url, model, load))


async def _run(url: str, model: str, load: Load) -> LoadResult:
    slots = asyncio.Semaphore(load.concurrency)
    limits = httpx.Limits(max_connections=load.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(prompt: list[int]) -> Exchange:
            async with slots:
                return await _complete(client, model, prompt, load.output_tokens)

        started = time.monotonic()
        exchanges = await asyncio.gather(*(one(prompt) for prompt in load.prompts()))
        return LoadResult(list(exchanges), time.monotonic() - started)


async def _complete(
    client: httpx.AsyncClient, model: str, prompt: list[int], output_tokens: int
) -> Exchange:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    exchange = Exchange(time.monotonic())
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.monotonic()
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                raise ValueError(event["error"]["message"])
            if event["choices"]:
                exchange.arrivals.append(now)
            if event.get("usage"):
                exchange.output_tokens = event["usage"]["completion_tokens"]
    if exchange.output_tokens != output_tokens:
        raise ValueError(f"asked for {output_tokens} tokens, got {exchange.output_tokens}")
    return exchange
