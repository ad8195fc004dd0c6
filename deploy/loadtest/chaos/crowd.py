"""Clients that ask one request after the other, whatever happens.

Owns the streams under way and what came of those that are over. A part of the clients
goes away in the middle of a stream, as people do.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx

from deploy.loadtest.chaos.oracle import Verdict, compare
from deploy.loadtest.chaos.stream import BrokenStreamError, Stream

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
