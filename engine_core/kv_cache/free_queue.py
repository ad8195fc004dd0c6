"""The free queue: unreferenced blocks in the order in which they are evicted.

A block is an int, its index in the worker's KV buffer. What is known about blocks lies in parallel
lists indexed by this int: links and reference counts here, hashes in the pool. So a block table has
the form in which it is sent to workers, and a pool of a million blocks adds no objects for the
garbage collector.

A free queue owns the reference counts and the order of the free blocks, which are one fact: a block
is in the queue exactly while its count is 0. It does not know hashes.

To add an eviction order, extend `FreeBlockQueue` and add a line to `EVICTION_POLICIES`.
`BlockPool` calls nothing else. An order from outside is an `EvictionOrder` of outside.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final

from engine_core.kv_cache.outside import EvictionOrder
from proto.runtime.plugins import load_part

NULL_BLOCK: Final = 0
"""A block that is never given away, counted, cached or freed.

It fills entries of block tables whose KV is not kept, and closes the ring of the free queue.
"""


class FreeBlockQueue(ABC):
    """Free blocks in the order in which they are given away, and the reference counts of all.

    num_free: length of the queue. ref_counts: references of each block, [num_blocks]; that of the
    null block is 0 although it is never given away.
    """

    __slots__ = ("num_free", "ref_counts")

    def __init__(self, num_blocks: int) -> None:
        """Put blocks 1 … num_blocks - 1 into the queue, in this order."""
        self.ref_counts: list[int] = [0] * num_blocks
        self.num_free = num_blocks - 1

    @abstractmethod
    def popleft(self) -> int:
        """Take and reference the next block; raises ValueError if the queue is empty."""

    @abstractmethod
    def popleft_n(self, count: int) -> list[int]:
        """Take and reference the next `count` blocks.

        Raises ValueError, changing nothing, if fewer are free.
        """

    @abstractmethod
    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block; blocks without any become free.

        Null blocks are ignored. A request releases its last block first: of blocks released
        together the first should be evicted first, so that the start of a prompt outlives its end.
        """

    @abstractmethod
    def touch(self, blocks: Sequence[int]) -> None:
        """Reference each block once more; free ones leave the queue. Null blocks are ignored."""

    @abstractmethod
    def move_to_front(self, blocks: Sequence[int]) -> None:
        """Give away these blocks next, in this order; blocks that are not free are ignored."""

    @abstractmethod
    def peek(self) -> int:
        """Return the block that is given away next; the null block if none is free."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Return the free blocks in the order in which they are given away."""

    def check_order(self) -> Iterator[tuple[int, str]]:
        """Yield each free block with what is wrong with its place in the queue, or "".

        What concerns no free block comes with the null block.
        """
        for block in self:
            yield block, ""

    def __len__(self) -> int:
        return self.num_free


class LRUFreeQueue(FreeBlockQueue):
    """The least recently freed block first: a doubly linked ring through the null block.

        null → least recently freed → … → most recently freed → null

    Every operation takes constant time per block. A block that a request finds by its hash is
    unlinked from the middle. A request that starts from a long prefix has thousands of blocks, so
    counting and linking share one loop.

    next_of, prev_of: neighbours of a block in the ring, [num_blocks]; undefined for blocks that are
    not in it.
    """

    __slots__ = ("next_of", "prev_of")

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.next_of: list[int] = [*range(1, num_blocks), NULL_BLOCK]
        self.prev_of: list[int] = [num_blocks - 1, *range(num_blocks - 1)]

    def popleft(self) -> int:
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
        if count > self.num_free:
            raise ValueError(f"No free blocks available: {count} needed, {self.num_free} free")
        next_of, ref_counts = self.next_of, self.ref_counts
        popped = []
        block = next_of[NULL_BLOCK]
        for _ in range(count):
            assert ref_counts[block] == 0, f"block {block} was free and referenced"
            ref_counts[block] = 1
            popped.append(block)
            block = next_of[block]
        next_of[NULL_BLOCK] = block
        self.prev_of[block] = NULL_BLOCK
        self.num_free -= count
        return popped

    def release(self, blocks: Sequence[int]) -> None:
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
        """Reference each block once more; free ones are unlinked, in runs.

        The blocks of a prefix were released together, last one first, so read backwards they
        stand in a row. A row is cut out at its two ends:

            before → [last block → … → block → block] → after
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
        next_of, prev_of, ref_counts = self.next_of, self.prev_of, self.ref_counts
        for block in reversed(blocks):
            if ref_counts[block] or block == NULL_BLOCK:
                continue
            before, after = prev_of[block], next_of[block]
            next_of[before], prev_of[after] = after, before
            first = next_of[NULL_BLOCK]
            next_of[NULL_BLOCK], prev_of[block] = block, NULL_BLOCK
            next_of[block], prev_of[first] = first, block

    def peek(self) -> int:
        return self.next_of[NULL_BLOCK]

    def __iter__(self) -> Iterator[int]:
        block = self.next_of[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self.next_of[block]

    def check_order(self) -> Iterator[tuple[int, str]]:
        """Follow the ring once and compare its links; stop at a link that leads nowhere."""
        next_of, prev_of = self.next_of, self.prev_of
        before, block = NULL_BLOCK, next_of[NULL_BLOCK]
        visited = bytearray(len(next_of))
        while block != NULL_BLOCK:
            if not 0 < block < len(next_of):
                sentence = f"block {before} is followed by {block}, which is no block"
                yield NULL_BLOCK, f"broken link: {sentence}"
                return
            if visited[block]:
                yield NULL_BLOCK, f"cycle: the free queue comes back to block {block}"
                return
            visited[block] = 1
            sentence = ""
            if prev_of[block] != before:
                says = f"says that it follows {prev_of[block]}"
                sentence = f"broken link: block {block} follows {before}, but {says}"
            yield block, sentence
            before, block = block, next_of[block]
        if prev_of[NULL_BLOCK] != before:
            says = f"says that it ends with {prev_of[NULL_BLOCK]}"
            yield (NULL_BLOCK, f"broken link: the free queue ends with block {before}, but {says}")


class OrderedFreeQueue(FreeBlockQueue):
    """Free blocks in an order from outside, which knows no reference counts."""

    __slots__ = ("_order",)

    def __init__(self, num_blocks: int, order: EvictionOrder) -> None:
        super().__init__(num_blocks)
        self._order = order
        order.add(range(1, num_blocks))

    def popleft(self) -> int:
        return self.popleft_n(1)[0]

    def popleft_n(self, count: int) -> list[int]:
        if count > self.num_free:
            raise ValueError("No free blocks available")
        blocks = [self._order.pop() for _ in range(count)]
        for block in blocks:
            assert self.ref_counts[block] == 0, f"block {block} was free and referenced"
            self.ref_counts[block] = 1
        self.num_free -= count
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        free = []
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            assert self.ref_counts[block] > 0, f"block {block} is released and not referenced"
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                free.append(block)
        if free:
            self._order.add(free)
            self.num_free += len(free)

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if not self.ref_counts[block]:
                self._order.remove(block)
                self.num_free -= 1
            self.ref_counts[block] += 1

    def move_to_front(self, blocks: Sequence[int]) -> None:
        free = [block for block in blocks if block != NULL_BLOCK and not self.ref_counts[block]]
        if free:
            self._order.put_first(free)

    def peek(self) -> int:
        return next(iter(self), NULL_BLOCK)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)


EVICTION_POLICIES: Final[dict[str, type[FreeBlockQueue]]] = {"lru": LRUFreeQueue}
"""Free queues by the name of their order."""


def make_free_queue(eviction_policy: str, num_blocks: int) -> FreeBlockQueue:
    """Return a queue of free blocks; raises ConfigError for a policy that cannot be loaded."""
    queue_class = EVICTION_POLICIES.get(eviction_policy)
    if queue_class is not None:
        return queue_class(num_blocks)
    field: Final = "eviction_policy"
    order: EvictionOrder = load_part(field, eviction_policy, field, EvictionOrder)(num_blocks)
    return OrderedFreeQueue(num_blocks, order)
