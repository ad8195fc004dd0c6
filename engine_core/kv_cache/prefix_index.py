"""The prefix index: which blocks hold the KV of which prefix.

Owns the map from block hash to blocks. Knows nothing of tokens, requests or
reference counts.
"""

from collections.abc import Iterable, Iterator
from itertools import chain


class PrefixIndex:
    """Block hash to the blocks with that content.

    Two requests may compute the same prefix side by side; tables are append-only,
    so both blocks stay, and a lookup gets the one inserted first. The others are
    kept apart, which leaves the common lookup a single dictionary access.
    """

    __slots__ = ("_duplicates", "_first")

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._duplicates: dict[bytes, dict[int, None]] = {}

    def insert(self, block_hash: bytes, block: int) -> None:
        """Record that a block holds this content."""
        if block_hash in self._first:
            self._duplicates.setdefault(block_hash, {})[block] = None
        else:
            self._first[block_hash] = block

    def get(self, block_hash: bytes) -> int | None:
        """The block inserted first of those with this content."""
        return self._first.get(block_hash)

    def longest_prefix(self, block_hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the leading hashes that are all present.

        A hash covers everything before it, so the first miss ends the search.
        """
        blocks: list[int] = []
        find = self._first.get
        for block_hash in block_hashes:
            block = find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def remove(self, block_hash: bytes, block: int) -> None:
        """Forget that a block holds this content; raises KeyError if it was not recorded."""
        others = self._duplicates.get(block_hash)
        if others is None:
            if self._first[block_hash] != block:
                raise KeyError(block)
            del self._first[block_hash]
            return
        if self._first[block_hash] == block:
            block = next(iter(others))
            self._first[block_hash] = block
        del others[block]
        if not others:
            del self._duplicates[block_hash]

    def blocks(self) -> Iterator[int]:
        """Every recorded block, in no order."""
        return chain(self._first.values(), *self._duplicates.values())

    def clear(self) -> None:
        """Forget everything."""
        self._first.clear()
        self._duplicates.clear()

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Every recorded (hash, block), duplicates included."""
        yield from self._first.items()
        for block_hash, others in self._duplicates.items():
            for block in others:
                yield block_hash, block

    def __len__(self) -> int:
        """Number of different hashes."""
        return len(self._first)
