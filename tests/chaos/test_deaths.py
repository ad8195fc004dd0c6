"""A process is killed under load, and no client is affected.

The tests share a daemon, so later deaths happen to a daemon with earlier ones.
"""

import asyncio
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from deploy.bench.processes import pids_by_title
from tests.chaos.aftermath import FRONT_END, assert_unharmed, control
from tests.chaos.streams import Stream, assert_same, requests, run_undisturbed
from tests.e2e.daemon import ROLES, Daemon

pytestmark = pytest.mark.suite("chaos")

OTHER_FRONT_END = "tokend: api 1"
SEATS = 9
"""Fewer than the choices of all streams: the last ones wait in the queue at the death."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("--dtype", "float32", "--max-num-seqs", str(SEATS)) as running:
        yield running


@pytest.fixture(scope="module")
def expected(daemon: Daemon) -> list[Stream]:
    """Outputs without faults; this run also fills the prefix cache."""
    return asyncio.run(run_undisturbed(daemon.url, requests()))


async def run_with_deaths(
    daemon: Daemon, victims: list[psutil.Process], number: signal.Signals = signal.SIGKILL
) -> tuple[list[Stream], float]:
    """Run the streams; returns them, and the seconds from the deaths to the next token.

    During the gap one more client disconnects, and one more request arrives.
    """
    streams = [Stream(body) for body in requests()]
    leaving = Stream(requests()[0] | {"prompt": "A client that disconnects", "max_tokens": 4000})
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
        # Some tokens were in transit at the death.
        while sum(each.num_tokens for each in streams) <= before + SEATS:
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
def test_streams_survive_the_death_of_worker_and_engine(
    daemon: Daemon, expected: list[Stream], roles: set[str]
) -> None:
    before = daemon.processes()
    restarts = daemon.metric("tokend:restarts_total")
    with assert_unharmed(daemon, {f"tokend: {ROLES[role]} 0" for role in roles}):
        streams, gap = asyncio.run(run_with_deaths(daemon, [before[role] for role in roles]))
    for was, now in zip([*expected, expected[0]], streams, strict=True):
        assert_same(was, now)
    print(f"{roles}: {gap:.2f} s from death to the next token")
    assert daemon.metric("tokend:restarts_total") == restarts + len(roles)
    assert all(f"{ROLES[role]} 0 is back after" in daemon.text for role in roles)
    assert daemon.text.count("Traceback") == 0


def test_the_death_of_a_front_end_ends_only_its_own_streams(daemon: Daemon) -> None:
    """New connections wait for the next front end; the engine drops outputs of the dead one."""
    body = requests()[0] | {"max_tokens": 4000, "stream": True}
    url = f"{daemon.url}/v1/completions"
    with assert_unharmed(daemon, {FRONT_END}):
        with httpx.stream("POST", url, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            daemon.processes()["api_server"].kill()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        control(daemon)


LONG = requests()[0] | {"max_tokens": 200}
MOST = 24
"""The most connections until every front end has one."""


def num_connections(front_end: psutil.Process) -> int:
    """Established connections of clients."""
    found = front_end.net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED for each in found)


async def kill_one_of_two_front_ends(daemon: Daemon) -> tuple[list[Stream], int]:
    """Kill one front end; returns the other's complete streams and their expected number."""
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


def test_streams_of_the_other_front_end_continue() -> None:
    with Daemon("--dtype", "float32", "--api-server-count", "2") as daemon:
        (expected,) = asyncio.run(run_undisturbed(daemon.url, [LONG]))
        with assert_unharmed(daemon, {FRONT_END}):
            streams, number = asyncio.run(kill_one_of_two_front_ends(daemon))
        assert len(streams) == number
        for stream in streams:
            assert_same(expected, stream)
