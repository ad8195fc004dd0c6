"""A simple reference for the KV cache: free blocks in a list, content identified by the tokens
instead of hashes, hits found by trying every length.

It shares no code with engine_core. Its allocations, hits and freed blocks must equal those of the
real cache, including the order of the free blocks.
"""

from collections.abc import Sequence

Content = tuple[int, str | None, tuple[int, ...]]
"""Group, salt and every token from the start of the prompt to the end of a block."""

Tables = list[list[int]]
"""Block ids per group."""


def max_blocks(
    windows: Sequence[int | None], block_size: int, num_tokens: int, longest_chunk: int
) -> int:
    """Return the most blocks of a request: a window and a chunk at any offset in a block."""
    whole = -(-num_tokens // block_size)
    chunk = min(longest_chunk, num_tokens)
    passing = [window for window in windows if window is not None]
    seen = [
        max(
            len({token // block_size for token in range(first, first + window - 1 + chunk)})
            for first in range(block_size)
        )
        for window in passing
    ]
    full = whole * (len(windows) - len(passing))
    return full + sum(min(whole, each) for each in seen)


class PoolModel:
    """A reference for the KV cache manager, by lists and searches.

    windows: one per KV group, None for full attention.
    """

    def __init__(
        self, num_blocks: int, block_size: int, caching: bool, windows: Sequence[int | None]
    ) -> None:
        self.size = block_size
        self.caching = caching
        self.windows = windows
        self.free = list(range(1, num_blocks))
        self.tables: dict[int, Tables] = {}
        self.offered: dict[int, list[int]] = {}
        self.found: list[tuple[Content, int]] = []  # cached blocks, first cached first

    def hits(self, salt: str | None, tokens: list[int]) -> Tables:
        """Return block tables of the longest prefix of which all groups hold the needed blocks."""
        first = dict(reversed(self.found))
        for count in range((len(tokens) - 1) // self.size, 0, -1):
            tables = []
            for group, window in enumerate(self.windows):
                seen = count * self.size if window is None else max(1, window - 1)
                passed = [end for end in self._ends(count) if end <= count * self.size - seen]
                needed = self._ends(count)[len(passed) :]
                blocks = [first.get((group, salt, tuple(tokens[:end])), 0) for end in needed]
                tables.append([0] * len(passed) + blocks if all(blocks) else [])
            if all(tables):
                return tables
        return []

    def release_passed(self, seq_id: int, num_computed: int) -> None:
        """Free blocks that no token from this position on attends to."""
        for table, window in zip(self.tables.get(seq_id, []), self.windows, strict=False):
            if window is None:
                continue
            first_seen = num_computed - window + 1
            passed = [
                number
                for number, block in enumerate(table)
                if block and (number + 1) * self.size <= first_seen
            ]
            for number in reversed(passed):
                block, table[number] = table[number], 0
                self._drop(block)

    def fork(self, seq_id: int, num_tokens: int) -> tuple[Tables, list[int]]:
        """Return per group the full blocks to share, and the block in which the tokens end, or 0.

        Return nothing if a group has freed a block that the next token attends to.
        """
        shared, tails = [], []
        for table, window in zip(self.tables[seq_id], self.windows, strict=True):
            first_seen = 0 if window is None else num_tokens - window + 1
            blocks = [
                block if (number + 1) * self.size > first_seen else 0
                for number, block in enumerate(table)
                if number * self.size < num_tokens
            ]
            needed = [
                block
                for block, end in zip(blocks, self._ends(len(blocks)), strict=True)
                if end > first_seen
            ]
            if num_tokens == 0 or not all(needed):
                return [], []
            num_full = num_tokens // self.size
            shared.append(blocks[:num_full])
            tails.append(blocks[num_full] if num_full < len(blocks) else 0)
        return shared, tails

    def allocate(
        self,
        seq_id: int,
        salt: str | None,
        tokens: list[int],
        num_computed: int,
        num_new: int,
        lookahead: int,
        hits: Tables,
    ) -> Tables | None:
        """Allocate the new tokens and the lookahead; return the new ids per group, or None."""
        self.release_passed(seq_id, num_computed)
        tables, wanted = self._wanted(seq_id, num_computed + num_new + lookahead, hits)
        found = {block for table in hits for block in table}
        free = [block for block in self.free if block not in found]
        if sum(wanted) > len(free):
            return None
        new = []
        for count in wanted:
            new.append(free[:count])
            free = free[count:]
        self.free = free
        taken = {block for blocks in new for block in blocks}
        self.found = [entry for entry in self.found if entry[1] not in taken]
        if seq_id not in self.tables:
            self.offered[seq_id] = [len(table) for table in tables]
        self.tables[seq_id] = [table + blocks for table, blocks in zip(tables, new, strict=True)]
        self._remember(seq_id, salt, tokens[: num_computed + num_new])
        return new

    def num_needed(self, seq_id: int, num_slots: int, hits: Tables) -> int:
        """Return how many free blocks an allocation uses, free blocks of hits included."""
        found = {block for table in hits for block in table}
        _, wanted = self._wanted(seq_id, num_slots, hits)
        return sum(wanted) + len([block for block in self.free if block in found])

    def _ends(self, count: int) -> list[int]:
        """Return the ends of the first blocks of a table, in tokens."""
        return [(number + 1) * self.size for number in range(count)]

    def _wanted(self, seq_id: int, num_slots: int, hits: Tables) -> tuple[Tables, list[int]]:
        """Return the current tables, and the number of blocks that each one lacks."""
        tables = self.tables.get(seq_id) or hits or [[] for _ in self.windows]
        num_blocks = -(-num_slots // self.size)
        return tables, [max(0, num_blocks - len(table)) for table in tables]

    def _remember(self, seq_id: int, salt: str | None, verified: list[int]) -> None:
        if not self.caching:
            return
        num_full = len(verified) // self.size
        for group, table in enumerate(self.tables[seq_id]):
            for number in range(self.offered[seq_id][group], num_full):
                if table[number]:
                    content = (group, salt, tuple(verified[: (number + 1) * self.size]))
                    self.found.append((content, table[number]))
            self.offered[seq_id][group] = max(self.offered[seq_id][group], num_full)

    def withdraw(self, seq_id: int, num_valid: int) -> None:
        """Make blocks after this many tokens unfindable."""
        for group, table in enumerate(self.tables[seq_id]):
            kept = num_valid // self.size
            gone = table[kept : self.offered[seq_id][group]]
            self.found = [entry for entry in self.found if entry[1] not in gone]

    def rename(self, seq_id: int, new_seq_id: int) -> None:
        """Move the blocks to another sequence."""
        self.tables[new_seq_id] = self.tables.pop(seq_id)
        self.offered[new_seq_id] = self.offered.pop(seq_id)

    def release(self, seq_id: int, salt: str | None, verified: list[int]) -> None:
        """Make verified blocks findable, then free all blocks."""
        if seq_id in self.tables:
            self._remember(seq_id, salt, verified)
        for table in self.tables.pop(seq_id, []):
            for number in reversed(range(len(table))):
                block, table[number] = table[number], 0
                self._drop(block, table)

    def _drop(self, block: int, *others: list[int]) -> None:
        tables = [table for each in self.tables.values() for table in each]
        if block and not any(block in table for table in [*tables, *others]):
            self.free.append(block)
