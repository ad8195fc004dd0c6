"""Clients disconnect in every state of a request; its resources are freed."""

import asyncio
import contextlib
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.aftermath import assert_unharmed
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


def num_aborted(daemon: Daemon) -> float:
    """The number of choices that ended by a disconnect."""
    text = httpx.get(f"{daemon.url}/metrics").text
    (value,) = re.findall(r'^vllm:request_success_total{.*"abort".*} (\S+)$', text, re.MULTILINE)
    return float(value)


async def wait_for_gauges(daemon: Daemon, **gauges: int) -> None:
    """Wait until this many requests run or wait."""
    async with httpx.AsyncClient(base_url=daemon.url) as client, asyncio.timeout(30):
        for name, number in gauges.items():
            wanted = re.compile(rf"^vllm:num_requests_{name}{{.*}} {number}\.0$", re.MULTILINE)
            while not wanted.search((await client.get("/metrics")).text):
                await asyncio.sleep(0.01)


async def stream(client: httpx.AsyncClient, body: dict[str, Any], num_events: int) -> None:
    """Read this many events and disconnect."""
    async with client.stream("POST", PATH, json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            num_events -= line.startswith("data: ")
            if num_events == 0:
                return


async def cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def disconnect_in_queue(daemon: Daemon, client: httpx.AsyncClient) -> int:
    """Wait in the queue behind two requests that take all slots and are cancelled in decode."""
    running = [asyncio.create_task(client.post(PATH, json=ENDLESS)) for _ in range(SEATS)]
    await wait_for_gauges(daemon, running=SEATS)
    waiting = asyncio.create_task(client.post(PATH, json=ENDLESS | {"n": 2}))
    await wait_for_gauges(daemon, waiting=2)
    await cancel(waiting)
    await wait_for_gauges(daemon, waiting=0)
    for task in running:
        await cancel(task)
    return SEATS + 2


async def disconnect_in_prefill(daemon: Daemon, client: httpx.AsyncClient) -> int:
    prompt = [number % 30_000 + 1000 for number in range(6000)]
    task = asyncio.create_task(client.post(PATH, json={"prompt": prompt, "max_tokens": 5}))
    await wait_for_gauges(daemon, running=1)
    await cancel(task)
    return 1


async def disconnect_in_decode(daemon: Daemon, client: httpx.AsyncClient) -> int:
    await stream(client, ENDLESS | {"n": 2}, 5)
    return 2


async def disconnect_after_the_last_token(daemon: Daemon, client: httpx.AsyncClient) -> int:
    """The output is complete; the server only sees the end of the connection."""
    await stream(client, ENDLESS | {"max_tokens": 3}, 3)
    await wait_for_gauges(daemon, running=0)
    return 0


async def disconnect_before_the_response(daemon: Daemon, client: httpx.AsyncClient) -> int:
    """Disconnect as soon as the request is sent, whether or not it has been read."""
    address = httpx.URL(daemon.url)
    for _ in range(20):
        _, writer = await asyncio.open_connection(address.host, address.port)
        body = b'{"prompt": "Once", "max_tokens": 4000}'
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.transport.abort()
    return -1


DISCONNECTS = [
    disconnect_in_queue,
    disconnect_in_prefill,
    disconnect_in_decode,
    disconnect_after_the_last_token,
    disconnect_before_the_response,
]


@pytest.mark.parametrize("disconnect", DISCONNECTS, ids=lambda each: each.__name__)
def test_a_disconnect_frees_everything_and_is_counted_once(daemon: Daemon, disconnect: Any) -> None:
    """A request that the engine never received or has finished is not counted."""

    async def run_disconnect() -> int:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=TIMEOUT) as client:
            return await disconnect(daemon, client)

    with assert_unharmed(daemon):
        before = num_aborted(daemon)
        number = asyncio.run(run_disconnect())
    if number >= 0:
        assert num_aborted(daemon) == before + number


def test_many_clients_disconnect_at_random_times(daemon: Daemon) -> None:
    rng = random.Random(0)

    async def disconnect_at_random(client: httpx.AsyncClient) -> None:
        body = ENDLESS | {"n": rng.randint(1, 2), "prompt": "Once " * rng.randint(1, 200)}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0, 3)):
                await stream(client, body, 1000)

    async def run_clients() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=daemon.url, timeout=TIMEOUT, limits=limits) as client:
            await asyncio.gather(*(disconnect_at_random(client) for _ in range(60)))

    with assert_unharmed(daemon):
        asyncio.run(run_clients())
