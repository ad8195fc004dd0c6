"""How many blocks hold content that nobody uses now but anybody may find.

Owns two sets of blocks, kept as the pool tells of its blocks; the pool itself counts only those
that it could hand out.

    stored        findable
    freed         findable and nobody's: counted
    touched       in use again
    removed       overwritten, or wrong: not findable
"""

from collections.abc import Sequence
from itertools import islice

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.group_keys import GroupKeys
from engine_core.kv_cache.observers import PoolObserver
from engine_core.kv_cache.pool import HashedTokens


class CachedCensus(PoolObserver):
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
