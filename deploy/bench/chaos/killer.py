"""Kills processes of a daemon while clients receive streams, and measures the interruption.

    wait until NUM_STREAMS generate ─▶ signal ─▶ another process has the title
                                         │        ─▶ the next token of each stream
                                         └──────────── the gap ──────────▶

`ClientPool` sends requests all the time, `ProcessKiller` disrupts them. Only the killed process may
be replaced, and with a worker those that share its model.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import httpx

from deploy.bench.chaos.streams import (
    CompletionStream,
    InvalidStreamError,
    StreamComparison,
    compare_streams,
)
from proto.errors import TokendError

T = TypeVar("T")

# ---- Clients ----


_DISCONNECT_SHARE: Final = 0.1
"""Share of the requests whose client disconnects early."""
_PAUSE_SECONDS: Final = 0.05
"""Pause after a failure, so that clients do not flood a dead daemon with requests."""


@dataclass
class ClientCounts:
    """Counts and comparisons of all requests.

    num_disconnected: by their client. num_excused: failed with the front end that was killed.
    failures: descriptions of other failed requests.
    """

    num_requests: int = 0
    num_disconnected: int = 0
    num_excused: int = 0
    failures: list[str] = field(default_factory=list)
    comparison: StreamComparison = field(default_factory=StreamComparison)


def endless(rng: random.Random, items: Sequence[T]) -> Iterator[T]:
    """Yield the items again and again, all equally often, in changing order."""
    while True:
        yield from rng.sample(items, len(items))


class ClientPool:
    """Clients that send one request after the other. expected: answers without disturbance."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        expected: Sequence[CompletionStream],
        num_clients: int,
        rng: random.Random,
    ) -> None:
        self.counts = ClientCounts()
        self._client = client
        self._next_expected = endless(rng, expected)
        self._rng = rng
        self._streams: set[CompletionStream] = set()
        self._leaving: set[CompletionStream] = set()
        self._excused: set[CompletionStream] = set()
        self._stopping = False
        self._tasks = [asyncio.create_task(self._run_client()) for _ in range(num_clients)]

    @property
    def mid_generation(self) -> list[CompletionStream]:
        """Streams with some but not all tokens, whose clients do not disconnect early."""
        return [stream for stream in self._streams - self._leaving if stream.mid_generation]

    def excuse_open_streams(self) -> None:
        """Excuse failures of all open streams, because their front end is about to be killed."""
        self._excused |= self._streams

    async def stop(self) -> None:
        """Send no more requests, and wait for the open ones."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _run_client(self) -> None:
        while not self._stopping:
            expected = next(self._next_expected)
            self.counts.num_requests += 1
            if self._rng.random() < _DISCONNECT_SHARE:
                await self._send_and_disconnect(expected)
            else:
                await self._send(expected, CompletionStream(expected.body))

    async def _send(self, expected: CompletionStream, stream: CompletionStream) -> None:
        self._streams.add(stream)
        try:
            await stream.receive(self._client)
        except (InvalidStreamError, httpx.HTTPError) as error:
            await self._note_failure(stream, error)
        else:
            self.counts.comparison.merge(compare_streams(expected, stream))
        finally:
            self._streams.discard(stream)
            self._leaving.discard(stream)
            self._excused.discard(stream)

    async def _send_and_disconnect(self, expected: CompletionStream) -> None:
        """Disconnect after some tokens, and compare those that arrived."""
        stream = CompletionStream(expected.body)
        self._leaving.add(stream)
        num_tokens = self._rng.randrange(1, max(2, expected.num_tokens))
        sending = asyncio.create_task(self._send(expected, stream))
        await stream.wait_for_tokens(num_tokens)
        if not stream.ended:
            sending.cancel()
            self.counts.num_disconnected += 1
            self.counts.comparison.merge(compare_streams(expected, stream, whole=False))
        await asyncio.gather(sending, return_exceptions=True)

    async def _note_failure(self, stream: CompletionStream, error: Exception) -> None:
        if stream in self._excused:
            self.counts.num_excused += 1
        else:
            kind = type(error).__name__
            self.counts.failures.append(
                f"{kind}: {error} (after {stream.num_tokens} tokens, {stream.body})"
            )
        await asyncio.sleep(_PAUSE_SECONDS)


NUM_STREAMS: Final = 8
"""Minimum of generating streams when a process is killed."""
ENGINE: Final = "tokend: engine 0"
WORKER: Final = "tokend: worker 0"
FRONT_END: Final = "tokend: api 0"
_WORKERS: Final = "tokend: worker "
_TIMEOUT_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.01
_JITTER_SECONDS: Final = 0.3
"""Random delay of a kill, so that it hits any moment of a step."""
_MAX_COUNTED_SECONDS: Final = 1.0
"""Maximum that a time between two polls counts: in a longer one this process was suspended."""


@dataclass(frozen=True)
class Disruption:
    """A signal to processes, one after the other. titles: of these; WORKER means any worker."""

    titles: tuple[str, ...]
    signal: signal.Signals

    @property
    def name(self) -> str:
        roles = " and ".join(title.removeprefix("tokend: ").split()[0] for title in self.titles)
        return f"{roles} {self.signal.name}"


KILLS: Final = tuple(
    Disruption(titles, number)
    for titles, number in (
        ((WORKER,), signal.SIGKILL),
        ((ENGINE,), signal.SIGKILL),
        ((WORKER,), signal.SIGSEGV),
        ((ENGINE,), signal.SIGSEGV),
        ((ENGINE, WORKER), signal.SIGKILL),
        ((WORKER, ENGINE), signal.SIGKILL),
    )
)
STOPS: Final = tuple(Disruption((title,), signal.SIGSTOP) for title in (WORKER, ENGINE))
FRONT_END_KILLS: Final = (Disruption((FRONT_END,), signal.SIGKILL),)


@dataclass(frozen=True)
class DisruptionResult:
    """Effect of a disruption. gaps: seconds from the signal to the next token of each stream."""

    disruption: Disruption
    gaps: tuple[float, ...]

    @property
    def gap(self) -> float:
        """Seconds to the next token of any stream."""
        return min(self.gaps)


@dataclass
class ProcessKiller:
    """Disrupts a daemon and waits until all streams continue.

    find_pids: returns the process ids of the daemon by title. results: of all disruptions so far.
    """

    find_pids: Callable[[], dict[str, int]]
    clients: ClientPool
    rng: random.Random
    disruptions: Sequence[Disruption] = KILLS
    kill: Callable[[int, int], None] = os.kill
    results: list[DisruptionResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pids = self.find_pids()
        self._next_disruption = endless(self.rng, self.disruptions)

    async def disrupt(self) -> DisruptionResult:
        """Disrupt the daemon once, and wait until all streams continue.

        Raises TokendError when they do not, or when another process was started again.
        """
        disruption = next(self._next_disruption)
        await asyncio.sleep(self.rng.uniform(0, _JITTER_SECONDS))
        await self._until(lambda: len(self.clients.mid_generation) >= NUM_STREAMS, "enough streams")
        self._check_pids(())
        if FRONT_END in disruption.titles:
            self.clients.excuse_open_streams()
        streams = self.clients.mid_generation
        signalled_at = time.monotonic()
        for number, title in enumerate(disruption.titles):
            if number:
                await asyncio.sleep(self.rng.uniform(0, _JITTER_SECONDS))
            self.kill(self._pids[self._target(title)], disruption.signal)
        await self._until(lambda: self._replaced(disruption), f"a process after {disruption.name}")
        replaced_at = time.monotonic()  # tokens from now on were computed by the new process
        if FRONT_END in disruption.titles:
            await self._until(lambda: bool(self.clients.mid_generation), "a stream")
            streams = self.clients.mid_generation
        await self._until(
            lambda: all(each.ended or each.first_token_after(replaced_at) for each in streams),
            f"tokens after {disruption.name}",
        )
        self._check_pids(disruption.titles)
        moments = [
            moment for stream in streams if (moment := stream.first_token_after(replaced_at))
        ]
        if not moments:
            raise TokendError(
                f"{disruption.name}: all streams had ended before the replacement was noticed"
            )
        result = DisruptionResult(disruption, tuple(moment - signalled_at for moment in moments))
        self.results.append(result)
        return result

    def _replaced(self, disruption: Disruption) -> bool:
        pids = self.find_pids()
        return all(
            pids.get(title, self._pids[title]) != self._pids[title]
            for title in self._replaced_with(disruption.titles)
        )

    def _target(self, title: str) -> str:
        return self.rng.choice(self._workers) if title == WORKER else title

    def _replaced_with(self, titles: Sequence[str]) -> set[str]:
        return {*titles, *(self._workers if WORKER in titles else ())}

    @property
    def _workers(self) -> list[str]:
        return sorted(title for title in self._pids if title.startswith(_WORKERS))

    def _check_pids(self, titles: Sequence[str]) -> None:
        """Check that these processes, and no others, were replaced; raises TokendError."""
        before, self._pids = self._pids, self.find_pids()
        changed = {title for title in before if self._pids.get(title) != before[title]}
        if changed != self._replaced_with(titles) or self._pids.keys() != before.keys():
            raise TokendError(f"{before} became {self._pids}, not only {', '.join(titles)}")

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll a condition; raises TokendError after a timeout or if a request has failed.

        Time in which this process was suspended does not count: the daemon was suspended, too.
        """
        waited, looked = 0.0, time.monotonic()
        while not condition():
            if self.clients.counts.failures:
                raise TokendError(f"a request failed while waiting for {what}")
            before, looked = looked, time.monotonic()
            waited += min(looked - before, _MAX_COUNTED_SECONDS)
            if waited > _TIMEOUT_SECONDS:
                raise TokendError(f"waited {_TIMEOUT_SECONDS:g} s for {what}")
            await asyncio.sleep(_POLL_SECONDS)
