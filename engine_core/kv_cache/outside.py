"""What an eviction policy of the pool from outside extends: an interpreted class."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence


class EvictionOrder(ABC):
    """Free blocks in the order in which they are given away, and so evicted.

    Constructed with the number of blocks, the null block 0 included, and without any free one.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    @abstractmethod
    def add(self, blocks: Sequence[int]) -> None:
        """Add blocks that have become free; of these the first should be evicted first."""

    @abstractmethod
    def remove(self, block: int) -> None:
        """Take out a free block, which a request has found by its content."""

    @abstractmethod
    def pop(self) -> int:
        """Take out and return the block that is evicted next; there is one."""

    @abstractmethod
    def put_first(self, blocks: Sequence[int]) -> None:
        """Evict these free blocks next, in this order; until then their content can be found."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Return the free blocks in the order of eviction."""
