"""Queues of waiting requests. The queue of a scheduling policy also has its order of preemption.

A policy orders requests; it decides nothing about blocks, budgets or statuses. The
policies are in policies.py.

    RequestQueue     waiting requests, of one tenant or of all (`fair.py`)
    OrderedQueue     requests of one tenant, ordered by a key
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Final, Protocol

from engine_core.request import Request

Entry = tuple[Any, int, Request]
"""Key, number of the entry, request. The number decides among equal keys."""

_SLACK: Final = 64
"""Number of stale entries of a heap that are never worth a clean-up."""


class RequestQueue(Protocol):
    """Waiting requests in the order in which they are to be admitted.

    A parked request keeps its place: peek and pop pass over it until it is unparked.
    """

    def add_request(self, request: Request) -> None:
        """Add a new request."""

    def requeue_preempted(self, request: Request) -> None:
        """Put back a request that was running and lost its blocks."""

    def peek_request(self) -> Request:
        """Return the next request that is not parked; there must be one."""

    def pop_request(self) -> Request:
        """Remove and return the next request that is not parked; there must be one."""

    def remove_request(self, request: Request) -> None:
        """Remove a request, parked or not; raises KeyError if it is not in the queue."""

    def park_request(self, request: Request) -> None:
        """Let requests after this one pass; raises KeyError if it is not ready."""

    def unpark_request(self, request: Request) -> None:
        """Make a parked request ready again; raises KeyError if it is not parked."""

    def reorder_request(self, request: Request) -> None:
        """Move a request, parked or not, to the place that its key gives it now."""

    @property
    def num_ready(self) -> int:
        """Number of requests that are not parked."""

    def __len__(self) -> int:
        """Number of requests, parked or not."""

    def __iter__(self) -> Iterator[Request]:
        """Return all requests in the order of admission."""


class OrderedQueue(ABC):
    """Requests by ascending key; every operation except iteration is O(log n) or better.

    A policy for requests of one tenant is a subclass, with the keys of new and of preempted
    requests. A request that leaves from the middle stays in the heap as a stale entry: an entry is
    valid only while `_ready` has the entry of its number for its seq_id.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._ready: dict[int, Entry] = {}
        self._parked: dict[int, Entry] = {}
        self._num_inserted = 0

    @staticmethod
    @abstractmethod
    def preemption_key(request: Request) -> Any:
        """Return the key of a running request; of one tenant's, the lowest is preempted first.

        It must not change while the request keeps its place in the running list.
        """

    @staticmethod
    def priority_key(request: Request) -> int:
        """Return what counts before fairness among tenants; the lower is admitted first."""
        return 0

    @abstractmethod
    def add_request(self, request: Request) -> None: ...

    @abstractmethod
    def requeue_preempted(self, request: Request) -> None: ...

    def insert(self, request: Request, key: Any) -> None:
        """Add a request at the place of its key."""
        self._num_inserted += 1
        entry = (key, self._num_inserted, request)
        self._ready[request.seq_id] = entry
        heappush(self._heap, entry)

    def peek_request(self) -> Request:
        return self._head()[2]

    def pop_request(self) -> Request:
        request = self._head()[2]
        heappop(self._heap)
        del self._ready[request.seq_id]
        return request

    def remove_request(self, request: Request) -> None:
        if self._parked.pop(request.seq_id, None) is None:
            del self._ready[request.seq_id]
            self._clean_up()

    def park_request(self, request: Request) -> None:
        self._parked[request.seq_id] = self._ready.pop(request.seq_id)
        self._clean_up()

    def unpark_request(self, request: Request) -> None:
        key, _, _ = self._parked.pop(request.seq_id)
        self.insert(request, key)

    def reorder_request(self, request: Request) -> None:
        """Do nothing: unless a policy overrides this, a key is fixed at arrival."""
        return None

    def replace_key(self, request: Request, key: Any) -> None:
        """Move a request, parked or not, to the place of another key."""
        if request.seq_id in self._parked:
            _, number, _ = self._parked[request.seq_id]
            self._parked[request.seq_id] = (key, number, request)
        else:
            del self._ready[request.seq_id]
            self.insert(request, key)
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
