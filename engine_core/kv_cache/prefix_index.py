"""The prefix index: a map from block hashes to the blocks with that content.

Tokens, requests and reference counts are unknown here.
"""

from collections.abc import Iterable, Iterator
from itertools import chain


class PrefixIndex:
    """A map from block hash to blocks; a lookup returns the block that was inserted first.

    Two requests may compute the same prefix at the same time. Block tables are append-only, so
    both blocks stay. Duplicates have a dictionary of their own, so a lookup is one access.
    """

    __slots__ = ("_duplicates", "_first")

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._duplicates: dict[bytes, dict[int, None]] = {}

    def insert(self, block_hash: bytes, block: int) -> None:
        if block_hash in self._first:
            self._duplicates.setdefault(block_hash, {})[block] = None
        else:
            self._first[block_hash] = block

    def get(self, block_hash: bytes) -> int | None:
        """Return the block with this content that was inserted first; None if there is none."""
        return self._first.get(block_hash)

    def longest_prefix(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the leading hashes up to the first one that is missing.

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
        """Remove a block with this content; raises KeyError if it is not in the index."""
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
        """Return all blocks, in no order."""
        return chain(self._first.values(), *self._duplicates.values())

    def clear(self) -> None:
        self._first.clear()
        self._duplicates.clear()

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Yield every (hash, block), including duplicates."""
        yield from self._first.items()
        for block_hash, others in self._duplicates.items():
            for block in others:
                yield block_hash, block

    def __len__(self) -> int:
        """Return the number of different hashes."""
        return len(self._first)
