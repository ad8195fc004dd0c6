"""Sends the sessions of a data set to a server, in a closed loop or at given moments.

closed loop: `concurrency` clients, each asks again when it has its answer
open loop:   a client comes at each arrival, whatever has become of the others
"""

import asyncio
import contextlib
import gc
import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from deploy.bench.client import Ask, Client, Target
from deploy.bench.datasets import Dataset, Draws, Material, RandomPrompts, Session, Sizes
from deploy.bench.stream import Exchange
from proto.errors import TokendError

if TYPE_CHECKING:
    from rich.progress import Progress


# When the sessions of an open loop begin: seconds from the start, the same for the same seed.


def gamma_arrivals(
    rate: float, burstiness: float, seed: int, number: int | None
) -> Iterable[float]:
    """`rate` a second in the mean; the gaps are gamma distributed with shape `burstiness`.

    1 is a Poisson process, less comes in bursts, more is more even, infinity is a fixed beat.
    A known number of arrivals is stretched so that the last comes at number / rate, as
    `vllm bench serve` does it: else the rate of a short run would be a matter of luck.
    """
    gaps = _gaps(rate, burstiness, random.Random(f"arrivals {seed}"))
    if number is None:
        return itertools.accumulate(gaps)
    arrivals = list(itertools.accumulate(itertools.islice(gaps, number)))
    stretch = number / rate / arrivals[-1]
    return [each * stretch for each in arrivals]


def ramped(arrivals: Iterable[float], seconds: float) -> Iterator[float]:
    """The same arrivals, as if their rate had grown evenly from 0 within so many seconds.

    The arrival at s of an even rate comes when the integral of the growing rate is as large:
    t² / (2 seconds) = s while the rate grows, t - seconds / 2 = s after it.
    """
    for each in arrivals:
        growing = each < seconds / 2
        yield math.sqrt(2 * seconds * each) if growing else each + seconds / 2


def _gaps(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    while True:
        if math.isinf(burstiness):
            yield 1 / rate
        else:
            yield rng.gammavariate(burstiness, 1 / (rate * burstiness))


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


# Shows how a run comes along: a bar on a terminal, nothing elsewhere.


_EVERY_SECONDS: Final = 0.25


class Screen(Protocol):
    """Where runs are shown, one after the other."""

    def watching(self, name: str, pace: Pace) -> contextlib.AbstractAsyncContextManager[Watcher]:
        """Somebody to tell of one run."""
        ...


def screen_for(stream: TextIO) -> Screen:
    return Bars(stream) if stream.isatty() else NoScreen()


class NoScreen:
    """Where nobody looks."""

    @contextlib.asynccontextmanager
    async def watching(self, name: str, pace: Pace) -> AsyncIterator[Watcher]:
        yield NobodyWatches()


class Bars:
    """Drawn a few times a second, whatever happens meanwhile: drawing takes the client's time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextlib.asynccontextmanager
    async def watching(self, name: str, pace: Pace) -> AsyncIterator[Watcher]:
        counts = _Counts()
        drawing = asyncio.create_task(self._draw(name, pace, counts))
        try:
            yield counts
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)

    async def _draw(self, name: str, pace: Pace, counts: "_Counts") -> None:
        begun = time.monotonic()
        with self._bars() as bars:
            task = bars.add_task(name, total=1.0, note="")
            while True:
                seconds = time.monotonic() - begun
                part = max(counts.num_ended / pace.max_requests, seconds / pace.duration)
                bars.update(task, completed=min(part, 1.0), note=counts.describe(seconds))
                bars.refresh()
                await asyncio.sleep(_EVERY_SECONDS)

    def _bars(self) -> "Progress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        return Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(file=self._stream, highlight=False),
            auto_refresh=False,
            transient=True,
        )


class _Counts:
    def __init__(self) -> None:
        self.num_ended = 0
        self._num_sent = 0
        self._num_failed = 0
        self._num_tokens = 0

    def sent(self) -> None:
        self._num_sent += 1

    def ended(self, exchange: Exchange) -> None:
        self.num_ended += 1
        self._num_failed += bool(exchange.error)
        self._num_tokens += exchange.output_tokens

    def describe(self, seconds: float) -> str:
        """In words, without what is still under way in the tokens."""
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        rate = self._num_tokens / seconds if seconds else 0.0
        under_way = self._num_sent - self.num_ended
        return f"{self.num_ended} done, {under_way} under way{failed}, {rate:.0f} tokens/s"


# One run against one server, from nothing: its connections begin and end with it.


_WARM_UP: int = 64
_WARM_UP_OUTPUT: int = 16


@dataclass(frozen=True)
class Run:
    """What to do: these sessions at this pace. name: for people."""

    name: str
    dataset: Dataset
    draws: Draws
    pace: Pace


def measure(target: Target, run: Run, screen: Screen | None = None) -> Played:
    """Do it. Requests that fail are part of what came of it."""
    return asyncio.run(_measure(target, run, screen or NoScreen()))


async def _measure(target: Target, run: Run, screen: Screen) -> Played:
    client = Client(target)
    try:
        async with screen.watching(run.name, run.pace) as watcher:
            return await play(client, run.dataset.sessions(run.draws), run.pace, watcher)
    finally:
        client.close()


def warm_up(target: Target, material: Material, number: int, *, chat: bool = False) -> None:
    """So many short requests at once; raises TokendError when one of them fails."""
    if not number:
        return
    dataset = RandomPrompts(Sizes(_WARM_UP, _WARM_UP_OUTPUT), material, chat)
    pace = Pace(concurrency=number, max_requests=number)
    played = measure(target, Run("warm-up", dataset, Draws(seed=-1), pace))
    for exchange in played.exchanges:
        if exchange.error:
            raise TokendError(f"{target.url} does not answer as it should: {exchange.error}")


def first_token(target: Target, material: Material, seed: int) -> float:
    """Monotonic seconds at which the first token of a short request came; raises TokendError."""
    return asyncio.run(_first_token(target, material, seed))


async def _first_token(target: Target, material: Material, seed: int) -> float:
    client = Client(target)
    try:
        dataset = RandomPrompts(Sizes(_WARM_UP, 1), material)
        sessions = itertools.islice(dataset.sessions(Draws(seed)), 1)
        played = await play(client, sessions, Pace(concurrency=1), NobodyWatches())
    finally:
        client.close()
    (exchange,) = played.exchanges
    if exchange.error:
        raise TokendError(f"{target.url}: {exchange.error}")
    return exchange.first
