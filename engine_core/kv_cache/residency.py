"""How long blocks keep their content, how long it lay unused, and how often it is found.

    allocated      found      found                    overwritten
        |------------|----------|--------- idle ------------|
        |            |<- gap -->|                           |
        |<- first gap>|                                     |
        |<---------------- lifetime ----------------------->|

Owns the times of the blocks that are sampled. Only content that could be found
counts: a block that is written again without ever having been full is forgotten.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from engine_core.kv_cache.observers import PoolObserver
from proto.stats import KVEviction

MAX_GAPS: Final = 64
"""Of one block; a block that is found more often counts with its first ones."""


class _Times:
    """born, used: seconds, when the block was allocated and last given to a request."""

    __slots__ = ("born", "gaps", "used")

    def __init__(self, now: float) -> None:
        self.born = self.used = now
        self.gaps: list[float] = []


class ResidencyMeter(PoolObserver):
    """Measures one allocated block in `one_in`, drawn at random; none if that is 0."""

    def __init__(
        self,
        one_in: int,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.one_in = one_in
        self._clock = clock
        self._draw = draw
        self._times: dict[int, _Times] = {}
        self._evictions: list[KVEviction] = []

    def take(self) -> list[KVEviction]:
        """What was measured since the last call."""
        taken, self._evictions = self._evictions, []
        return taken

    def allocated(self, blocks: Sequence[int]) -> None:
        times, draw, one_in = self._times, self._draw, self.one_in
        now = self._clock()
        for block in blocks:
            if draw() * one_in < 1:
                times[block] = _Times(now)
            else:
                times.pop(block, None)

    def touched(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            times = self._times.get(block)
            if times is not None:
                now = self._clock()
                if len(times.gaps) < MAX_GAPS:
                    times.gaps.append(now - times.used)
                times.used = now

    def withdrawn(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._times.pop(block, None)

    def removed(self, block: int, key: bytes, is_last: bool) -> None:
        times = self._times.pop(block, None)
        if times is not None:
            now = self._clock()
            self._evictions.append(KVEviction(now - times.born, now - times.used, times.gaps))

    def cleared(self) -> None:
        self._times.clear()


NO_RESIDENCY: Final = ResidencyMeter(0)
"""Measures nothing; never an observer, so never changed."""
