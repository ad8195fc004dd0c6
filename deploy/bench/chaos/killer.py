"""Ends processes of a daemon, each time while streams are in the middle of something.

    wait until NUM_STREAMS are mid-generation ─▶ signal ─▶ a process of another id has the title
                                                  │          ─▶ the next token of each such stream
                                                  └──────────── the gap ──────────▶

Owns the choice of the victim and the times. Only the victim may be another process afterwards,
and with a worker those that share its model: any of them may be the victim.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx

from deploy.bench.chaos.streams import BrokenStreamError, Stream, Verdict, compare
from proto.errors import TokendError

# Clients that ask one request after the other, whatever happens.
#
# Owns the streams under way and what came of those that are over. A part of the clients
# goes away in the middle of a stream, as people do.


_LEAVING: Final = 0.1
"""Part of the requests whose client goes away."""
_PAUSE_SECONDS: Final = 0.05
"""After a failure, so that a daemon that is gone is not asked a thousand times."""


@dataclass
class Tally:
    """failures: of requests that failed, in words. excused: their front end was killed."""

    num_requests: int = 0
    num_left: int = 0
    num_excused: int = 0
    failures: list[str] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)


class Crowd:
    """expected: the undisturbed answer to each request of the mix."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        expected: Sequence[Stream],
        num_clients: int,
        rng: random.Random,
    ) -> None:
        self.tally = Tally()
        self._client = client
        self._expected = expected
        self._rng = rng
        self._order = list(range(len(expected)))
        self._next = 0
        self._streams: set[Stream] = set()
        self._leaving: set[Stream] = set()
        self._excused: set[Stream] = set()
        self._stopping = False
        self._tasks = [asyncio.create_task(self._play()) for _ in range(num_clients)]

    @property
    def mid_generation(self) -> list[Stream]:
        """Streams that have tokens, are to get more, and will be heard to their end."""
        return [each for each in self._streams - self._leaving if each.mid_generation]

    def excuse(self) -> None:
        """Whatever is under way now may fail: its front end is about to be killed."""
        self._excused |= self._streams

    async def leave(self) -> None:
        """No more requests; wait for those under way."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _play(self) -> None:
        while not self._stopping:
            expected = self._expected[self._draw()]
            self.tally.num_requests += 1
            if self._rng.random() < _LEAVING:
                await self._ask_and_leave(expected)
            else:
                await self._ask(expected, Stream(expected.body))

    def _draw(self) -> int:
        """Each request as often as any other, in an order that changes."""
        place = self._next % len(self._order)
        if place == 0:
            self._rng.shuffle(self._order)
        self._next += 1
        return self._order[place]

    async def _ask(self, expected: Stream, stream: Stream) -> None:
        self._streams.add(stream)
        try:
            await stream.run(self._client)
        except (BrokenStreamError, httpx.HTTPError) as error:
            await self._note_failure(stream, error)
        else:
            self.tally.verdict.add(compare(expected, stream))
        finally:
            self._streams.discard(stream)
            self._leaving.discard(stream)
            self._excused.discard(stream)

    async def _ask_and_leave(self, expected: Stream) -> None:
        """Go away after some tokens, if it does not end before; compare what came."""
        stream = Stream(expected.body)
        self._leaving.add(stream)
        num_tokens = self._rng.randrange(1, max(2, expected.num_tokens))
        asking = asyncio.create_task(self._ask(expected, stream))
        await stream.reach(num_tokens)
        if not stream.over:
            asking.cancel()
            self.tally.num_left += 1
            self.tally.verdict.add(compare(expected, stream, whole=False))
        await asyncio.gather(asking, return_exceptions=True)

    async def _note_failure(self, stream: Stream, error: Exception) -> None:
        if stream in self._excused:
            self.tally.num_excused += 1
        else:
            kind = type(error).__name__
            self.tally.failures.append(
                f"{kind}: {error} (after {stream.num_tokens} tokens, {stream.body})"
            )
        await asyncio.sleep(_PAUSE_SECONDS)


NUM_STREAMS: Final = 8
"""Mid-generation when a process dies."""
ENGINE: Final = "tokend: engine 0"
WORKER: Final = "tokend: worker 0"
FRONT_END: Final = "tokend: api 0"
_WORKERS: Final = "tokend: worker "
_PATIENCE_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.01
_JITTER_SECONDS: Final = 0.3
_STRIDE_SECONDS: Final = 1.0
"""Between two looks; what it takes longer was lost by us."""
"""A process dies at any moment of a step."""


@dataclass(frozen=True)
class Blow:
    """titles: of those that get the signal, one a moment after the other; WORKER: any worker."""

    titles: tuple[str, ...]
    signal: signal.Signals

    @property
    def name(self) -> str:
        roles = " and ".join(each.removeprefix("tokend: ").split()[0] for each in self.titles)
        return f"{roles} {self.signal.name}"


BLOWS: Final = tuple(
    Blow(titles, number)
    for titles, number in (
        ((WORKER,), signal.SIGKILL),
        ((ENGINE,), signal.SIGKILL),
        ((WORKER,), signal.SIGSEGV),
        ((ENGINE,), signal.SIGSEGV),
        ((ENGINE, WORKER), signal.SIGKILL),
        ((WORKER, ENGINE), signal.SIGKILL),
    )
)
STOPS: Final = tuple(Blow((title,), signal.SIGSTOP) for title in (WORKER, ENGINE))
FRONT_END_BLOWS: Final = (Blow((FRONT_END,), signal.SIGKILL),)


@dataclass(frozen=True)
class Strike:
    """What one blow did. gaps: seconds from the signal to the next token, of each stream."""

    blow: Blow
    gaps: tuple[float, ...]

    @property
    def gap(self) -> float:
        """To the next token of anybody."""
        return min(self.gaps)


@dataclass
class Killer:
    """look: at the process ids of the daemon, by title. strikes: so far."""

    look: Callable[[], dict[str, int]]
    crowd: Crowd
    rng: random.Random
    blows: Sequence[Blow] = BLOWS
    send: Callable[[int, int], None] = os.kill
    strikes: list[Strike] = field(default_factory=list)
    _bag: list[Blow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pids = self.look()

    async def strike(self) -> Strike:
        """One blow, and the wait until all streams go on.

        Raises TokendError when they do not, or when another process was started again.
        """
        blow = self._choose()
        await asyncio.sleep(self.rng.uniform(0, _JITTER_SECONDS))
        await self._until(lambda: len(self.crowd.mid_generation) >= NUM_STREAMS, "enough streams")
        self._check_pids(())
        if FRONT_END in blow.titles:
            self.crowd.excuse()
        streams = self.crowd.mid_generation
        struck_at = time.monotonic()
        for number, title in enumerate(blow.titles):
            if number:
                await asyncio.sleep(self.rng.uniform(0, _JITTER_SECONDS))
            self.send(self._pids[self._victim(title)], blow.signal)
        await self._until(lambda: self._replaced(blow), f"a process after {blow.name}")
        reborn_at = time.monotonic()  # what is heard from now on was computed anew
        if FRONT_END in blow.titles:
            await self._until(lambda: bool(self.crowd.mid_generation), "a stream")
            streams = self.crowd.mid_generation
        await self._until(lambda: _all_moved(streams, reborn_at), f"tokens after {blow.name}")
        self._check_pids(blow.titles)
        moments = [moment for each in streams if (moment := each.heard_after(reborn_at))]
        if not moments:
            raise TokendError(f"{blow.name}: all streams were over before it was noticed")
        strike = Strike(blow, tuple(moment - struck_at for moment in moments))
        self.strikes.append(strike)
        return strike

    def _choose(self) -> Blow:
        """Each kind as often as any other, in an order that changes."""
        if not self._bag:
            self._bag = self.rng.sample(list(self.blows), len(self.blows))
        return self._bag.pop()

    def _replaced(self, blow: Blow) -> bool:
        pids = self.look()
        return all(
            pids.get(title, self._pids[title]) != self._pids[title]
            for title in self._replaced_with(blow.titles)
        )

    def _victim(self, title: str) -> str:
        return self.rng.choice(self._workers) if title == WORKER else title

    def _replaced_with(self, titles: Sequence[str]) -> set[str]:
        """Those of whom there are other processes afterwards."""
        return {*titles, *(self._workers if WORKER in titles else ())}

    @property
    def _workers(self) -> list[str]:
        return sorted(title for title in self._pids if title.startswith(_WORKERS))

    def _check_pids(self, titles: Sequence[str]) -> None:
        """Other processes than at the last look have these titles, and no others."""
        before, self._pids = self._pids, self.look()
        changed = {title for title in before if self._pids.get(title) != before[title]}
        if changed != self._replaced_with(titles) or self._pids.keys() != before.keys():
            raise TokendError(f"{before} became {self._pids}, not only {', '.join(titles)}")

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Raises TokendError when the time is over or a request has failed.

        Time in which we were stopped ourselves does not count: so was the daemon, as like as not.
        """
        waited, looked = 0.0, time.monotonic()
        while not condition():
            if self.crowd.tally.failures:
                raise TokendError(f"a request failed while waiting for {what}")
            before, looked = looked, time.monotonic()
            waited += min(looked - before, _STRIDE_SECONDS)
            if waited > _PATIENCE_SECONDS:
                raise TokendError(f"waited {_PATIENCE_SECONDS:g} s for {what}")
            await asyncio.sleep(_POLL_SECONDS)


def _all_moved(streams: Sequence[Stream], since: float) -> bool:
    return all(each.over or each.heard_after(since) for each in streams)
