"""A heap of items whose keys change: by deadline, by value, by what a tenant was served."""

from heapq import heapify, heappop, heappush
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_SLACK: Final = 64
"""Number of stale entries that are never worth a clean-up."""


class KeyedHeap(Generic[T]):
    """Items by ascending key, and by number where keys are equal.

    The entry of an item that was removed, or got another key, stays in the heap until it comes to
    the top or half of the entries are stale. Entries are compared by value, because compiled tuples
    have no identity.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._keys: dict[int, Any] = {}  # by number
        self._heap: list[tuple[Any, int, T]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def set_key(self, number: int, key: Any, item: T) -> None:
        """Add an item, or change its key. number: names the item, always the same one."""
        if number in self._keys and self._keys[number] == key:
            return
        self._keys[number] = key
        heappush(self._heap, (key, number, item))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapify(self._heap)

    def key_of(self, number: int) -> Any:
        """Return the key of an item; None if it is not in the heap."""
        return self._keys.get(number)

    def remove(self, number: int) -> None:
        """Remove an item; does nothing if it is not in the heap."""
        self._keys.pop(number, None)
        if not self._keys:
            self._heap.clear()

    def first(self) -> tuple[Any, int, T] | None:
        """Return key, number and item of the lowest key; None if the heap is empty."""
        heap = self._heap
        while heap:
            if self._is_valid(heap[0]):
                return heap[0]
            heappop(heap)
        return None

    def _is_valid(self, entry: tuple[Any, int, T]) -> bool:
        return entry[1] in self._keys and bool(self._keys[entry[1]] == entry[0])
