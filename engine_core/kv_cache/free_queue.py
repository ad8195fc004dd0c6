"""The free queue: unreferenced blocks in the order in which they are evicted.

Owns the links and the reference counts, which are one fact: a block is in the queue
exactly while its count is 0. Knows nothing of hashes.
"""

from collections.abc import Iterator, Sequence

from engine_core.kv_cache.block import NULL_BLOCK


class FreeQueue:
    """A doubly linked ring through the null block; every operation is O(1) a block.

        null → least recently freed → … → most recently freed → null

    Blocks leave at the front and come back at the end, so the block that nobody
    has used for longest is overwritten first, but for those that nobody will want
    again (`move_to_front`). Of blocks released together the first
    in the given order goes first: callers release a request's last block first, so
    that the start of a prompt outlives its end. A block that a request finds
    through its hash is unlinked from the middle. At the start the order is that
    of the ids.

    `next_of[b]` and `prev_of[b]` are the neighbours of a block b in the ring, and mean
    nothing for one outside it. `ref_counts[b]` says how often it is referenced; the null
    block's is 0 although it is never given away. All three have one entry per block.

    A request that starts from a long prefix has thousands of blocks, so counting and
    linking share one loop over them.
    """

    __slots__ = ("next_of", "num_free", "prev_of", "ref_counts")

    def __init__(self, num_blocks: int) -> None:
        """Link blocks 1 … num_blocks - 1, all of them free."""
        self.next_of: list[int] = [*range(1, num_blocks), NULL_BLOCK]
        self.prev_of: list[int] = [num_blocks - 1, *range(num_blocks - 1)]
        self.ref_counts: list[int] = [0] * num_blocks
        self.num_free = num_blocks - 1

    def popleft(self) -> int:
        """Take the block at the front, referencing it; raises ValueError when there is none."""
        next_of, ref_counts = self.next_of, self.ref_counts
        block = next_of[NULL_BLOCK]
        if block == NULL_BLOCK:
            raise ValueError("No free blocks available")
        assert ref_counts[block] == 0, f"block {block} was free and referenced"
        ref_counts[block] = 1
        following = next_of[block]
        next_of[NULL_BLOCK] = following
        self.prev_of[following] = NULL_BLOCK
        self.num_free -= 1
        return block

    def popleft_n(self, count: int) -> list[int]:
        """Take `count` blocks from the front, in order, referencing them.

        Raises ValueError, taking none, when fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"No free blocks available: {count} wanted, {self.num_free} free")
        next_of, ref_counts = self.next_of, self.ref_counts
        taken = []
        block = next_of[NULL_BLOCK]
        for _ in range(count):
            assert ref_counts[block] == 0, f"block {block} was free and referenced"
            ref_counts[block] = 1
            taken.append(block)
            block = next_of[block]
        next_of[NULL_BLOCK] = block
        self.prev_of[block] = NULL_BLOCK
        self.num_free -= count
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each; those without any go to the end, in this order.

        Null blocks are passed over.
        """
        next_of, prev_of, ref_counts = self.next_of, self.prev_of, self.ref_counts
        last = prev_of[NULL_BLOCK]
        num_staying = 0
        for block in blocks:
            count = ref_counts[block]
            if count == 1:
                ref_counts[block] = 0
                next_of[last] = block
                prev_of[block] = last
                last = block
            else:
                num_staying += 1
                if block != NULL_BLOCK:
                    assert count > 0, f"block {block} is freed but not referenced"
                    ref_counts[block] = count - 1
        next_of[last] = NULL_BLOCK
        prev_of[NULL_BLOCK] = last
        self.num_free += len(blocks) - num_staying

    def touch(self, blocks: Sequence[int]) -> None:
        """Reference each once more, wherever it is; those in the queue are unlinked.

        The blocks of a prefix were released together, last one first, so that from the end
        of `blocks` on they stand in a row. A row is cut out at its two ends:

            before → [last block → … → block → block] → after

        Null blocks are passed over.
        """
        next_of, prev_of, ref_counts = self.next_of, self.prev_of, self.ref_counts
        ref_counts[NULL_BLOCK] = 1  # so that it is not unlinked
        before, after = prev_of[NULL_BLOCK], NULL_BLOCK
        num_staying = 0
        for block in reversed(blocks):
            count = ref_counts[block]
            if count:
                ref_counts[block] = count + 1
                num_staying += 1
                continue
            ref_counts[block] = 1
            if block != after:
                next_of[before], prev_of[after] = after, before
                before = prev_of[block]
            after = next_of[block]
        next_of[before], prev_of[after] = after, before
        ref_counts[NULL_BLOCK] = 0  # never referenced
        self.num_free -= len(blocks) - num_staying

    def move_to_front(self, blocks: Sequence[int]) -> None:
        """Those that are in the queue go next, in this order; others are left where they are."""
        next_of, prev_of, ref_counts = self.next_of, self.prev_of, self.ref_counts
        for block in reversed(blocks):
            if ref_counts[block] or block == NULL_BLOCK:
                continue
            before, after = prev_of[block], next_of[block]
            next_of[before], prev_of[after] = after, before
            first = next_of[NULL_BLOCK]
            next_of[NULL_BLOCK], prev_of[block] = block, NULL_BLOCK
            next_of[block], prev_of[first] = first, block

    def __len__(self) -> int:
        return self.num_free

    def __iter__(self) -> Iterator[int]:
        """The free blocks, the next to be given away first."""
        block = self.next_of[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self.next_of[block]
