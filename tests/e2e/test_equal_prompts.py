"""Sixteen equal prompts compute their prefix once, across tenants and an engine's death."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.chaos.streams import Stream, assert_same
from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("daemons")

NUM, SIZE, BLOCK_SIZE = 16, 512, 16
ONE_PREFIX = SIZE + (NUM - 1) * BLOCK_SIZE
"""Tokens: the last block of a prompt is computed by each, for the scores of its last token."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon whose steps hold chunks of several prompts."""
    flags = ["--long-prefill-token-threshold", "64"]
    with Daemon(*flags, "--tenant-by", "header") as running:
        yield running


def body(seed: int, **changes: Any) -> dict[str, Any]:
    return {
        "prompt": random.Random(seed).choices(range(1000, 30_000), k=SIZE),
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
        "return_token_ids": True,
        **changes,
    }


async def all_at_once(daemon: Daemon, seed: int, num_tenants: int) -> list[Stream]:
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=daemon.url, timeout=300, headers={"X-Tenant-ID": f"tenant-{tenant}"}
                )
            )
            for tenant in range(num_tenants)
        ]
        streams = (Stream(body(seed)).run(clients[each % num_tenants]) for each in range(NUM))
        return await asyncio.gather(*streams)


async def alone(daemon: Daemon, seed: int) -> Stream:
    """The output of the same prompt with an empty prefix cache."""
    async with httpx.AsyncClient(base_url=daemon.url, timeout=300) as client:
        return await Stream(body(seed, cache_salt="alone")).run(client)


def num_computed(daemon: Daemon) -> float:
    """The number of computed prompt tokens."""
    asked = daemon.metric("vllm:prefix_cache_queries_total")
    return asked - daemon.metric("vllm:prefix_cache_hits_total")


@pytest.mark.parametrize(
    "num_tenants",
    [4, *(pytest.param(each, marks=pytest.mark.suite("settings")) for each in (1, NUM))],
)
async def test_equal_prompts_compute_one_prefix(daemon: Daemon, num_tenants: int) -> None:
    before = num_computed(daemon)
    streams = await all_at_once(daemon, num_tenants, num_tenants)
    assert eventually(lambda: num_computed(daemon) - before >= ONE_PREFIX)
    assert num_computed(daemon) - before == ONE_PREFIX
    expected = await alone(daemon, num_tenants)
    for each in streams:
        assert_same(expected, each)


async def test_equal_prompts_survive_the_death_of_the_engine(daemon: Daemon) -> None:
    seed = 100
    restarts = daemon.metric("tokend:restarts_total")
    running = asyncio.create_task(all_at_once(daemon, seed, 4))
    waiting = "vllm:num_requests_waiting"
    assert await asyncio.to_thread(eventually, lambda: daemon.metric(waiting) == NUM - 1)
    daemon.processes()["engine_core"].kill()
    before = num_computed(daemon)
    streams = await running
    assert daemon.metric("tokend:restarts_total") == restarts + 1
    # No request had output before, so all are sent to the next engine.
    assert eventually(lambda: num_computed(daemon) - before >= ONE_PREFIX)
    assert num_computed(daemon) - before == ONE_PREFIX
    expected = await alone(daemon, seed)
    for each in streams:
        assert_same(expected, each)
