"""One of two tensor-parallel workers, or their engine, dies or hangs; no client is affected.

The tests share a daemon, so later deaths happen to a daemon with earlier ones.
"""

import asyncio
import re
import signal
from collections.abc import Iterator

import psutil
import pytest

from deploy.bench.processes import pids_by_title
from tests.chaos.aftermath import ENGINE, WORKER, assert_unharmed
from tests.chaos.streams import Stream, assert_same, requests, run_undisturbed
from tests.chaos.test_deaths import SEATS, run_with_deaths
from tests.chaos.test_hangs import STEP_TIMEOUT, run_with_a_hang
from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("chaos")

OTHER_WORKER = "tokend: worker 1"
WORKERS = {WORKER, OTHER_WORKER}
RAISE_AT = 20
"""The step: amid all streams."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    flags = ("--tensor-parallel-size", "2", "--dtype", "float32", "--max-num-seqs", str(SEATS))
    hangs = ("--step-timeout", str(STEP_TIMEOUT), "--enable-fault-injection")
    faults = {"TOKEND_FAULTS": f"worker1:raise@{RAISE_AT}"}
    with Daemon(*flags, *hangs, environment=faults) as running:
        yield running


@pytest.fixture(scope="module")
def first(daemon: Daemon) -> list[Stream]:
    """Streams during which the second rank raises an exception."""
    return asyncio.run(run_undisturbed(daemon.url, requests()))


@pytest.fixture(scope="module")
def expected(daemon: Daemon, first: object) -> list[Stream]:
    return asyncio.run(run_undisturbed(daemon.url, requests()))


def process(daemon: Daemon, title: str) -> psutil.Process:
    return psutil.Process(pids_by_title(daemon.pid)[title])


def test_an_exception_in_one_rank_is_reported_once_with_its_rank(
    daemon: Daemon, first: list[Stream], expected: list[Stream]
) -> None:
    """The other rank only loses its group and is restarted with the first."""
    for was, now in zip(expected, first, strict=True):
        assert_same(was, now)
    assert daemon.text.count("Traceback") == 1
    assert re.search(r"worker 1 \(pid \d+\) .*restarted\n.*Traceback", daemon.text)
    assert re.search(r"rank 1 failed in step \d+: InjectedFaultError", daemon.text)
    assert re.search(r"worker 0 \(pid \d+\)", daemon.text) is None
    assert daemon.metric("tokend:restarts_total") == 1


@pytest.mark.parametrize(
    ("titles", "number", "restarted"),
    [
        ({OTHER_WORKER}, signal.SIGKILL, WORKERS),
        ({WORKER}, signal.SIGSEGV, WORKERS),
        ({ENGINE}, signal.SIGKILL, {ENGINE}),
        ({ENGINE, OTHER_WORKER}, signal.SIGKILL, {ENGINE, *WORKERS}),
    ],
    ids=["second rank", "first rank", "engine", "engine and second rank"],
)
def test_streams_survive_the_death_of_a_rank_or_engine(
    daemon: Daemon,
    expected: list[Stream],
    titles: set[str],
    number: signal.Signals,
    restarted: set[str],
) -> None:
    """Ranks are restarted together; if only their engine dies they stay and rejoin."""
    victims = [process(daemon, title) for title in titles]
    tracebacks = daemon.text.count("Traceback")
    with assert_unharmed(daemon, restarted):
        streams, gap = asyncio.run(run_with_deaths(daemon, victims, number))
    for was, now in zip([*expected, expected[0]], streams, strict=True):
        assert_same(was, now)
    print(f"{titles}: {gap:.2f} s from death to the next token")
    for victim, title in zip(victims, titles, strict=True):
        assert f"{title.removeprefix('tokend: ')} (pid {victim.pid}) was killed" in daemon.text
    assert daemon.text.count("Traceback") == tracebacks


@pytest.mark.parametrize("title", [OTHER_WORKER, WORKER])
def test_streams_survive_a_stopped_rank(daemon: Daemon, expected: list[Stream], title: str) -> None:
    victim, printed = process(daemon, title), len(daemon.text)
    with assert_unharmed(daemon, WORKERS):
        streams, reasons, longest = asyncio.run(run_with_a_hang(daemon, victim.suspend))
    for was, now in zip(expected, streams, strict=True):
        assert_same(was, now)
    name = title.removeprefix("tokend: ")
    assert f"{name}: no completed step" in reasons
    assert longest > STEP_TIMEOUT
    text = daemon.text[printed:]
    assert re.search(rf"{name} \(pid {victim.pid}\) hangs, no completed step for [34]\.\d s", text)
