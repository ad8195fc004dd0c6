"""Least recently used: what nobody has wanted for longest goes first."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from engine_core.kv_connector.offload.base import OffloadKey
from engine_core.kv_connector.offload.policy import OffloadedBlock, Victim


class LRUPolicy:
    """EvictionPolicy in one list.

    oldest → … → newest; evictions begin on the left, and a sequence that is touched ends like
    … key 2 → key 1 → key 0, so that its beginning is the last to go.
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
        may_go = (
            Victim(key, block)
            for key, block in self._blocks.items()
            if block.is_idle and key not in protected
        )
        victims = list(islice(may_go, count))
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
