"""Two engines behind one front end: when one dies or hangs, its streams go on at the other.

The tests share a daemon, so later deaths happen to a daemon with earlier ones.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from deploy.bench.processes import pids_by_title
from tests.chaos.aftermath import assert_unharmed
from tests.chaos.streams import Stream, assert_same, requests, run_undisturbed
from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("chaos")

STEP_TIMEOUT = 5.0
FLAGS = ("--dtype", "float32", "--data-parallel-size", "2", "--step-timeout", str(STEP_TIMEOUT))


def mixed() -> list[dict[str, Any]]:
    """Greedy and seeded streams, n = 2, grammars, log-probabilities, and penalties."""
    penalties = {
        "prompt": "The sea, the sea, the",
        "temperature": 0.7,
        "seed": 11,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.1,
        "max_tokens": 28,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return [*requests(), penalties]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(*FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def expected(daemon: Daemon) -> list[Stream]:
    return asyncio.run(run_undisturbed(daemon.url, mixed()))


async def run_with_a_fault(
    daemon: Daemon, victim: psutil.Process, number: signal.Signals
) -> tuple[list[Stream], float, set[int]]:
    """Run the streams and send a signal amid them.

    Returns the streams, the moment, and all statuses that /health/ready had.
    """
    streams, statuses = [Stream(body) for body in mixed()], set[int]()

    async def watch(client: httpx.AsyncClient) -> None:
        while True:
            statuses.add((await client.get("/health/ready")).status_code)
            await asyncio.sleep(0.02)

    async with httpx.AsyncClient(base_url=daemon.url, timeout=120) as client:
        watching = asyncio.create_task(watch(client))
        running = [asyncio.create_task(each.run(client)) for each in streams]
        await asyncio.gather(*(each.reach(4) for each in streams))
        victim.send_signal(number)
        moment = time.monotonic()
        await asyncio.gather(*running)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return streams, moment, statuses


@pytest.mark.parametrize(
    ("title", "number"),
    [
        ("tokend: engine 0", signal.SIGKILL),
        ("tokend: worker 1", signal.SIGKILL),
        ("tokend: engine 1", signal.SIGSTOP),
        ("tokend: worker 0", signal.SIGSTOP),
    ],
    ids=["engine dies", "worker dies", "engine hangs", "worker hangs"],
)
def test_streams_go_on_at_the_other_engine(
    daemon: Daemon, expected: list[Stream], title: str, number: signal.Signals
) -> None:
    compile_a_grammar(daemon)
    before = {name: tokens(daemon, name) for name in "01"}
    victim = psutil.Process(pids_by_title(daemon.pid)[title])
    with assert_unharmed(daemon, {title}):
        streams, moment, statuses = asyncio.run(run_with_a_fault(daemon, victim, number))
        assert eventually(lambda: not missing(daemon), 60)
    for was, now in zip(expected, streams, strict=True):
        assert_same(was, now)
    gaps = sorted(each.longest_pause(moment) for each in streams)
    print(f"{title}, {number.name}: longest pause of each stream:", *(f"{gap:.2f}" for gap in gaps))
    assert statuses == {200}
    assert all(tokens(daemon, name) > before[name] for name in "01"), "one engine got nothing"
    assert daemon.text.count("Traceback") == 0


def compile_a_grammar(daemon: Daemon) -> None:
    """Have each engine start its compiler of grammars, which has a descriptor from then on."""
    body = {"prompt": "A", "max_tokens": 2, "structured_outputs": {"regex": "[a-z]{3}"}}
    for engine in "01":
        headers = {"X-data-parallel-rank": engine}
        answer = httpx.post(f"{daemon.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text


def missing(daemon: Daemon) -> dict[str, list[str]]:
    found: dict[str, list[str]] = httpx.get(f"{daemon.url}/health/ready").json()["missing_engines"]
    return found


def tokens(daemon: Daemon, engine: str) -> float:
    """Return the tokens that an engine has generated."""
    start = f'vllm:generation_tokens_total{{engine="{engine}",'
    text = httpx.get(f"{daemon.url}/metrics").text
    (line,) = [each for each in text.splitlines() if each.startswith(start)]
    return float(line.split()[-1])


def complete(daemon: Daemon, prompt: str) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    return httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=240)


@pytest.mark.parametrize(
    "faults",
    [
        "engine0:raise@1x2,engine1:raise@1x2",
        "worker0:raise@1x2,worker1:raise@1x2",
        "engine0:kill@1x2,worker0:kill@1,worker1:kill@1x2",
    ],
    ids=["engines", "workers", "both"],
)
def test_a_request_that_crashes_two_engines_runs_alone_and_ends(faults: str) -> None:
    """The third engine that it crashes runs nothing else; others are served after that."""
    flags = ("--data-parallel-size", "2", "--enable-fault-injection")
    environment = {"TOKEND_FAULTS": faults}
    with Daemon(*flags, environment=environment) as daemon, ThreadPoolExecutor() as pool:
        poison = pool.submit(complete, daemon, "The sea is")
        assert poison.result().status_code == 500
        assert "crashed 3 times" in poison.result().json()["error"]["message"]
        assert daemon.metric("tokend:restarts_total") <= 3
        innocent = complete(daemon, "Once upon a time")
        assert innocent.status_code == 200
        assert complete(daemon, "Once upon a time").json()["choices"] == innocent.json()["choices"]


def test_a_request_that_crashes_two_engines_by_chance_is_served() -> None:
    faults = {"TOKEND_FAULTS": "engine0:raise@1,engine1:raise@1"}
    flags = ("--data-parallel-size", "2", "--enable-fault-injection")
    with Daemon(*flags, environment=faults) as daemon:
        answer = complete(daemon, "The sea is")
        assert answer.status_code == 200
        assert complete(daemon, "The sea is").json()["choices"] == answer.json()["choices"]
        assert daemon.metric("tokend:restarts_total") == 2
