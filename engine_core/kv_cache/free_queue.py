"""The free list: which blocks nobody references, in the order they are given away.

Owns the links. Knows nothing of reference counts or hashes.
"""

from collections.abc import Iterator, Sequence

from engine_core.kv_cache.block import NULL_BLOCK


class FreeQueue:
    """A doubly linked ring through the null block; every operation is O(1) a block.

        null → least recently freed → … → most recently freed → null

    Blocks leave at the front and come back at the end, so the block that nobody
    has used for longest is overwritten first. Of blocks freed together the first
    in the given order goes first: callers free a request's last block first, so
    that the start of a prompt outlives its end. A block that a request finds
    through its hash is unlinked from the middle. At the start the order is that
    of the ids.

    `next_of[b]` and `prev_of[b]` are the neighbours of block b; a block outside
    the ring is its own neighbour. Both lists have one entry per block.
    """

    __slots__ = ("next_of", "num_free", "prev_of")

    def __init__(self, num_blocks: int) -> None:
        """Link blocks 1 … num_blocks - 1, all of them free."""
        self.next_of: list[int] = [*range(1, num_blocks), NULL_BLOCK]
        self.prev_of: list[int] = [num_blocks - 1, *range(num_blocks - 1)]
        self.num_free = num_blocks - 1

    def popleft(self) -> int:
        """Take the block at the front; raises ValueError when there is none."""
        next_of = self.next_of
        block = next_of[NULL_BLOCK]
        if block == NULL_BLOCK:
            raise ValueError("No free blocks available")
        following = next_of[block]
        next_of[NULL_BLOCK] = following
        self.prev_of[following] = NULL_BLOCK
        next_of[block] = self.prev_of[block] = block
        self.num_free -= 1
        return block

    def popleft_n(self, count: int) -> list[int]:
        """Take `count` blocks from the front, in order.

        Raises ValueError, taking none, when fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"No free blocks available: {count} wanted, {self.num_free} free")
        next_of, prev_of = self.next_of, self.prev_of
        taken = []
        block = next_of[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            following = next_of[block]
            next_of[block] = prev_of[block] = block
            block = following
        next_of[NULL_BLOCK] = block
        prev_of[block] = NULL_BLOCK
        self.num_free -= count
        return taken

    def append(self, block: int) -> None:
        """Put a block at the end."""
        self.append_n((block,))

    def append_n(self, blocks: Sequence[int]) -> None:
        """Put blocks at the end, the first of them nearest to the front."""
        next_of, prev_of = self.next_of, self.prev_of
        last = prev_of[NULL_BLOCK]
        for block in blocks:
            assert next_of[block] == block != NULL_BLOCK, (
                f"block {block} is free already, or the null block"
            )
            next_of[last] = block
            prev_of[block] = last
            # Closed at once, so that a block given twice is caught above.
            next_of[block] = NULL_BLOCK
            last = block
        prev_of[NULL_BLOCK] = last
        self.num_free += len(blocks)

    def remove(self, block: int) -> None:
        """Unlink a block, wherever it stands."""
        self.remove_n((block,))

    def remove_n(self, blocks: Sequence[int]) -> None:
        """Unlink blocks, wherever they stand.

        The blocks of a prefix were freed together, last one first, so that from the end
        of `blocks` on they stand in a row. A row is cut out at its two ends:

            before → [last block → … → block → block] → after
        """
        next_of, prev_of = self.next_of, self.prev_of
        before, after = prev_of[NULL_BLOCK], NULL_BLOCK
        for block in reversed(blocks):
            if block != after:
                next_of[before], prev_of[after] = after, before
                before = prev_of[block]
            after = next_of[block]
            assert after != block != NULL_BLOCK, f"block {block} is not free"
            next_of[block] = prev_of[block] = block
        next_of[before], prev_of[after] = after, before
        self.num_free -= len(blocks)

    def __contains__(self, block: int) -> bool:
        return self.next_of[block] != block and block != NULL_BLOCK

    def __len__(self) -> int:
        return self.num_free

    def __iter__(self) -> Iterator[int]:
        """The free blocks, the next to be given away first."""
        block = self.next_of[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self.next_of[block]
