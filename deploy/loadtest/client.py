"""A client that streams completions and notes when each chunk came."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx


@dataclass(frozen=True)
class Timing:
    """One request. first, last: seconds from sending to the first and the last token."""

    first: float
    last: float
    num_tokens: int

    @property
    def per_token(self) -> float:
        """Seconds from token to token after the first."""
        return (self.last - self.first) / max(1, self.num_tokens - 1)


async def complete(client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int) -> Timing:
    """One greedy completion of exactly `max_tokens` tokens after a prompt of token ids."""
    request = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.perf_counter()
    first = last = 0.0
    num_tokens = 0
    async with client.stream("POST", "/v1/completions", json=request) as response:
        if response.status_code != 200:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk["choices"]:
                last = time.perf_counter() - sent
                first = first or last
            elif chunk.get("usage"):
                num_tokens = chunk["usage"]["completion_tokens"]
    return Timing(first, last, num_tokens)


async def complete_together(
    url: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[Timing]:
    """All at once."""
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as client:
        return await asyncio.gather(*(complete(client, each, max_tokens) for each in prompts))
