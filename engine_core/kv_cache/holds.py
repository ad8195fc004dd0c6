"""References on blocks that no table has: those of copies that are under way.

A copy out of a block, or into it, is not to find somebody else's content there. So whoever
copies holds the block meanwhile, whatever becomes of the request it was filled for.

Owns the count of such references by block. Knows nothing of who took them.
"""

from collections.abc import Collection, Sequence

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.pinned import tables_of
from engine_core.kv_cache.pool import BlockPool


class PoolHolds:
    """Holds on the blocks of one pool; null blocks are passed over."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._counts: dict[int, int] = {}

    def hold(self, block_ids: Sequence[int]) -> None:
        """Reference blocks once more each."""
        self._pool.touch(block_ids)
        counts = self._counts
        for block in block_ids:
            if block != NULL_BLOCK:
                counts[block] = counts.get(block, 0) + 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up references taken by `hold`, last block first; free ones stay findable."""
        counts = self._counts
        for block in block_ids:
            if block == NULL_BLOCK:
                continue
            count = counts.get(block, 0)
            assert count > 0, f"block {block} is released but not held"
            if count == 1:
                del counts[block]
            else:
                counts[block] = count - 1
        self._pool.free_blocks(block_ids[::-1])

    def release_all(self) -> None:
        """Nothing is copied any more."""
        for table in self.tables():
            self._pool.free_blocks(table)
        self._counts.clear()

    @property
    def num_blocks(self) -> int:
        """Blocks that are held, whoever else references them."""
        return len(self._counts)

    @property
    def blocks(self) -> Collection[int]:
        """Those blocks, each once."""
        return self._counts.keys()

    @property
    def num_alone(self) -> int:
        """Blocks that would be free, or only pinned, but for holds."""
        ref_counts, pins = self._pool.ref_counts, self._pool.pinned.counts
        return sum(
            1
            for block, count in self._counts.items()
            if ref_counts[block] == count + pins.get(block, 0)
        )

    def tables(self) -> list[list[int]]:
        """All references, each block at most once in a list: as the tables of sequences are."""
        return tables_of(self._counts)
