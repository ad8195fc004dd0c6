"""References on blocks that jobs have between two turns, and how many could be taken back.

    block 7    a table, a pin       in use all the same: giving up the pin frees nothing
    block 8    a pin, a pin         alone: free once both are given up
    block 9    a pin                alone

Owns the count of pins by block, and the number of blocks that nothing but pins references, which
is kept up to date whenever a reference comes or goes. Knows neither jobs nor times.
"""

from collections.abc import Iterable, Mapping, Sequence


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
