"""What a policy for waiting requests must offer.

A queue orders; it decides nothing about blocks, budgets or statuses.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Final, Protocol

from engine_core.request import Request


class RequestQueue(Protocol):
    """Waiting requests in the order in which they are to be admitted.

    A request that is set aside keeps its place: peek and pop pass over it until
    it is brought back, and then it stands where it would have stood anyway.
    """

    def add(self, request: Request) -> None:
        """Put a new request in its place."""
        ...

    def restore(self, request: Request) -> None:
        """Put back a request that was running and lost its blocks."""
        ...

    def peek(self) -> Request:
        """The next request that is not set aside; there must be one."""
        ...

    def pop(self) -> Request:
        """Take the next request out that is not set aside; there must be one."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out from wherever it is; raises KeyError when it is not here."""
        ...

    def park(self, request: Request) -> None:
        """Let those behind it pass; raises KeyError for a request that is not in the line."""
        ...

    def unpark(self, request: Request) -> None:
        """End of park; raises KeyError for a request that is not set aside."""
        ...

    def reorder(self, request: Request) -> None:
        """Move a request, parked or not, to where its key puts it by now; it must be here."""
        ...

    @property
    def num_ready(self) -> int:
        """How many are not parked."""
        ...

    def __len__(self) -> int:
        """All of them."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """All of them, in the order of admission."""
        ...


# A line of requests that is ordered by a key.
#
# Owns the heap and the places of those that are set aside; the policies beside it
# say what the key is.


Entry = tuple[Any, int, Request]
"""Key, number of the entry, request. The number decides among equal keys."""

_SLACK: Final = 64
"""So many left-over entries are never worth a clean-up."""


class OrderedQueue:
    """Requests by ascending key; every operation but iteration is O(log n) or better.

    A request that leaves from the middle stays in the heap as a left-over: an entry
    is in the line only while `_ready` holds the entry of its number for its handle. So
    clients that give up by the thousand cost no search.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._ready: dict[int, Entry] = {}
        self._aside: dict[int, Entry] = {}
        self._num_put = 0

    def put(self, request: Request, key: Any) -> None:
        """Put a request in the place that its key gives it."""
        self._num_put += 1
        entry = (key, self._num_put, request)
        self._ready[request.handle] = entry
        heappush(self._heap, entry)

    def peek(self) -> Request:
        return self._head()[2]

    def pop(self) -> Request:
        request = self._head()[2]
        heappop(self._heap)
        del self._ready[request.handle]
        return request

    def remove(self, request: Request) -> None:
        if self._aside.pop(request.handle, None) is None:
            del self._ready[request.handle]
            self._clean_up()

    def park(self, request: Request) -> None:
        self._aside[request.handle] = self._ready.pop(request.handle)
        self._clean_up()

    def unpark(self, request: Request) -> None:
        key, _, _ = self._aside.pop(request.handle)
        self.put(request, key)

    def reorder(self, request: Request) -> None:
        """Nothing moves: by default a key is fixed at arrival."""

    def replace_key(self, request: Request, key: Any) -> None:
        """Move a request, parked or not, to the place of another key."""
        if request.handle in self._aside:
            _, number, _ = self._aside[request.handle]
            self._aside[request.handle] = (key, number, request)
        else:
            del self._ready[request.handle]
            self.put(request, key)
            self._clean_up()

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def __len__(self) -> int:
        return len(self._ready) + len(self._aside)

    def __iter__(self) -> Iterator[Request]:
        entries = sorted([*self._ready.values(), *self._aside.values()])
        return iter([request for _, _, request in entries])

    def _head(self) -> Entry:
        heap, ready = self._heap, self._ready
        while True:
            _, number, request = head = heap[0]
            entry = ready.get(request.handle)
            if entry is not None and entry[1] == number:
                return head
            heappop(heap)

    def _clean_up(self) -> None:
        if len(self._heap) > 2 * len(self._ready) + _SLACK:
            self._heap = list(self._ready.values())
            heapify(self._heap)
