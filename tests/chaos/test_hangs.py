"""A process hangs under load without dying, and no client is affected.

The tests share a daemon. Its first worker hangs by an injected fault, so the streams of the first
test are compared with later ones.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from tests.chaos.streams import Stream, assert_same, requests, run_undisturbed
from tests.e2e.daemon import ROLES, Daemon, eventually

pytestmark = pytest.mark.suite("chaos")

STEP_TIMEOUT = 3.0
KILLED = "SIG(KILL|SEGV)"
"""Rarely a process dies of showing its stacks: one that was stopped goes on meanwhile, and may be
about to push a frame. It was to be killed anyway."""
HANG_AT = 20
"""The step: later than the first ones, which may take longer, and amid all streams."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    flags = ("--dtype", "float32", "--step-timeout", str(STEP_TIMEOUT), "--enable-fault-injection")
    with Daemon(*flags, environment={"TOKEND_FAULTS": f"worker:hang@{HANG_AT}"}) as running:
        yield running


@pytest.fixture(scope="module")
def first(daemon: Daemon) -> tuple[list[Stream], set[str], float]:
    """Streams during which the worker hangs."""
    return asyncio.run(run_with_a_hang(daemon, lambda: None))


@pytest.fixture(scope="module")
def expected(daemon: Daemon, first: object) -> list[Stream]:
    return asyncio.run(run_undisturbed(daemon.url, requests()))


async def collect_not_ready_reasons(client: httpx.AsyncClient, reasons: set[str]) -> None:
    """Collect the reasons why the daemon is not ready, without durations."""
    while True:
        response = await client.get("/health/ready")
        found = response.json()["reasons"]
        assert response.status_code == (503 if found else 200)
        reasons.update(re.sub(r" for \d+ s$", "", each) for each in found)
        assert (await client.get("/health/live")).status_code == 200
        await asyncio.sleep(0.05)


async def run_with_a_hang(
    daemon: Daemon, stop: Callable[[], object]
) -> tuple[list[Stream], set[str], float]:
    """Run the streams; returns them, the reasons of not being ready, and the longest token gap."""
    streams, reasons, longest = [Stream(body) for body in requests()], set[str](), 0.0
    async with httpx.AsyncClient(base_url=daemon.url, timeout=120) as client:
        watching = asyncio.create_task(collect_not_ready_reasons(client, reasons))
        running = [asyncio.create_task(each.run(client)) for each in streams]
        await asyncio.gather(*(each.reach(4) for each in streams))
        stop()
        moved, before = time.monotonic(), 0
        while not all(each.done() for each in running):
            assert not any(each.done() and each.exception() for each in (*running, watching))
            num_tokens = sum(each.num_tokens for each in streams)
            if num_tokens > before:
                moved, before = time.monotonic(), num_tokens
            longest = max(longest, time.monotonic() - moved)
            await asyncio.sleep(0.01)
        watching.cancel()
    return streams, reasons, longest


def assert_streams_unaffected(
    daemon: Daemon, expected: list[Stream], outcome: tuple[list[Stream], set[str], float]
) -> None:
    streams, _, longest = outcome
    assert len(streams) >= 8
    for was, now in zip(expected, streams, strict=True):
        assert_same(was, now)
    print(f"{longest:.2f} s without a token, {STEP_TIMEOUT} s of them allowed")
    assert eventually(lambda: httpx.get(f"{daemon.url}/health/ready").status_code == 200)
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert eventually(lambda: not any(daemon.metric(f"vllm:{name}") for name in gauges))
    assert daemon.text.count("Traceback") == 0


def test_streams_survive_a_worker_that_hangs_in_a_step(
    daemon: Daemon, first: tuple[list[Stream], set[str], float], expected: list[Stream]
) -> None:
    """By an injected fault: the process itself is alive and handles signals."""
    assert_streams_unaffected(daemon, expected, first)
    assert first[1] >= {"worker 0: no completed step", "worker 0 is being restarted"}
    assert first[2] > STEP_TIMEOUT
    assert re.search(r"worker 0 \(pid \d+\) hangs, no completed step for 3\.\d s", daemon.text)
    assert re.search(r'worker/worker.py", line \d+ in _launch', daemon.text)
    assert daemon.metric("tokend:watchdog_kills_total") == 1


@pytest.mark.parametrize(
    ("role", "what", "where"),
    [
        ("worker", "no completed step", r'worker/worker.py", line \d+ in run'),
        ("engine_core", "no sign of life", r'engine_core/busy_loop.py", line \d+ in run'),
    ],
)
def test_streams_survive_a_stopped_process(
    daemon: Daemon, expected: list[Stream], role: str, what: str, where: str
) -> None:
    before, kills = daemon.processes(), daemon.metric("tokend:watchdog_kills_total")
    printed = len(daemon.text)
    pid, title = before[role].pid, f"{ROLES[role]} 0"
    outcome = asyncio.run(run_with_a_hang(daemon, psutil.Process(pid).suspend))
    assert_streams_unaffected(daemon, expected, outcome)
    assert outcome[1] >= {f"{title}: {what}", f"{title} is being restarted"}
    text = daemon.text[printed:]
    verdict = re.search(rf"{title} \(pid {pid}\) hangs, {what} for [34]\.\d s", text)
    stacks = re.search(where, text)
    death = re.search(rf"{title} \(pid {pid}\) was killed by {KILLED}", text)
    assert verdict is not None, text
    assert stacks is not None, text
    assert death is not None, text
    assert verdict.start() < stacks.start() < death.start()
    after = daemon.processes()
    assert {each for each in ROLES if before[each].pid != after[each].pid} == {role}
    assert daemon.metric("tokend:watchdog_kills_total") == kills + 1


def test_a_process_stopped_while_idle_is_detected_with_the_next_requests(
    daemon: Daemon, expected: list[Stream]
) -> None:
    before = daemon.processes()
    before["worker"].suspend()
    streams = asyncio.run(run_undisturbed(daemon.url, requests()[:2]))
    for was, now in zip(expected, streams, strict=False):
        assert_same(was, now)
    after = daemon.processes()
    assert {each for each in ROLES if before[each].pid != after[each].pid} == {"worker"}


def test_a_stopped_front_end_is_replaced_and_new_connections_wait(
    daemon: Daemon, expected: list[Stream]
) -> None:
    before = daemon.processes()
    before["api_server"].suspend()
    (stream,) = asyncio.run(run_undisturbed(daemon.url, requests()[:1]))
    assert_same(expected[0], stream)
    after = daemon.processes()
    assert {each for each in ROLES if before[each].pid != after[each].pid} == {"api_server"}
