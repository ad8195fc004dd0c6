"""A second KV cache, written for being obvious: free blocks in a plain list, content known by
the tokens themselves instead of hashes, a hit found by trying every length.

It shares no code with engine_core. What it gives, finds and frees must be what the real
one does, down to the order of the free blocks.
"""

from collections.abc import Sequence

Content = tuple[int, str | None, tuple[int, ...]]
"""Group, salt and every token from the start of the prompt to the end of a block."""

Tables = list[list[int]]
"""Block ids per group."""


def max_blocks(
    windows: Sequence[int | None], block_size: int, num_tokens: int, longest_chunk: int
) -> int:
    """The bound on what a request holds: a window and a chunk, wherever in a block they begin."""
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
    """What the KV cache manager should do, by lists and searches.

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
        """The longest prefix of which each group holds what it still needs; in a table each."""
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
        """Give back what no token from this position on sees."""
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
        """Per group the full blocks to share, and the block in which the tokens end, or 0.

        Nothing at all when a group has given back what the next token sees.
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
        """Room for the new tokens and the lookahead; the new ids per group, or None."""
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
        """Free blocks that so much room would use up, those of the hits that are free included."""
        found = {block for table in hits for block in table}
        _, wanted = self._wanted(seq_id, num_slots, hits)
        return sum(wanted) + len([block for block in self.free if block in found])

    def _ends(self, count: int) -> list[int]:
        """Where the first blocks of a table end, in tokens."""
        return [(number + 1) * self.size for number in range(count)]

    def _wanted(self, seq_id: int, num_slots: int, hits: Tables) -> tuple[Tables, list[int]]:
        """The tables to begin with, and how many blocks each lacks."""
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
        """Nobody finds any more what was computed after so many tokens."""
        for group, table in enumerate(self.tables[seq_id]):
            kept = num_valid // self.size
            gone = table[kept : self.offered[seq_id][group]]
            self.found = [entry for entry in self.found if entry[1] not in gone]

    def rename(self, seq_id: int, new_seq_id: int) -> None:
        """The blocks change hands."""
        self.tables[new_seq_id] = self.tables.pop(seq_id)
        self.offered[new_seq_id] = self.offered.pop(seq_id)

    def release(self, seq_id: int, salt: str | None, verified: list[int]) -> None:
        """Give back all blocks, having made findable what is computed and known."""
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
