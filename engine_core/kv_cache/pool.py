"""The block pool: every block of one engine, free, in use or cached.

    BlockPool       gives blocks away, shares them, finds them by content, and takes them back
    RetainedBlocks  references of the prefixes that agent sessions retain between two turns
    TransferRefs    references of the copies that a KV connector has under way

The pool owns the hash of each block and the prefix index; the free queue owns the reference counts
and the order of eviction. Callers name blocks; the pool does not know requests. A block is in one
of three states:

    in use      reference count ≥ 1, not in the free queue, with or without hash
    cached      reference count 0, in the free queue, with hash: can be found or overwritten
    free        reference count 0, in the free queue, no hash

A cached block is evicted when it is taken to be overwritten (`get_new_blocks`). A block is uncached
when it loses its hash otherwise. Retained prefixes keep their blocks in use; `get_new_blocks`
cannot take these before `RetainedPrefixes.reclaim_blocks` has released them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from engine_core.block_hashing import GroupKeys
from engine_core.kv_cache.free_queue import NULL_BLOCK, FreeBlockQueue, make_free_queue
from engine_core.kv_cache.prefix_index import PrefixIndex
from engine_core.request import Request


class RetainedBlocks:
    """References of retained prefixes, and how many blocks would be free without them.

        block 7    a block table, a prefix     in use anyway: releasing it frees nothing
        block 8    two prefixes                reclaimable: free once both are released
        block 9    a prefix                    reclaimable

    counts: prefixes by block; the caller must not change it. num_reclaimable: blocks that only
    prefixes keep out of the free queue. The pool reports every change of a reference while there
    are any.
    """

    __slots__ = ("_ref_counts", "counts", "num_reclaimable")

    def __init__(self, ref_counts: list[int]) -> None:
        """ref_counts: the pool's own list."""
        self._ref_counts = ref_counts
        self.counts: dict[int, int] = {}
        self.num_reclaimable = 0

    def before_retain(self, blocks: Sequence[int]) -> None:
        """Count a prefix of blocks that are in use; the caller references them after this."""
        counts, ref_counts = self.counts, self._ref_counts
        for block in blocks:
            assert ref_counts[block] > 0, f"block {block} is retained and free"
            counts[block] = counts.get(block, 0) + 1

    def before_release(self, blocks: Iterable[int]) -> None:
        """Uncount a prefix; the caller drops the references after this."""
        counts, ref_counts = self.counts, self._ref_counts
        for block in blocks:
            count = counts.get(block, 0)
            assert count > 0, f"block {block} is released but not retained"
            if count > 1:
                counts[block] = count - 1
            else:
                del counts[block]
                self.num_reclaimable -= ref_counts[block] == 1

    def before_touch(self, blocks: Iterable[int]) -> None:
        """Update the count before other references are added to blocks."""
        counts, ref_counts = self.counts, self._ref_counts
        for block in blocks:
            count = counts.get(block, 0)
            if count and ref_counts[block] == count:
                self.num_reclaimable -= 1

    def after_release(self, blocks: Iterable[int]) -> None:
        """Update the count after other references were dropped from blocks."""
        counts, ref_counts = self.counts, self._ref_counts
        for block in blocks:
            count = counts.get(block, 0)
            if count and ref_counts[block] == count:
                self.num_reclaimable += 1

    def is_available(self, block: int) -> bool:
        """Return whether a block is free, or would be without retained prefixes."""
        return self._ref_counts[block] == self.counts.get(block, 0)

    def reference_tables(self) -> list[list[int]]:
        return reference_tables(self.counts)

    def violations(self) -> list[str]:
        """Return where the counts disagree; takes time in proportion to the retained blocks."""
        num_reclaimable = sum(map(self.is_available, self.counts))
        if num_reclaimable == self.num_reclaimable:
            return []
        return [
            f"retained: {num_reclaimable} blocks are only retained, "
            f"{self.num_reclaimable} are recorded"
        ]


def reference_tables(counts: Mapping[int, int]) -> list[list[int]]:
    """Return as many references of each block as counted, each block at most once in a list."""
    tables: list[list[int]] = []
    level = 0
    while blocks := [block for block, count in counts.items() if count > level]:
        tables.append(blocks)
        level += 1
    return tables


class BlockPool:
    """Gives away, shares, caches and takes back blocks 1 … num_blocks - 1.

    num_blocks counts the null block. ref_counts (the free queue's own list) and hashes have one
    entry per block; a block's hash is its key in the index, which includes its group. retained:
    references of retained prefixes. shared: 1 for each block whose content was found by another
    session than the one that computed it.
    """

    def __init__(self, num_blocks: int, enable_caching: bool, eviction_policy: str = "lru") -> None:
        """Raises ValueError for a pool without a usable block."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.free_queue: FreeBlockQueue = make_free_queue(eviction_policy, num_blocks)
        self.index = PrefixIndex()
        self.ref_counts = self.free_queue.ref_counts
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.retained = RetainedBlocks(self.ref_counts)
        self.shared = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return self.free_queue.num_free

    @property
    def num_available(self) -> int:
        """Number of blocks that are free, or would be without retained prefixes."""
        return self.free_queue.num_free + self.retained.num_reclaimable

    @property
    def usage(self) -> float:
        return 1.0 - self.free_queue.num_free / (self.num_blocks - 1)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the free queue and evict their content.

        Raises ValueError, changing nothing, if fewer are free.
        """
        queue, hashes = self.free_queue, self.hashes
        blocks = [queue.popleft()] if count == 1 else queue.popleft_n(count)
        for block in blocks:
            if hashes[block] is not None:
                self._drop_hash(block)
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """Reference blocks once more; free ones leave the free queue."""
        if self.retained.counts:
            self.retained.before_touch(blocks)
        self.free_queue.touch(blocks)

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block; those without any become free in this order."""
        self._release(blocks)
        if self.retained.counts:
            self.retained.after_release(blocks)

    def retain(self, blocks: Sequence[int]) -> None:
        """Reference blocks in use once more, for a retained prefix; null blocks are not allowed."""
        self.retained.before_retain(blocks)
        self.free_queue.touch(blocks)

    def release_retained(self, blocks: Sequence[int]) -> None:
        """Drop references taken by `retain`; blocks without any become free in this order."""
        self.retained.before_release(blocks)
        self._release(blocks)

    def mark_shared(self, blocks: Iterable[int]) -> None:
        """Note that another session than the one that computed these blocks has found them."""
        for block in blocks:
            if self.hashes[block] is not None:
                self.shared[block] = 1

    def evict_first(self, blocks: Sequence[int]) -> None:
        """Move free blocks to the front of the free queue, but not shared ones.

        The last block is then evicted first. They can still be found until they are overwritten.
        Does nothing while blocks without content are at the front of the queue: these are to be
        used before any block that has content.
        """
        queue = self.free_queue
        if self.hashes[queue.peek()] is not None:
            queue.move_to_front([block for block in reversed(blocks) if not self.shared[block]])

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are free, or would be without retained prefixes."""
        ref_counts = self.ref_counts
        if self.retained.counts:
            is_available = self.retained.is_available
            return len([block for block in blocks if block != NULL_BLOCK and is_available(block)])
        return len([block for block in blocks if not ref_counts[block] and block != NULL_BLOCK])

    def cache_full_block(self, block: int, key: bytes) -> None:
        """Make a full block, which has no hash yet, findable under this key."""
        assert block != NULL_BLOCK, "the null block has no content"
        assert self.hashes[block] is None, f"block {block} has a hash already"
        self.hashes[block] = key
        self.index.insert(key, block)

    def cache_full_blocks(
        self, table: list[int], first: int, end: int, keys: GroupKeys, content: Request
    ) -> None:
        """Make the blocks [first, end) of a block table findable."""
        block_hashes = content.block_hashes
        for index in range(first, end):
            self.cache_full_block(table[index], keys.key(block_hashes[index]))

    def uncache(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable; references stay.

        Their content is wrong, will be overwritten, or is a state that no request looks for.
        """
        for block in blocks:
            if self.hashes[block] is not None:
                self._drop_hash(block)

    def uncache_key(self, key: bytes) -> None:
        """Make every block with this content unfindable."""
        while (block := self.index.get(key)) is not None:
            self.uncache([block])

    def reset_prefix_cache(self, num_transferred: int = 0) -> bool:
        """Forget all content; False, changing nothing, while any block is in use.

        num_transferred: blocks that are in use only by a copy, which do not count.
        """
        if self.num_free + num_transferred != self.num_blocks - 1:
            return False
        self.index.clear()
        self.hashes = [None] * self.num_blocks
        self.shared = bytearray(self.num_blocks)
        return True

    def _release(self, blocks: Sequence[int]) -> None:
        self.free_queue.release(blocks)

    def _drop_hash(self, block: int) -> None:
        key = self.hashes[block]
        assert key is not None
        self.index.remove(key, block)
        self.hashes[block] = None
        self.shared[block] = 0


class TransferRefs:
    """References on blocks that a KV connector copies from or into.

    They keep a block out of the free queue until its copy has ended, also if the request that it
    was filled for ends before. Null blocks are ignored.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._counts: dict[int, int] = {}

    def hold(self, block_ids: Sequence[int]) -> None:
        self._pool.touch(block_ids)
        counts = self._counts
        for block in block_ids:
            if block != NULL_BLOCK:
                counts[block] = counts.get(block, 0) + 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop references taken by `hold`, last block first."""
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
        """Drop all references: no copy is under way any more."""
        for table in self.reference_tables():
            self._pool.free_blocks(table)
        self._counts.clear()

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def blocks(self) -> Collection[int]:
        return self._counts.keys()

    @property
    def num_alone(self) -> int:
        """Number of blocks that would be free, or only retained, without these references."""
        ref_counts, retained = self._pool.ref_counts, self._pool.retained.counts
        return sum(
            1
            for block, count in self._counts.items()
            if ref_counts[block] == count + retained.get(block, 0)
        )

    def reference_tables(self) -> list[list[int]]:
        return reference_tables(self._counts)
