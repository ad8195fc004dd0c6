"""What a scheduling policy is made of: a queue of waiting requests and an order of preemption.

A policy orders; it decides nothing about blocks, budgets or statuses. To add one, write a file
beside this one and name its class in `registry.py`.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Final, Protocol

from engine_core.request import Request


class RequestQueue(Protocol):
    """Waiting requests in the order in which they are to be admitted.

    A parked request keeps its place: peek and pop pass over it until it is unparked, and then it
    stands where it would have stood anyway.
    """

    def add(self, request: Request) -> None:
        """Put a new request in its place."""
        ...

    def restore(self, request: Request) -> None:
        """Put back a request that was running and lost its blocks."""
        ...

    def peek(self) -> Request:
        """The next request that is not parked; there must be one."""
        ...

    def pop(self) -> Request:
        """Take the next request out that is not parked; there must be one."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out from wherever it is; raises KeyError when it is not here."""
        ...

    def park(self, request: Request) -> None:
        """Let those behind it pass; raises KeyError for a request that is not ready."""
        ...

    def unpark(self, request: Request) -> None:
        """End of park; raises KeyError for a request that is not parked."""
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
# Owns the heap and the keys of parked requests; the policies beside it
# say what the key is.


Entry = tuple[Any, int, Request]
"""Key, number of the entry, request. The number decides among equal keys."""

_SLACK: Final = 64
"""So many left-over entries are never worth a clean-up."""


class SchedulingPolicy(Protocol):
    """The orders in which requests are admitted and preempted, among those of one tenant."""

    def make_queue(self) -> RequestQueue:
        """An empty queue for waiting requests."""
        ...

    def make_preemption_queue(self) -> "PreemptionQueue":
        """For the running requests of one tenant, the one that is preempted first in front."""
        ...

    def preemption_key(self, request: Request) -> Any:
        """Among tenants that are served equally, the running request of the higher key goes."""
        ...

    def priority_key(self, request: Request) -> int:
        """What counts before fairness among tenants; the lower is admitted first."""
        ...


class OrderedQueue:
    """Requests by ascending key; every operation but iteration is O(log n) or better.

    A request that leaves from the middle stays in the heap as a left-over: an entry
    is in the line only while `_ready` holds the entry of its number for its seq_id. So
    clients that give up by the thousand cost no search.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._ready: dict[int, Entry] = {}
        self._parked: dict[int, Entry] = {}
        self._num_put = 0

    def put(self, request: Request, key: Any) -> None:
        """Put a request in the place that its key gives it."""
        self._num_put += 1
        entry = (key, self._num_put, request)
        self._ready[request.seq_id] = entry
        heappush(self._heap, entry)

    def peek(self) -> Request:
        return self._head()[2]

    def pop(self) -> Request:
        request = self._head()[2]
        heappop(self._heap)
        del self._ready[request.seq_id]
        return request

    def remove(self, request: Request) -> None:
        if self._parked.pop(request.seq_id, None) is None:
            del self._ready[request.seq_id]
            self._clean_up()

    def park(self, request: Request) -> None:
        self._parked[request.seq_id] = self._ready.pop(request.seq_id)
        self._clean_up()

    def unpark(self, request: Request) -> None:
        key, _, _ = self._parked.pop(request.seq_id)
        self.put(request, key)

    def reorder(self, request: Request) -> None:
        """Nothing moves: by default a key is fixed at arrival."""

    def replace_key(self, request: Request, key: Any) -> None:
        """Move a request, parked or not, to the place of another key."""
        if request.seq_id in self._parked:
            _, number, _ = self._parked[request.seq_id]
            self._parked[request.seq_id] = (key, number, request)
        else:
            del self._ready[request.seq_id]
            self.put(request, key)
            self._clean_up()

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def __len__(self) -> int:
        return len(self._ready) + len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        entries = sorted([*self._ready.values(), *self._parked.values()])
        return iter([request for _, _, request in entries])

    def _head(self) -> Entry:
        heap, ready = self._heap, self._ready
        while True:
            _, number, request = head = heap[0]
            entry = ready.get(request.seq_id)
            if entry is not None and entry[1] == number:
                return head
            heappop(heap)

    def _clean_up(self) -> None:
        if len(self._heap) > 2 * len(self._ready) + _SLACK:
            self._heap = list(self._ready.values())
            heapify(self._heap)


class PreemptionQueue(Protocol):
    """The running requests of one tenant."""

    def add(self, request: Request) -> None:
        """Add a request that was admitted after all that are here."""
        ...

    def remove(self, request: Request) -> None:
        """Raises KeyError for one that is not here."""
        ...

    def first(self) -> Request:
        """The request that is preempted first; there must be one."""
        ...

    def __len__(self) -> int: ...


class LastAdmittedFirst:
    """The request that was admitted last is preempted first."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        self._requests[request.seq_id] = request

    def remove(self, request: Request) -> None:
        del self._requests[request.seq_id]

    def first(self) -> Request:
        return next(reversed(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)


class LowestKeyFirst:
    """The request of the lowest key is preempted first, wherever it stands in the running list.

    reversed_order: a key that never changes, the lowest for the request that would be admitted
    last. The entry of a request that leaves stays in the heap until it comes to the top.
    """

    def __init__(self, reversed_order: Callable[[Request], Any]) -> None:
        self._key = reversed_order
        self._heap: list[tuple[Any, Request]] = []
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        self._requests[request.seq_id] = request
        heappush(self._heap, (self._key(request), request))

    def remove(self, request: Request) -> None:
        del self._requests[request.seq_id]
        if len(self._heap) > 2 * len(self._requests) + _SLACK:
            self._heap = [(self._key(each), each) for each in self._requests.values()]
            heapify(self._heap)

    def first(self) -> Request:
        heap = self._heap
        while heap[0][1].seq_id not in self._requests:
            heappop(heap)
        return heap[0][1]

    def __len__(self) -> int:
        return len(self._requests)
