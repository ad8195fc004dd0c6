"""Clients go away, in every state that a request can be in; nothing of it stays."""

import asyncio
import contextlib
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.aftermath import unharmed
from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("chaos")

PATH = "/v1/completions"
ENDLESS = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True}
SEATS = 2
TIMEOUT = httpx.Timeout(60)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("--dtype", "float32", "--max-num-seqs", str(SEATS)) as running:
        yield running


def aborted(daemon: Daemon) -> float:
    """Choices that were accepted and that nobody waited for."""
    text = httpx.get(f"{daemon.url}/metrics").text
    (value,) = re.findall(r'^vllm:request_success_total{.*"abort".*} (\S+)$', text, re.MULTILINE)
    return float(value)


async def until(daemon: Daemon, **gauges: int) -> None:
    """Until so many requests run or wait."""
    async with httpx.AsyncClient(base_url=daemon.url) as client, asyncio.timeout(30):
        for name, number in gauges.items():
            wanted = re.compile(rf"^vllm:num_requests_{name}{{.*}} {number}\.0$", re.MULTILINE)
            while not wanted.search((await client.get("/metrics")).text):
                await asyncio.sleep(0.01)


async def stream(client: httpx.AsyncClient, body: dict[str, Any], num_events: int) -> None:
    """Hear so many events and go away."""
    async with client.stream("POST", PATH, json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            num_events -= line.startswith("data: ")
            if num_events == 0:
                return


async def leave(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def leave_in_queue(daemon: Daemon, client: httpx.AsyncClient) -> int:
    """Behind two that have all seats, who leave in the middle of their decoding."""
    running = [asyncio.create_task(client.post(PATH, json=ENDLESS)) for _ in range(SEATS)]
    await until(daemon, running=SEATS)
    waiting = asyncio.create_task(client.post(PATH, json=ENDLESS | {"n": 2}))
    await until(daemon, waiting=2)
    await leave(waiting)
    await until(daemon, waiting=0)
    for task in running:
        await leave(task)
    return SEATS + 2


async def leave_in_prefill(daemon: Daemon, client: httpx.AsyncClient) -> int:
    prompt = [number % 30_000 + 1000 for number in range(6000)]
    task = asyncio.create_task(client.post(PATH, json={"prompt": prompt, "max_tokens": 5}))
    await until(daemon, running=1)
    await leave(task)
    return 1


async def leave_in_decode(daemon: Daemon, client: httpx.AsyncClient) -> int:
    await stream(client, ENDLESS | {"n": 2}, 5)
    return 2


async def leave_after_the_last_token(daemon: Daemon, client: httpx.AsyncClient) -> int:
    """All is sent, and the end of the connection is all that the server hears of it."""
    await stream(client, ENDLESS | {"max_tokens": 3}, 3)
    await until(daemon, running=0)
    return 0


async def leave_before_the_answer(daemon: Daemon, client: httpx.AsyncClient) -> int:
    """As soon as the request is on its way, whether or not anybody has read it."""
    address = httpx.URL(daemon.url)
    for _ in range(20):
        _, writer = await asyncio.open_connection(address.host, address.port)
        body = b'{"prompt": "Once", "max_tokens": 4000}'
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.transport.abort()
    return -1


LEAVING = [
    leave_in_queue,
    leave_in_prefill,
    leave_in_decode,
    leave_after_the_last_token,
    leave_before_the_answer,
]


@pytest.mark.parametrize("leaving", LEAVING, ids=lambda each: each.__name__)
def test_nothing_stays_of_whoever_leaves(daemon: Daemon, leaving: Any) -> None:
    """It is counted once, unless the engine had not heard of it or was done with it."""

    async def go() -> int:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=TIMEOUT) as client:
            return await leaving(daemon, client)

    with unharmed(daemon):
        before = aborted(daemon)
        number = asyncio.run(go())
    if number >= 0:
        assert aborted(daemon) == before + number


def test_a_crowd_that_leaves_at_any_moment(daemon: Daemon) -> None:
    rng = random.Random(0)

    async def visitor(client: httpx.AsyncClient) -> None:
        body = ENDLESS | {"n": rng.randint(1, 2), "prompt": "Once " * rng.randint(1, 200)}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0, 3)):
                await stream(client, body, 1000)

    async def crowd() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=daemon.url, timeout=TIMEOUT, limits=limits) as client:
            await asyncio.gather(*(visitor(client) for _ in range(60)))

    with unharmed(daemon):
        asyncio.run(crowd())
