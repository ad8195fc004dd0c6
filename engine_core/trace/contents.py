"""Numbers for the contents of blocks, so that a trace says what is alike and not what it is.

Owns which contents were seen. A hash covers everything before its block, so what is known of a
sequence is always its beginning, and where that ends is found by halving.
"""

from collections.abc import Sequence
from typing import Final

from proto.sched_trace import Content

MOST: Final = 1 << 19
"""Contents that are remembered, about 100 bytes each; then all are forgotten."""
_KEY_BYTES: Final = 8


class Contents:
    """Numbers from 1 on, in the order in which contents are first seen."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._numbers: dict[bytes, int] = {}
        self._last = 0

    def take(self, block_hashes: Sequence[bytes]) -> Content:
        """The blocks of a sequence, all of which are known after that."""
        keys = [each[:_KEY_BYTES] for each in block_hashes]
        numbers = self._numbers
        num_known = self._num_known(keys)
        parent = numbers[keys[num_known - 1]] if num_known else 0
        new = keys[num_known:]
        if not new:
            return Content(parent, num_known)
        if len(numbers) + len(new) > self._most:
            numbers.clear()
            parent, num_known, new = 0, 0, keys
        first = self._last + 1
        self._last += len(new)
        numbers.update(zip(new, range(first, self._last + 1), strict=True))
        return Content(parent, num_known, first, len(new))

    def _num_known(self, keys: Sequence[bytes]) -> int:
        """
        known known known | new new
        0                 low=high   len(keys)
        """
        numbers = self._numbers
        if not keys or keys[-1] in numbers:
            return len(keys)
        low, high = 0, len(keys) - 1
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in numbers:
                low = middle + 1
            else:
                high = middle
        return low
