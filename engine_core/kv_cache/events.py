"""Observers of the block pool.

ObservedBlockPool       a pool that notifies observers; the plain pool pays nothing for them
KVEventLog              events for `--kv-events-config`
ResidencyMeter          lifetimes of sampled blocks, for `--kv-cache-metrics-one-in`
ReusableBlockCounter    blocks in the free queue whose content can still be found
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from engine_core.block_hashing import ExtraKeys, GroupKeys, split_key
from engine_core.kv_cache.free_queue import NULL_BLOCK
from engine_core.kv_cache.pool import BlockPool
from engine_core.request import Request
from proto.messages.kv_events import (
    DEVICE_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    event_hash,
)
from proto.messages.lifecycle import RECURRENT_STATE, KVCacheGeometry
from proto.messages.stats import KVEviction


class PoolObserver:
    """Is notified of changes of blocks, after they happened; the base class ignores them.

    The null block is never reported. For a reused block, `removed` comes before `allocated`.
    """

    def allocated(self, blocks: Sequence[int]) -> None:
        """Blocks were taken from the free queue, to be written."""

    def touched(self, blocks: Sequence[int]) -> None:
        """A request has found these blocks and starts from them."""

    def freed(self, blocks: Sequence[int]) -> None:
        """Blocks were added to the free queue; those with a hash can still be found."""

    def stored(
        self, table: Sequence[int], first: int, end: int, keys: GroupKeys, content: Request
    ) -> None:
        """The blocks [first, end) of a block table, first < end, have become findable."""

    def uncached(self, blocks: Sequence[int]) -> None:
        """Blocks are about to lose their hashes: see `BlockPool.uncache`."""

    def removed(self, block: int, key: bytes, is_last: bool) -> None:
        """A block has lost its hash. is_last: no other block has this content."""

    def cleared(self) -> None:
        """All hashes were removed, while no block was in use."""


class ObservedBlockPool(BlockPool):
    """A BlockPool that notifies observers of each change."""

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool,
        eviction_policy: str,
        observers: Sequence[PoolObserver],
    ) -> None:
        super().__init__(num_blocks, enable_caching, eviction_policy)
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
        self, table: list[int], first: int, end: int, keys: GroupKeys, content: Request
    ) -> None:
        super().cache_full_blocks(table, first, end, keys, content)
        if first < end:
            for observer in self._observers:
                observer.stored(table, first, end, keys, content)

    def uncache(self, blocks: Iterable[int]) -> None:
        hashed = [block for block in blocks if self.hashes[block] is not None]
        for observer in self._observers:
            observer.uncached(hashed)
        super().uncache(hashed)

    def reset_prefix_cache(self, num_transferred: int = 0) -> bool:
        done = super().reset_prefix_cache(num_transferred)
        if done:
            for observer in self._observers:
                observer.cleared()
        return done

    def _drop_hash(self, block: int) -> None:
        key = self.hashes[block]
        super()._drop_hash(block)
        assert key is not None
        is_last = self.index.get(key) is None
        for observer in self._observers:
            observer.removed(block, key, is_last)


def make_pool(
    num_blocks: int, enable_caching: bool, eviction_policy: str, observers: Sequence[PoolObserver]
) -> BlockPool:
    """Return a pool that notifies the observers, if there are any."""
    if observers:
        return ObservedBlockPool(num_blocks, enable_caching, eviction_policy, observers)
    return BlockPool(num_blocks, enable_caching, eviction_policy)


class StoredBlocks(NamedTuple):
    """The blocks of one KV cache group on one medium, as events name them.

    size: tokens of a block. factor: device blocks of a block.
    """

    medium: str
    group: int
    size: int
    factor: int = 1

    def event(
        self, geometry: KVCacheGeometry, content: Request, first: int, end: int
    ) -> BlockStored:
        """Return the event of the blocks [first, end) of a sequence.

        device blocks   | h0 | h1 | h2 | h3 | h4 | h5 |      factor 2, first 1, end 3
        event           parent h1    h3        h5
        """
        size, factor = self.size, self.factor
        hashes = content.block_hashes
        spec = geometry.groups[self.group]
        window = spec.sliding_window
        kind = "full_attention" if window is None else "sliding_window"
        if spec.kind == RECURRENT_STATE:
            kind = "mamba"
        elif geometry.num_parts == 1:
            kind = "mla_attention" if window is None else "sliding_window_mla"
        lora = content.extra_keys.lora_request
        return BlockStored(
            block_hashes=[
                event_hash(hashes[index * factor - 1]) for index in range(first + 1, end + 1)
            ],
            parent_block_hash=event_hash(hashes[first * factor - 1]) if first else None,
            token_ids=content.all_token_ids[first * size : end * size],
            block_size=size,
            lora_id=None if lora is None else lora.lora_int_id,
            medium=self.medium,
            lora_name=None if lora is None else lora.lora_name,
            extra_keys=_published_keys(content.extra_keys, first, end, size),
            group_idx=self.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )


class KVEventLog(PoolObserver):
    """Events of the prefix cache, in order, until `pop_events` returns them.

    geometry: of the cache, whose groups the events name.
    """

    def __init__(self, geometry: KVCacheGeometry) -> None:
        self._events: list[KVEvent] = []
        self._geometry = geometry

    def pop_events(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events

    def stored(
        self, table: Sequence[int], first: int, end: int, keys: GroupKeys, content: Request
    ) -> None:
        blocks = StoredBlocks(DEVICE_MEDIUM, keys.number, keys.block_size)
        self._events.append(blocks.event(self._geometry, content, first, end))

    def removed(self, block: int, key: bytes, is_last: bool) -> None:
        if not is_last:
            return
        block_hash, group = split_key(key)
        match self._events[-1:]:
            case [BlockRemoved(block_hashes=hashes, group_idx=last)] if last == group:
                hashes.append(event_hash(block_hash))
            case _:
                removed = BlockRemoved([event_hash(block_hash)], DEVICE_MEDIUM, group)
                self._events.append(removed)

    def cleared(self) -> None:
        """Note it once for the pools of KV and of states, which are cleared together."""
        if not isinstance(self._events[-1] if self._events else None, AllBlocksCleared):
            self._events.append(AllBlocksCleared())


def _published_keys(
    extra_keys: ExtraKeys, first: int, end: int, size: int
) -> list[list[str] | None] | None:
    """Return the values of the extra keys of the blocks [first, end); None if there are none."""
    if first * size >= extra_keys.end:
        return None
    return [
        [value.decode() if kind == "cache_salt" else value.hex() for kind, value in keys] or None
        for keys in (
            extra_keys.of_block(block * size, (block + 1) * size) for block in range(first, end)
        )
    ]


MAX_GAPS: Final = 64
"""Maximum gaps that are recorded of one block: its first ones."""


class _Times:
    """born, used: when the block was allocated and last given to a request, in seconds."""

    __slots__ = ("born", "gaps", "used")

    def __init__(self, now: float) -> None:
        self.born = self.used = now
        self.gaps: list[float] = []


class ResidencyMeter(PoolObserver):
    """Measures how long blocks keep their content; samples one block in `one_in`, 0: none.

        allocated      found      found                    overwritten
            |------------|----------|--------- idle ------------|
            |            |<- gap -->|                           |
            |<- first gap>|                                     |
            |<---------------- lifetime ----------------------->|

    Only content that could be found counts: a block that is overwritten without ever having been
    full is not reported.
    """

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

    def pop_evictions(self) -> list[KVEviction]:
        """Return the measurements of blocks overwritten since the last call."""
        evictions, self._evictions = self._evictions, []
        return evictions

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

    def uncached(self, blocks: Sequence[int]) -> None:
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
"""Measures nothing, and is never used as an observer."""


class ReusableBlockCounter(PoolObserver):
    """Counts cached blocks: in the free queue, and still findable.

    stored        findable
    freed         findable and not referenced: counted
    touched       in use again
    removed       not findable any more
    """

    def __init__(self) -> None:
        self._findable: set[int] = set()
        self._idle: set[int] = set()

    @property
    def num_cached(self) -> int:
        """Number of blocks in the free queue whose content can be found."""
        return len(self._idle)

    def touched(self, blocks: Sequence[int]) -> None:
        self._idle.difference_update(blocks)

    def freed(self, blocks: Sequence[int]) -> None:
        self._idle.update(self._findable.intersection(blocks))

    def stored(
        self, table: Sequence[int], first: int, end: int, keys: GroupKeys, content: Request
    ) -> None:
        self._findable.update(block for block in islice(table, first, end) if block != NULL_BLOCK)

    def removed(self, block: int, key: bytes, is_last: bool) -> None:
        self._findable.discard(block)
        self._idle.discard(block)

    def cleared(self) -> None:
        self._findable.clear()
        self._idle.clear()
