"""Eviction policies of offloaded blocks: LRU and ARC.

A policy keeps the blocks of a medium by key and in an order; the manager keeps their states and
allocates slots. Start with `EvictionPolicy`.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, Protocol

from engine_core.kv_connector.offload.base import OffloadKey

BEING_STORED = -1
"""Value of `num_readers` while a block is being stored."""


class OffloadedBlock:
    """A block on a medium, or on its way there.

    slot: index in the medium. num_readers: loads in flight, or BEING_STORED.
    is_bad: unreadable or corrupt; removed as soon as no copy uses its slot.
    """

    __slots__ = ("is_bad", "num_readers", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.num_readers = BEING_STORED
        self.is_bad = False

    @property
    def is_present(self) -> bool:
        """Whether it can be loaded."""
        return self.num_readers >= 0 and not self.is_bad

    @property
    def is_idle(self) -> bool:
        """Whether it can be evicted: no copy uses it."""
        return self.num_readers == 0


class Victim(NamedTuple):
    key: OffloadKey
    block: OffloadedBlock


class EvictionPolicy(Protocol):
    """Order in which the blocks of one medium are evicted."""

    def get(self, key: OffloadKey) -> OffloadedBlock | None:
        """Return the block with this key in any state, or None."""

    def insert(self, key: OffloadKey, block: OffloadedBlock) -> None:
        """Add a block whose key is not present."""

    def remove(self, key: OffloadKey) -> None:
        """Remove a block for other reasons than eviction; the policy does not adapt."""

    def touch(self, keys: Sequence[OffloadKey], is_new_use: bool) -> None:
        """Mark blocks as recently used; the first key becomes the most recent one.

        is_new_use: whether this counts as another use.
        """

    def evict(self, count: int, protected: Collection[OffloadKey]) -> list[Victim] | None:
        """Remove and return `count` idle, unprotected blocks.

        Returns None, with nothing changed, if there are fewer.
        """

    def __iter__(self) -> Iterator[OffloadKey]:
        """Iterate over the keys of all blocks."""

    def clear(self) -> None:
        """Remove all blocks and all adaptive state."""

    def __len__(self) -> int: ...


class LRUPolicy:
    """Least recently used: evicts the block whose last use is the longest ago.

    One list, oldest → … → newest. Touching a sequence appends … key 2 → key 1 → key 0, so that its
    beginning is evicted last.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[OffloadKey, OffloadedBlock] = OrderedDict()

    def get(self, key: OffloadKey) -> OffloadedBlock | None:
        return self._blocks.get(key)

    def insert(self, key: OffloadKey, block: OffloadedBlock) -> None:
        self._blocks[key] = block

    def remove(self, key: OffloadKey) -> None:
        del self._blocks[key]

    def touch(self, keys: Sequence[OffloadKey], is_new_use: bool) -> None:
        blocks = self._blocks
        for key in reversed(keys):
            if key in blocks:
                blocks.move_to_end(key)

    def evict(self, count: int, protected: Collection[OffloadKey]) -> list[Victim] | None:
        evictable = (
            Victim(key, block)
            for key, block in self._blocks.items()
            if block.is_idle and key not in protected
        )
        victims = list(islice(evictable, count))
        if len(victims) < count:
            return None
        for victim in victims:
            del self._blocks[victim.key]
        return victims

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._blocks)

    def clear(self) -> None:
        self._blocks.clear()

    def __len__(self) -> int:
        return len(self._blocks)


_Blocks = OrderedDict[OffloadKey, OffloadedBlock]
_Ghosts = OrderedDict[OffloadKey, None]


class ARCPolicy:
    """Adaptive replacement: blocks used once cannot displace blocks used twice.

    After Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003), but
    with the operations in another order: `touch` looks a block up when a request arrives, `insert`
    adds it once its tokens are computed.

        once       oldest → … → newest        blocks used once: a scan passes through here
        often      oldest → … → newest        blocks used again while they were here
        ghosts     for each list, keys without blocks that were evicted from it

    A lookup of a ghost of `once` shows that `once` was too short: its target length grows. A ghost
    of `often` shrinks it. Evictions take from `once` while it has its target length, otherwise from
    `often`, and from the other list if that one has no idle block.
    capacity: maximum number of blocks, and of ghosts in each list. target: of the length of `once`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.once: _Blocks = OrderedDict()
        self.often: _Blocks = OrderedDict()
        self.once_ghosts: _Ghosts = OrderedDict()
        self.often_ghosts: _Ghosts = OrderedDict()
        self.target = 0.0

    def get(self, key: OffloadKey) -> OffloadedBlock | None:
        block = self.once.get(key)
        return self.often.get(key) if block is None else block

    def insert(self, key: OffloadKey, block: OffloadedBlock) -> None:
        """Add a block, to `often` if it is a ghost and so was used before."""
        was_here = key in self.once_ghosts or key in self.often_ghosts
        self.once_ghosts.pop(key, None)
        self.often_ghosts.pop(key, None)
        (self.often if was_here else self.once)[key] = block

    def remove(self, key: OffloadKey) -> None:
        del (self.once if key in self.once else self.often)[key]

    def touch(self, keys: Sequence[OffloadKey], is_new_use: bool) -> None:
        for key in reversed(keys):
            if key in self.often:
                self.often.move_to_end(key)
            elif key in self.once:
                if is_new_use:
                    self.often[key] = self.once.pop(key)
                else:
                    self.once.move_to_end(key)
            elif is_new_use:
                self._adapt(key)

    def evict(self, count: int, protected: Collection[OffloadKey]) -> list[Victim] | None:
        from_once = _evictable(self.once, protected)
        from_often = _evictable(self.often, protected)
        num_once = len(self.once)
        victims: list[Victim] = []
        for _ in range(count):
            prefers_once = num_once > 0 and num_once >= int(self.target)
            first, second = (from_once, from_often) if prefers_once else (from_often, from_once)
            victim = next(chain(first, second), None)
            if victim is None:
                return None
            victims.append(victim)
            num_once -= victim.key in self.once
        for key, _ in victims:
            if self.once.pop(key, None) is not None:
                self._add_ghost(self.once_ghosts, key)
            else:
                del self.often[key]
                self._add_ghost(self.often_ghosts, key)
        return victims

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain(self.once, self.often)

    def clear(self) -> None:
        for blocks in (self.once, self.often, self.once_ghosts, self.often_ghosts):
            blocks.clear()
        self.target = 0.0

    def __len__(self) -> int:
        return len(self.once) + len(self.often)

    def _adapt(self, key: OffloadKey) -> None:
        """Adapt the target to a lookup of a missing key; the shorter ghost list moves it more."""
        num_once, num_often = len(self.once_ghosts), len(self.often_ghosts)
        if key in self.once_ghosts:
            self.once_ghosts.move_to_end(key)
            step = max(1.0, num_often / num_once)
            self.target = min(float(self._capacity), self.target + step)
        elif key in self.often_ghosts:
            self.often_ghosts.move_to_end(key)
            step = max(1.0, num_once / num_often)
            self.target = max(0.0, self.target - step)

    def _add_ghost(self, ghosts: _Ghosts, key: OffloadKey) -> None:
        ghosts[key] = None
        if len(ghosts) > self._capacity:
            ghosts.popitem(last=False)


def _evictable(blocks: _Blocks, protected: Collection[OffloadKey]) -> Iterator[Victim]:
    """Yield idle, unprotected blocks, the oldest first."""
    for key, block in blocks.items():
        if block.is_idle and key not in protected:
            yield Victim(key, block)
