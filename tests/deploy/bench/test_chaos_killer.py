"""Which process is killed and when; the replacement of any other process is a fault."""

import asyncio
import random
import signal
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from deploy.bench.chaos import killer
from deploy.bench.chaos.killer import (
    ENGINE,
    NUM_STREAMS,
    WORKER,
    ClientCounts,
    Disruption,
    ProcessKiller,
)
from deploy.bench.chaos.streams import CompletionStream
from proto.errors import TokendError


@dataclass
class FakeClients:
    """Clients with a given number of streams in mid-generation."""

    mid_generation: list[CompletionStream]
    counts: ClientCounts = field(default_factory=ClientCounts)


@dataclass
class FakeDaemon:
    """A daemon that replaces a killed process at once and sends all streams a token.

    also_dies: prefix of the titles of processes that are replaced together with any other.
    """

    clients: FakeClients
    also_dies: str = ""
    pids: dict[str, int] = field(default_factory=lambda: {ENGINE: 10, WORKER: 20})
    sent: list[tuple[int, int]] = field(default_factory=list)

    def kill(self, pid: int, number: int) -> None:
        assert len(self.clients.mid_generation) >= NUM_STREAMS
        self.sent.append((pid, number))
        self.pids = {
            title: each + 1 if each == pid or self._dies_too(title) else each
            for title, each in self.pids.items()
        }
        asyncio.get_running_loop().call_later(0.05, self._answer)

    def _dies_too(self, title: str) -> bool:
        return bool(self.also_dies) and title.startswith(self.also_dies)

    def _answer(self) -> None:
        for stream in self.clients.mid_generation:
            stream.token_times.append(time.monotonic())


def streams(number: int) -> list[CompletionStream]:
    return [CompletionStream({}, choices={0: [1]}, token_times=[0.0]) for _ in range(number)]


def killer_of(daemon: FakeDaemon, *disruptions: Disruption) -> ProcessKiller:
    look = lambda: dict(daemon.pids)  # noqa: E731
    return ProcessKiller(look, daemon.clients, random.Random(0), disruptions, daemon.kill)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killer, "_JITTER_SECONDS", 0.0)
    monkeypatch.setattr(killer, "_TIMEOUT_SECONDS", 0.3)


async def test_a_disruption_ends_when_every_stream_has_continued() -> None:
    daemon = FakeDaemon(FakeClients(streams(NUM_STREAMS)))
    result = await killer_of(daemon, Disruption((WORKER,), signal.SIGKILL)).disrupt()
    assert daemon.sent == [(20, signal.SIGKILL)]
    assert len(result.gaps) == NUM_STREAMS
    assert 0.04 < result.gap == min(result.gaps) < 0.3


async def test_a_disruption_of_two_processes() -> None:
    daemon = FakeDaemon(FakeClients(streams(NUM_STREAMS)))
    await killer_of(daemon, Disruption((ENGINE, WORKER), signal.SIGSEGV)).disrupt()
    assert daemon.sent == [(10, signal.SIGSEGV), (20, signal.SIGSEGV)]


async def test_all_ranks_are_replaced_after_the_death_of_one() -> None:
    pids = {ENGINE: 10, WORKER: 200, "tokend: worker 1": 300}
    daemon = FakeDaemon(FakeClients(streams(NUM_STREAMS)), "tokend: worker", pids)
    chosen = killer_of(daemon, Disruption((WORKER,), signal.SIGKILL))
    for _ in range(8):
        await chosen.disrupt()
    assert {pid // 100 for pid, _ in daemon.sent} == {2, 3}
    assert daemon.pids == {ENGINE: 10, WORKER: 208, "tokend: worker 1": 308}


async def test_replacement_of_another_process_is_a_fault() -> None:
    daemon = FakeDaemon(FakeClients(streams(NUM_STREAMS)), also_dies=ENGINE)
    with pytest.raises(TokendError, match="became"):
        await killer_of(daemon, Disruption((WORKER,), signal.SIGKILL)).disrupt()


async def test_no_process_is_killed_while_too_few_streams_generate() -> None:
    daemon = FakeDaemon(FakeClients(streams(NUM_STREAMS - 1)))
    with pytest.raises(TokendError, match="enough streams"):
        await killer_of(daemon, Disruption((WORKER,), signal.SIGKILL)).disrupt()
    assert daemon.sent == []


async def test_a_failed_request_ends_the_wait() -> None:
    clients = FakeClients([], ClientCounts(failures=["ReadError"]))
    with pytest.raises(TokendError, match="a request failed"):
        await killer_of(FakeDaemon(clients), Disruption((WORKER,), signal.SIGKILL)).disrupt()


async def test_all_kinds_of_disruption_are_equally_frequent() -> None:
    daemon = FakeDaemon(FakeClients(streams(NUM_STREAMS)))
    disruptions = [Disruption((title,), signal.SIGKILL) for title in (WORKER, ENGINE)]
    chosen = killer_of(daemon, *disruptions)
    for _ in range(4):
        await chosen.disrupt()
    assert sorted(each.disruption.name for each in chosen.results) == [
        *["engine SIGKILL"] * 2,
        *["worker SIGKILL"] * 2,
    ]


async def test_time_while_the_benchmark_is_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example the machine sleeps, or the process group is stopped."""
    hits = killer_of(FakeDaemon(FakeClients([])))
    now = iter([0.0, 0.5, 1.0, 9000.0, 9000.5])
    monkeypatch.setattr(killer, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(killer, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(killer, "_TIMEOUT_SECONDS", 3.0)
    looks = iter([False, False, False, False, True])
    await hits._until(lambda: next(looks), "a process")
    now = iter([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    with pytest.raises(TokendError, match="waited 3 s for a process"):
        await hits._until(lambda: False, "a process")
    assert next(now) == 5.0
