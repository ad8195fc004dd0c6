"""Pins in an order: those whose time is over first, or those that are worth least.

Owns a heap, in which a pin that left or moved stays as a left-over until it comes to the top.
"""

from heapq import heapify, heappop, heappush
from typing import Final

_SLACK: Final = 64
"""So many left-over entries are never worth a clean-up."""


class Pin:
    """Blocks that a job keeps between two turns.

    request_id, handle: of the turn that is over; number: grows from pin to pin.
    blocks: in the order of their tokens; those at the end are given up first, and none is left
        only in a pin that is over. num_tokens: whose KV is in them, of all groups together.
    ended: seconds, when the turn did. value: what keeping a block is worth, in seconds.
    is_awaited: the next turn is here. by_client: the client has said for how long.
    """

    __slots__ = (
        "blocks",
        "by_client",
        "ended",
        "handle",
        "is_awaited",
        "job",
        "num_tokens",
        "number",
        "request_id",
        "tenant",
        "value",
    )

    def __init__(
        self,
        number: int,
        job: str,
        tenant: int,
        request_id: int,
        handle: int,
        blocks: list[int],
        num_tokens: int,
        ended: float,
    ) -> None:
        self.number = number
        self.job = job
        self.tenant = tenant
        self.request_id = request_id
        self.handle = handle
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.ended = ended
        self.value = 0.0
        self.is_awaited = self.by_client = False


class PinOrder:
    """Pins by ascending key; of two with the same key the older one first."""

    def __init__(self) -> None:
        self._keys: dict[int, float] = {}
        self._heap: list[tuple[float, int, Pin]] = []

    def put(self, pin: Pin, key: float) -> None:
        """Add a pin, or move it."""
        if self._keys.get(pin.number) == key:
            return
        self._keys[pin.number] = key
        heappush(self._heap, (key, pin.number, pin))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [each for each in self._heap if self._is_valid(each)]
            heapify(self._heap)

    def remove(self, pin: Pin) -> None:
        """Nothing if it is not here."""
        self._keys.pop(pin.number, None)
        if not self._keys:
            self._heap.clear()

    def first(self) -> Pin | None:
        """The pin of the lowest key; None where there is none."""
        heap = self._heap
        while heap:
            if self._is_valid(heap[0]):
                return heap[0][2]
            heappop(heap)
        return None

    def lowest_key(self) -> float | None:
        """That of the first pin; None where there is none."""
        pin = self.first()
        return None if pin is None else self._keys[pin.number]

    def first_up_to(self, key: float) -> Pin | None:
        """The first pin, if its key is no higher than this."""
        pin = self.first()
        return pin if pin is not None and self._keys[pin.number] <= key else None

    def _is_valid(self, entry: tuple[float, int, Pin]) -> bool:
        return self._keys.get(entry[1]) == entry[0]
