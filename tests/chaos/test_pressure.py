"""Requests that fit into the pool only alone run one after another, and all complete."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.chaos.aftermath import assert_unharmed
from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("chaos")

BLOCKS = 12
"""Of 16 tokens, the null block included."""


def bodies() -> list[dict[str, Any]]:
    """Three requests that need nearly the whole pool, and others that need a part of it."""
    common = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    large = [{"prompt": [5 + each, *range(100, 240)], "max_tokens": 24} for each in range(3)]
    small = [{"prompt": f"Number {each} is", "max_tokens": 24} for each in range(4)]
    several = {"prompt": "Roses are", "max_tokens": 24, "n": 3, "temperature": 0.8, "seed": 3}
    return [common | each for each in [*large, *small, several]]


async def complete(client: httpx.AsyncClient, body: dict[str, Any]) -> list[list[int]]:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_that_fit_only_alone_complete(policy: str) -> None:
    flags = ("--dtype", "float32", "--num-gpu-blocks-override", str(BLOCKS))

    async def run_requests(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            alone = [await complete(client, body) for body in bodies()]
            together = await asyncio.gather(*(complete(client, body) for body in bodies()))
        assert together == alone

    with Daemon(*flags, "--scheduling-policy", policy) as daemon, assert_unharmed(daemon):
        before = daemon.metric("vllm:num_preemptions_total")
        asyncio.run(run_requests(daemon.url))
        assert daemon.metric("vllm:num_preemptions_total") > before
