"""Small numbers for those who are shown: a number stays with its request and is then given again.

Owns who has which number. Handles would tell how many requests there ever were, and they grow.
"""

import heapq
from collections.abc import Iterable


class Owners:
    """Numbers from 1 on, by handle."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self._returned: list[int] = []
        self._highest = 0

    def keep(self, handles: Iterable[int]) -> None:
        """Exactly these have a number from now on; who has one already keeps it."""
        before, wanted = self.numbers, dict.fromkeys(handles)
        for handle in before.keys() - wanted.keys():
            heapq.heappush(self._returned, before[handle])
        self.numbers = {handle: before.get(handle) or self._lowest() for handle in wanted}

    def _lowest(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self._highest += 1
        return self._highest
