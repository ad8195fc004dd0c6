"""From the numbers of a trace back to token ids: other tokens, that are alike where theirs were.

Every token of a block has the number of its content as its id, so two sequences hash alike up to
where they did. What no number covers (the end of a sequence) is like nothing else.
"""

from bisect import bisect_right
from typing import Final

from proto.sched_trace import Content

STOP: Final = (1 << 31) - 1
"""Ends a sequence that ended before its length did."""
VOCAB_SIZE: Final = 1 << 31
_OWN: Final = 1 << 30
"""From here on: what is like nothing else, by handle."""


class Chains:
    """Which content comes before which.

    runs       first 12, parent 7          contents   … 6 7 12 13 14
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._parents: list[int] = []

    def learn(self, content: Content) -> None:
        """What a line says; in the order of the lines."""
        if content.num_new:
            self._firsts.append(content.first)
            self._parents.append(content.parent)

    def blocks(self, content: Content) -> list[int]:
        """The numbers of a sequence's full blocks, from the first on.

        Raises ValueError for a content whose beginning nobody has told.
        """
        pieces: list[range] = []
        last, missing = content.parent, content.num_known
        if content.num_new:
            pieces.append(range(content.first, content.first + content.num_new))
        while missing:
            index = bisect_right(self._firsts, last) - 1
            if index < 0:
                raise ValueError(f"the trace does not say what comes before content {last}")
            first = max(self._firsts[index], last - missing + 1)
            pieces.append(range(first, last + 1))
            missing -= last + 1 - first
            last = self._parents[index]
        return [number for piece in reversed(pieces) for number in piece]


class Tokens:
    """The token ids of one sequence, outputs to come included.

    blocks: numbers of the full blocks that are known.
    """

    __slots__ = ("_blocks", "_own", "_size")

    def __init__(self, blocks: list[int], block_size: int, handle: int) -> None:
        self._blocks = blocks
        self._size = block_size
        self._own = _OWN + handle

    def first(self, number: int) -> list[int]:
        """So many."""
        size, blocks = self._size, self._blocks
        whole = blocks[: -(-number // size)]
        tokens = [token for block in whole for token in [block] * size][:number]
        return tokens + [self._own] * (number - len(tokens))

    def at(self, position: int) -> int:
        """One."""
        block = position // self._size
        return self._blocks[block] if block < len(self._blocks) else self._own
