"""A block pool that tells observers what it does.

Wired instead of the plain pool only where somebody watches, so that watching
costs nothing where nobody does.
"""

from collections.abc import Iterable, Sequence

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.group_keys import GroupKeys
from engine_core.kv_cache.observers import PoolObserver
from engine_core.kv_cache.pool import BlockPool, HashedTokens


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
