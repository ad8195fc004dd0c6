"""Small numbers for those who are shown: a number stays with its request and is then given again.

Owns who has which number. Handles would tell how many requests there ever were, and they grow.
"""

import heapq
from collections.abc import Iterable


class Owners:
    """Numbers from 1 on, by seq_id."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self._returned: list[int] = []
        self._highest = 0

    def keep(self, seq_ids: Iterable[int]) -> None:
        """Exactly these have a number from now on; who has one already keeps it."""
        before, wanted = self.numbers, dict.fromkeys(seq_ids)
        for seq_id in before.keys() - wanted.keys():
            heapq.heappush(self._returned, before[seq_id])
        self.numbers = {seq_id: before.get(seq_id) or self._lowest() for seq_id in wanted}

    def _lowest(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self._highest += 1
        return self._highest
