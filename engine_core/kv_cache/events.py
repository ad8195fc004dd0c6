"""Observers of the block pool: KV events, residency statistics, and the count of reusable blocks.

Observers own nothing of the pool, and a pool without any does not know that they exist.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.hashing import GroupKeys, parts
from engine_core.kv_cache.pool import BlockPool, HashedTokens
from proto.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from proto.stats import KVEviction


class PoolObserver:
    """Told what happens to blocks, after it happened; ignores what it does not override.

    The null block is never reported. For a reused block `removed` comes before
    `allocated`.
    """

    def allocated(self, blocks: Sequence[int]) -> None:
        """Blocks were taken from the free queue to be written."""

    def touched(self, blocks: Sequence[int]) -> None:
        """A request found blocks and starts from them."""

    def freed(self, blocks: Sequence[int]) -> None:
        """Note that these blocks are free; those with a hash can still be found."""

    def stored(
        self, table: Sequence[int], first: int, end: int, keys: GroupKeys, content: HashedTokens
    ) -> None:
        """The blocks [first, end) of a sequence, first < end, can be found from now on."""

    def withdrawn(self, blocks: Sequence[int]) -> None:
        """Blocks are about to lose their hashes because their content is wrong."""

    def removed(self, block: int, key: bytes, is_last: bool) -> None:
        """A block lost its hash; with the last one of a key the content is gone."""

    def cleared(self) -> None:
        """All hashes were forgotten; no block was in use."""


# A block pool that notifies observers. It replaces the plain pool only where there are observers,
# so that the plain pool pays nothing for them.


class ObservedBlockPool(BlockPool):
    """Does what BlockPool does and then says so."""

    __slots__ = ("_observers",)

    def __init__(
        self, num_blocks: int, enable_caching: bool, observers: Sequence[PoolObserver]
    ) -> None:
        super().__init__(num_blocks, enable_caching)
        self._observers = tuple(observers)

    def get_new_blocks(self, count: int) -> list[int]:
        blocks = super().get_new_blocks(count)
        for observer in self._observers:
            observer.allocated(blocks)
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        real = [block for block in blocks if block != NULL_BLOCK]
        super().touch(real)
        for observer in self._observers:
            observer.touched(real)

    def _release(self, blocks: Sequence[int]) -> None:
        super()._release(blocks)
        ref_counts = self.ref_counts
        free = [block for block in blocks if block != NULL_BLOCK and not ref_counts[block]]
        for observer in self._observers:
            observer.freed(free)

    def cache_full_blocks(
        self, table: list[int], first: int, end: int, keys: GroupKeys, content: HashedTokens
    ) -> None:
        super().cache_full_blocks(table, first, end, keys, content)
        if first < end:
            for observer in self._observers:
                observer.stored(table, first, end, keys, content)

    def uncache(self, blocks: Iterable[int]) -> None:
        hashed = [block for block in blocks if self.hashes[block] is not None]
        for observer in self._observers:
            observer.withdrawn(hashed)
        super().uncache(hashed)

    def reset_prefix_cache(self, num_held: int = 0) -> bool:
        done = super().reset_prefix_cache(num_held)
        if done:
            for observer in self._observers:
                observer.cleared()
        return done

    def _evict(self, block: int) -> None:
        key = self.hashes[block]
        super()._evict(block)
        assert key is not None
        is_last = self.index.get(key) is None
        for observer in self._observers:
            observer.removed(block, key, is_last)


# The events of the prefix cache since they were last asked for.


class KVEventLog(PoolObserver):
    """Collects events in order; owns them until they are taken."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def take(self) -> list[KVEvent]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken

    def stored(
        self, table: Sequence[int], first: int, end: int, keys: GroupKeys, content: HashedTokens
    ) -> None:
        hashes = keys.hashes(content.block_hashes, first, end)
        parent = keys.hashes(content.block_hashes, first - 1, first)[0] if first else None
        tokens = content.all_token_ids[first * keys.block_size : end * keys.block_size]
        self._events.append(BlockStored(hashes, parent, tokens, keys.block_size, keys.number))

    def removed(self, block: int, key: bytes, is_last: bool) -> None:
        if is_last:
            block_hash, group = parts(key)
            self._events.append(BlockRemoved(block_hash, group))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())


# How long blocks keep their content, how long it lay unused, and how often it is found.
#
#     allocated      found      found                    overwritten
#         |------------|----------|--------- idle ------------|
#         |            |<- gap -->|                           |
#         |<- first gap>|                                     |
#         |<---------------- lifetime ----------------------->|
#
# Owns the times of the blocks that are sampled. Only content that could be found
# counts: a block that is written again without ever having been full is forgotten.


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


# Blocks that no request uses now and whose content can still be found: free space that may save
# computation. The pool itself counts only the blocks that it could hand out.
#
#     stored        findable
#     freed         findable and nobody's: counted
#     touched       in use again
#     removed       overwritten, or wrong: not findable


class ReusableBlockCounter(PoolObserver):
    """Watches one pool from its beginning."""

    def __init__(self) -> None:
        self._findable: set[int] = set()
        self._idle: set[int] = set()

    @property
    def num_cached(self) -> int:
        """Blocks in the free queue whose content can be found."""
        return len(self._idle)

    def touched(self, blocks: Sequence[int]) -> None:
        self._idle.difference_update(blocks)

    def freed(self, blocks: Sequence[int]) -> None:
        self._idle.update(self._findable.intersection(blocks))

    def stored(
        self, table: Sequence[int], first: int, end: int, keys: GroupKeys, content: HashedTokens
    ) -> None:
        self._findable.update(block for block in islice(table, first, end) if block != NULL_BLOCK)

    def removed(self, block: int, key: bytes, is_last: bool) -> None:
        self._findable.discard(block)
        self._idle.discard(block)

    def cleared(self) -> None:
        self._findable.clear()
        self._idle.clear()
