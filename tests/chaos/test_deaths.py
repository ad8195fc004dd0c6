"""A process dies in the middle of everything, and no client notices.

Each test uses the daemon that the one before has left, so the second death is not the first.
"""

import asyncio
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from deploy.bench.processes import pids_by_title
from tests.chaos.aftermath import FRONT_END, control, unharmed
from tests.chaos.streams import Stream, assert_same, requests, undisturbed
from tests.e2e.daemon import ROLES, Daemon

pytestmark = pytest.mark.suite("chaos")

OTHER_FRONT_END = "tokend: api 1"
SEATS = 9
"""Fewer than the streams have choices: the last ones wait in the queue when it happens."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("--dtype", "float32", "--max-num-seqs", str(SEATS)) as running:
        yield running


@pytest.fixture(scope="module")
def expected(daemon: Daemon) -> list[Stream]:
    """What an undisturbed daemon answers. Once before, so that prefixes are in the cache."""
    return asyncio.run(undisturbed(daemon.url, requests()))


async def with_deaths(
    daemon: Daemon, victims: list[psutil.Process], number: signal.Signals = signal.SIGKILL
) -> tuple[list[Stream], float]:
    """The streams, and the seconds from the deaths to the next token of any.

    One more client goes away in the gap, and one more request comes.
    """
    streams = [Stream(body) for body in requests()]
    leaving = Stream(requests()[0] | {"prompt": "Somebody who leaves", "max_tokens": 4000})
    late = Stream(requests()[0])
    async with httpx.AsyncClient(base_url=daemon.url, timeout=120) as client:
        left = asyncio.create_task(leaving.run(client))
        await leaving.reach(1)
        running = [asyncio.create_task(each.run(client)) for each in streams]
        await asyncio.gather(*(each.reach(4) for each in streams[: SEATS - 2]))
        for victim in victims:
            victim.send_signal(number)
        died = time.monotonic()
        left.cancel()
        before = sum(each.num_tokens for each in streams)
        running.append(asyncio.create_task(late.run(client)))
        while sum(each.num_tokens for each in streams) <= before + SEATS:  # some were on the way
            assert not any(each.done() and each.exception() for each in running)
            await asyncio.sleep(0.01)
        gap = time.monotonic() - died
        await asyncio.gather(*running)
    return [*streams, late], gap


@pytest.mark.parametrize(
    "roles",
    [
        {"worker"},
        {"engine_core"},
        pytest.param({"worker", "engine_core"}, marks=pytest.mark.suite("chaos")),
    ],
    ids=lambda killed: " and ".join(sorted(killed)),
)
def test_no_stream_notices(daemon: Daemon, expected: list[Stream], roles: set[str]) -> None:
    before = daemon.processes()
    restarts = daemon.metric("tokend:restarts_total")
    with unharmed(daemon, {f"tokend: {ROLES[role]} 0" for role in roles}):
        streams, gap = asyncio.run(with_deaths(daemon, [before[role] for role in roles]))
    for was, now in zip([*expected, expected[0]], streams, strict=True):
        assert_same(was, now)
    print(f"{roles}: {gap:.2f} s from death to the next token")
    assert daemon.metric("tokend:restarts_total") == restarts + len(roles)
    assert all(f"{ROLES[role]} 0: is back after" in daemon.text for role in roles)
    assert daemon.text.count("Traceback") == 0


def test_with_a_front_end_only_its_own_streams_end(daemon: Daemon) -> None:
    """Whoever connects in the gap waits for the next one; the engine drops what nobody reads."""
    body = requests()[0] | {"max_tokens": 4000, "stream": True}
    url = f"{daemon.url}/v1/completions"
    with unharmed(daemon, {FRONT_END}):
        with httpx.stream("POST", url, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            daemon.processes()["api_server"].kill()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        control(daemon)


LONG = requests()[0] | {"max_tokens": 200}
MOST = 24
"""Connections that it may take until each front end has one."""


def num_connections(front_end: psutil.Process) -> int:
    """Of clients."""
    found = front_end.net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED for each in found)


async def with_one_of_two_killed(daemon: Daemon) -> tuple[list[Stream], int]:
    """The streams of the other one, to their end, and how many there must be."""
    pids = pids_by_title(daemon.pid)
    dead, other = psutil.Process(pids[FRONT_END]), psutil.Process(pids[OTHER_FRONT_END])
    running: list[asyncio.Task[Stream]] = []
    async with httpx.AsyncClient(base_url=daemon.url, timeout=120) as client:
        while not (num_connections(dead) and num_connections(other)):
            assert len(running) < MOST, "one front end has all connections"
            stream = Stream(LONG)
            running.append(asyncio.create_task(stream.run(client)))
            await stream.reach(1)
        assert not any(each.done() for each in running)
        num_lost = num_connections(dead)
        dead.kill()
        ends = await asyncio.gather(*running, return_exceptions=True)
    lost = [each for each in ends if isinstance(each, httpx.TransportError)]
    assert len(lost) == num_lost
    assert len(ends) > num_lost
    return [each for each in ends if isinstance(each, Stream)], len(ends) - num_lost


def test_the_streams_of_the_other_front_end_go_on() -> None:
    with Daemon("--dtype", "float32", "--api-server-count", "2") as daemon:
        (expected,) = asyncio.run(undisturbed(daemon.url, [LONG]))
        with unharmed(daemon, {FRONT_END}):
            streams, number = asyncio.run(with_one_of_two_killed(daemon))
        assert len(streams) == number
        for stream in streams:
            assert_same(expected, stream)
