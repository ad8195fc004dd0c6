"""Adaptive replacement: what was wanted once cannot push out what was wanted twice.

After Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003), with the
operations in another order: a block is looked for (`touch`) when a request comes, and comes in
(`insert`) once its tokens are computed.

    once       oldest → … → newest        blocks wanted once: a scan passes through here
    often      oldest → … → newest        blocks wanted again while they were here
    ghosts of each: keys, without blocks, of what was lately evicted from it

A key that is wanted while it is a ghost of `once` says that `once` was too short, and its target
length grows; a ghost of `often` lets it shrink. Evictions take from `once` while it is as
long as its target, otherwise from `often`, and from the other one where that has none to give.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from engine_core.kv_connector.offload.base import OffloadKey
from engine_core.kv_connector.offload.policy import OffloadedBlock, Victim

_Blocks = OrderedDict[OffloadKey, OffloadedBlock]
_Ghosts = OrderedDict[OffloadKey, None]


class ARCPolicy:
    """EvictionPolicy for `capacity` blocks, which remembers at most as many ghosts of each list.

    target: of the length of `once`, 0 to capacity.
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
        """A ghost was wanted before, so it is among what is wanted often."""
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
                self._learn(key)

    def evict(self, count: int, protected: Collection[OffloadKey]) -> list[Victim] | None:
        from_once = _may_go(self.once, protected)
        from_often = _may_go(self.often, protected)
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
                self._remember(self.once_ghosts, key)
            else:
                del self.often[key]
                self._remember(self.often_ghosts, key)
        return victims

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain(self.once, self.often)

    def clear(self) -> None:
        for each in (self.once, self.often, self.once_ghosts, self.often_ghosts):
            each.clear()
        self.target = 0.0

    def __len__(self) -> int:
        return len(self.once) + len(self.often)

    def _learn(self, key: OffloadKey) -> None:
        """A key is wanted that is not here; one of the shorter ghost list moves more."""
        num_once, num_often = len(self.once_ghosts), len(self.often_ghosts)
        if key in self.once_ghosts:
            self.once_ghosts.move_to_end(key)
            step = max(1.0, num_often / num_once)
            self.target = min(float(self._capacity), self.target + step)
        elif key in self.often_ghosts:
            self.often_ghosts.move_to_end(key)
            step = max(1.0, num_once / num_often)
            self.target = max(0.0, self.target - step)

    def _remember(self, ghosts: _Ghosts, key: OffloadKey) -> None:
        ghosts[key] = None
        if len(ghosts) > self._capacity:
            ghosts.popitem(last=False)


def _may_go(blocks: _Blocks, protected: Collection[OffloadKey]) -> Iterator[Victim]:
    """Oldest first; each once, however often the iterator is asked."""
    for key, block in blocks.items():
        if block.is_idle and key not in protected:
            yield Victim(key, block)
