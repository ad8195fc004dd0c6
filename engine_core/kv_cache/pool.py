"""The block pool: every block of one engine, free, in use or kept for its content.

Owns the hash on each block, the prefix index and the free queue with its reference
counts. Knows nothing of requests: callers name blocks.

A block is in one of three states:

    in use      reference count ≥ 1, not in the free queue, with or without hash
    cached      reference count 0, in the free queue, with hash: may be found or overwritten
    free        reference count 0, in the free queue, no hash
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.free_queue import FreeQueue
from engine_core.kv_cache.hashing import GroupKeys
from engine_core.kv_cache.prefix_index import PrefixIndex

# References on blocks that jobs have between two turns, and how many could be taken back.
#
#     block 7    a table, a pin       in use all the same: giving up the pin frees nothing
#     block 8    a pin, a pin         alone: free once both are given up
#     block 9    a pin                alone
#
# Owns the count of pins by block, and the number of blocks that nothing but pins references, which
# is kept up to date whenever a reference comes or goes. Knows neither jobs nor times.


class PinnedBlocks:
    """Of one pool, which tells of its references while there are pins.

    counts: pins by block; read only. num_alone: blocks that only pins keep out of the free queue.
    """

    __slots__ = ("_ref_counts", "counts", "num_alone")

    def __init__(self, ref_counts: list[int]) -> None:
        """ref_counts: the pool's own list."""
        self._ref_counts = ref_counts
        self.counts: dict[int, int] = {}
        self.num_alone = 0

    def add(self, blocks: Sequence[int]) -> None:
        """Pins of blocks that are referenced already; their references are about to grow."""
        counts, ref_counts = self.counts, self._ref_counts
        for block in blocks:
            assert ref_counts[block] > 0, f"block {block} is pinned and free"
            counts[block] = counts.get(block, 0) + 1

    def remove(self, blocks: Iterable[int]) -> None:
        """Pins are given up; the references of their blocks are about to fall."""
        counts, ref_counts = self.counts, self._ref_counts
        for block in blocks:
            count = counts.get(block, 0)
            assert count > 0, f"block {block} is unpinned but not pinned"
            if count > 1:
                counts[block] = count - 1
            else:
                del counts[block]
                self.num_alone -= ref_counts[block] == 1

    def before_touch(self, blocks: Iterable[int]) -> None:
        """Somebody else is about to reference blocks."""
        counts, ref_counts = self.counts, self._ref_counts
        for block in blocks:
            count = counts.get(block, 0)
            if count and ref_counts[block] == count:
                self.num_alone -= 1

    def after_release(self, blocks: Iterable[int]) -> None:
        """Somebody else has given up a reference on blocks."""
        counts, ref_counts = self.counts, self._ref_counts
        for block in blocks:
            count = counts.get(block, 0)
            if count and ref_counts[block] == count:
                self.num_alone += 1

    def is_available(self, block: int) -> bool:
        """It is free, or would be without pins."""
        return self._ref_counts[block] == self.counts.get(block, 0)

    def tables(self) -> list[list[int]]:
        """All pins, each block at most once in a list: as the tables of sequences are."""
        return tables_of(self.counts)

    def violations(self) -> list[str]:
        """Where the counts disagree; takes time in proportion to the pinned blocks."""
        num_alone = sum(map(self.is_available, self.counts))
        if num_alone == self.num_alone:
            return []
        return [f"pins: {num_alone} blocks are only pinned, {self.num_alone} are recorded"]


def tables_of(counts: Mapping[int, int]) -> list[list[int]]:
    """So many references by block, each block at most once in a list."""
    tables: list[list[int]] = []
    level = 0
    while blocks := [block for block, count in counts.items() if count > level]:
        tables.append(blocks)
        level += 1
    return tables


class HashedTokens(Protocol):
    """What the blocks of a sequence hold.

    all_token_ids: of the whole sequence. block_hashes: of its full blocks.
    """

    all_token_ids: list[int]

    @property
    def block_hashes(self) -> list[bytes]:
        """Brought up to date when read."""


class BlockPool:
    """Hands out, shares, caches and takes back blocks 1 … num_blocks - 1.

    num_blocks counts the null block. `ref_counts` (the free queue's own list) and
    `hashes` have one entry per block; a block's hash is its key in the index, which
    names its group too. `pinned`: the references that jobs have between two turns.
    `shared`: 1 for each block whose content was found by somebody it was not computed for.
    """

    __slots__ = (
        "enable_caching",
        "free_queue",
        "hashes",
        "index",
        "num_blocks",
        "pinned",
        "ref_counts",
        "shared",
    )

    def __init__(self, num_blocks: int, enable_caching: bool) -> None:
        """Raises ValueError for a pool without a usable block."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.free_queue = FreeQueue(num_blocks)
        self.index = PrefixIndex()
        self.ref_counts = self.free_queue.ref_counts
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.pinned = PinnedBlocks(self.ref_counts)
        self.shared = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that get_new_blocks can give."""
        return self.free_queue.num_free

    @property
    def num_available(self) -> int:
        """Those, and the ones that are in use only for pins."""
        return self.free_queue.num_free + self.pinned.num_alone

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that are in use, 0 to 1."""
        return 1.0 - self.free_queue.num_free / (self.num_blocks - 1)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks, overwriting what was retired, then the least recently freed content.

        Raises ValueError, changing nothing, when fewer are free.
        """
        queue, hashes = self.free_queue, self.hashes
        blocks = [queue.popleft()] if count == 1 else queue.popleft_n(count)
        for block in blocks:
            if hashes[block] is not None:
                self._evict(block)
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """Reference blocks once more; those that were free stop being so."""
        if self.pinned.counts:
            self.pinned.before_touch(blocks)
        self.free_queue.touch(blocks)

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each; those without any become free in this order."""
        self._release(blocks)
        if self.pinned.counts:
            self.pinned.after_release(blocks)

    def pin(self, blocks: Sequence[int]) -> None:
        """Reference blocks that are in use once more, for a job; no null blocks."""
        self.pinned.add(blocks)
        self.free_queue.touch(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Drop references taken by `pin`; blocks without any become free in this order."""
        self.pinned.remove(blocks)
        self._release(blocks)

    def mark_shared(self, blocks: Iterable[int]) -> None:
        """Others than those they were computed for have found these; without hash: left alone."""
        for block in blocks:
            if self.hashes[block] is not None:
                self.shared[block] = 1

    def evict_first(self, blocks: Sequence[int]) -> None:
        """Evict these first: those that are free move to the front of the queue.

        The last one of them first of all; shared ones stay where they are. Until then they can be
        found. Nothing changes while the next block to be given away has no content.
        """
        queue = self.free_queue
        if self.hashes[queue.next_of[NULL_BLOCK]] is not None:
            queue.move_to_front([block for block in reversed(blocks) if not self.shared[block]])

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free now, or would be without pins."""
        ref_counts = self.ref_counts
        if self.pinned.counts:
            is_available = self.pinned.is_available
            return len([block for block in blocks if block != NULL_BLOCK and is_available(block)])
        return len([block for block in blocks if not ref_counts[block] and block != NULL_BLOCK])

    def cache_full_block(self, block: int, block_hash: bytes) -> None:
        """Make a full block, which has no hash yet, findable under this one."""
        assert block != NULL_BLOCK, "the null block has no content"
        assert self.hashes[block] is None, f"block {block} has a hash already"
        self.hashes[block] = block_hash
        self.index.insert(block_hash, block)

    def cache_full_blocks(
        self, table: list[int], first: int, end: int, keys: GroupKeys, content: HashedTokens
    ) -> None:
        """Make the blocks [first, end) of a sequence's table findable."""
        block_hashes = content.block_hashes
        for index in range(first, end):
            self.cache_full_block(table[index], keys.key(block_hashes, index))

    def uncache(self, blocks: Iterable[int]) -> None:
        """Make these blocks unfindable, because their content is wrong.

        References stay. Blocks without a hash are left alone.
        """
        for block in blocks:
            if self.hashes[block] is not None:
                self._evict(block)

    def forget(self, block_hash: bytes) -> None:
        """Uncache every block with this content."""
        while (block := self.index.get(block_hash)) is not None:
            self.uncache([block])

    def reset_prefix_cache(self, num_held: int = 0) -> bool:
        """Forget all content; False, changing nothing, while any block is in use.

        num_held: blocks in use only for being copied, which does not ask what they are found by.
        """
        if self.num_free + num_held != self.num_blocks - 1:
            return False
        self.index.clear()
        self.hashes = [None] * self.num_blocks
        self.shared = bytearray(self.num_blocks)
        return True

    def _release(self, blocks: Sequence[int]) -> None:
        self.free_queue.release(blocks)

    def _evict(self, block: int) -> None:
        block_hash = self.hashes[block]
        assert block_hash is not None
        self.index.remove(block_hash, block)
        self.hashes[block] = None
        self.shared[block] = 0


# References on blocks that no table has: those of copies that are under way.
#
# A copy out of a block, or into it, is not to find somebody else's content there. So whoever
# copies holds the block meanwhile, whatever becomes of the request it was filled for.
#
# Owns the count of such references by block. Knows nothing of who took them.


class TransferRefs:
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
