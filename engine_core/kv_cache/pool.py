"""The block pool: every block of one engine, free, in use or kept for its content.

Owns the hash on each block, the prefix index and the free queue with its reference
counts. Knows nothing of requests: callers name blocks.

A block is in one of three states:

    in use      reference count ≥ 1, not in the free queue, with or without hash
    cached      reference count 0, in the free queue, with hash: may be found or overwritten
    free        reference count 0, in the free queue, no hash
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.free_queue import FreeQueue
from engine_core.kv_cache.group_keys import GroupKeys
from engine_core.kv_cache.pinned import PinnedBlocks
from engine_core.kv_cache.prefix_index import PrefixIndex


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

    def retire(self, blocks: Sequence[int]) -> None:
        """Nobody is expected to ask for these again: those that are free are overwritten first.

        The last one of them first of all; shared ones stay where they are. Until then they can be
        found. Nothing changes while the next block to be given away has no content.
        """
        queue = self.free_queue
        if self.hashes[queue.next_of[NULL_BLOCK]] is not None:
            queue.advance([block for block in reversed(blocks) if not self.shared[block]])

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
        """Nobody finds these blocks any more; for blocks whose content turned out wrong.

        They stay with whoever references them. Blocks without a hash are left alone.
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
