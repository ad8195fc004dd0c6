"""Sends the sessions of a data set to a server, in a closed loop or at given moments.

closed loop: `concurrency` clients, each asks again when it has its answer
open loop:   a client comes at each arrival, whatever has become of the others
"""

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from deploy.loadtest.datasets.sessions import Session
from deploy.loadtest.openai.client import Ask, Client
from deploy.loadtest.openai.exchange import Exchange

_SHORTEST: Final = 1e-9
"""Seconds of a run without an answer: rates are to be 0, not undefined."""
_MADE_BEFORE: Final = 1_000
"""Sessions whose prompts are made before the clock starts."""


class Watcher(Protocol):
    """Is told how a run comes along."""

    def sent(self) -> None: ...

    def ended(self, exchange: Exchange) -> None: ...


class NobodyWatches:
    """For runs that nobody looks at."""

    def sent(self) -> None:
        pass

    def ended(self, exchange: Exchange) -> None:
        pass


@dataclass(frozen=True)
class Pace:
    """How fast to ask, and how much.

    concurrency: requests under way at once at most; None sets no limit (open loop only).
    arrivals: when sessions begin; None for a closed loop.
    ramp_seconds: in which the clients of a closed loop come, one after the other.
    max_requests, duration: what ends it first; requests under way are waited for.
    """

    concurrency: int | None = None
    arrivals: Iterable[float] | None = None
    ramp_seconds: float = 0.0
    max_requests: float = float("inf")
    duration: float = float("inf")


@dataclass
class Played:
    """What came of a run. seconds: until the last answer was over.

    cpu_seconds: that this process took meanwhile. checked: the requests whose answers are
    compared, with those answers.
    """

    exchanges: list[Exchange] = field(default_factory=list)
    checked: list[tuple[Ask, Exchange]] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


async def play(client: Client, sessions: Iterator[Session], pace: Pace, watcher: Watcher) -> Played:
    """The whole run; failures are part of what came of it."""
    made = list(itertools.islice(sessions, int(min(pace.max_requests, _MADE_BEFORE))))
    player = _Player(client, itertools.chain(made, sessions), pace, watcher)
    with frozen_heap():
        cpu, player.begun = time.process_time(), time.perf_counter()
        if pace.arrivals is None:
            await player.closed_loop()
        else:
            await player.open_loop(pace.arrivals)
        player.played.seconds = max(player.ended - player.begun, _SHORTEST)
        player.played.cpu_seconds = time.process_time() - cpu
    return player.played


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the collector away from what the prompts are made of: it would delay requests."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Player:
    def __init__(
        self, client: Client, sessions: Iterator[Session], pace: Pace, watcher: Watcher
    ) -> None:
        self.played = Played()
        self.begun = 0.0
        self.ended = 0.0
        self._client = client
        self._sessions = sessions
        self._pace = pace
        self._watcher = watcher
        self._num_sent = 0
        limit = pace.concurrency if pace.arrivals is not None else None
        self._places: contextlib.AbstractAsyncContextManager[object] = (
            asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
        )

    async def closed_loop(self) -> None:
        number = self._pace.concurrency or 1
        step = self._pace.ramp_seconds / number
        await asyncio.gather(*(self._one_client(each * step) for each in range(number)))

    async def open_loop(self, arrivals: Iterable[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for due in arrivals:
                if due > self._pace.duration or not self._may_send():
                    break
                delay = self.begun + due - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                session = next(self._sessions, None)
                if session is None:
                    break
                group.create_task(self._session(session))
                await asyncio.sleep(0)  # it counts its first request before the next comes

    async def _one_client(self, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        while self._may_send():
            session = next(self._sessions, None)
            if session is None:
                return
            await self._session(session)

    async def _session(self, session: Session) -> None:
        answer = ""
        while self._may_send() and (ask := session.next_ask(answer)) is not None:
            self._num_sent += 1
            exchange = await self._ask(ask, session.needs_answers)
            if exchange.error:
                return  # what follows would be about an answer that there is not
            answer = exchange.text

    async def _ask(self, ask: Ask, keep_text: bool) -> Exchange:
        came = time.perf_counter()
        async with self._places:
            self._watcher.sent()
            waited = time.perf_counter() - came
            exchange = await self._client.ask(ask, keep_text=keep_text, waited=waited)
        self.ended = time.perf_counter()
        self._watcher.ended(exchange)
        self.played.exchanges.append(exchange)
        if ask.checked and not exchange.error:
            self.played.checked.append((ask, exchange))
        return exchange

    def _may_send(self) -> bool:
        over = time.perf_counter() - self.begun >= self._pace.duration
        return self._num_sent < self._pace.max_requests and not over
