"""Fairness among tenants: the tenant that was served least goes first.

    tenant 7   served 120   ▸ ▸ ▸
    tenant 0   served 900   ▸ ▸ ▸ ▸ ▸ ▸ ▸ ▸ ▸
    tenant 3   served 340   ▸              next: the first request of tenant 7

Requests of one tenant keep the order of the scheduling policy. A policy with priorities puts a more
urgent head before the tenant that was served less; among tenants that were served the same, the
head that arrived first goes first.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Final, Protocol

from engine_core.request import Request
from engine_core.scheduler.features.tenant_usage import TenantUsage
from engine_core.scheduler.queues.base import RequestQueue, SchedulingPolicy

_SLACK: Final = 64
"""Number of stale entries of the heap that are never worth a clean-up."""

Rank = tuple[int, float, Any]
"""Priority key of the head, what its tenant was served, and the order of the head."""
Entry = tuple[Rank, int]
"""Rank and tenant."""


class TenantStats(Protocol):
    """Service that tenants have received, as the queue reads and updates it: `TenantUsage`."""

    def served(self, tenant: int) -> float:
        """Return what a tenant was served; it never falls while the tenant has requests."""
        ...

    def register_request(self, request: Request) -> None:
        """Count a new request."""
        ...

    def begin_waiting(self, tenant: int) -> None:
        """Update the counter of a tenant that had no ready request and gets one."""
        ...

    def end_running(self, request: Request) -> None:
        """Stop charging for a request that was running."""
        ...


class FairQueue:
    """A queue for each tenant, and a heap of their heads.

    make_queue: returns an empty queue for one tenant. priority_key: of a request, the lower goes
    first.

    Each tenant with a ready request has one valid entry in the heap. What a tenant was served only
    grows, so an entry may be too early and never too late: it is checked when it comes to the top,
    and no other entry moves when tenants are served. Entries are compared by value, because
    compiled tuples have no identity.
    """

    def __init__(
        self,
        make_queue: Callable[[], RequestQueue],
        priority_key: Callable[[Request], int],
        stats: TenantStats,
    ) -> None:
        self._make_queue = make_queue
        self._priority_key = priority_key
        self._stats = stats
        self._queues: dict[int, RequestQueue] = {}
        self._heap: list[Entry] = []
        self._valid: dict[int, Entry] = {}
        self._num_ready = 0
        self._len = 0

    def add_request(self, request: Request) -> None:
        self._stats.register_request(request)
        self._queue_for(request).add_request(request)
        self._count_ready(request.tenant)
        self._len += 1

    def requeue_preempted(self, request: Request) -> None:
        self._stats.end_running(request)
        self._queue_for(request).requeue_preempted(request)
        self._count_ready(request.tenant)
        self._len += 1

    def peek_request(self) -> Request:
        return self._first_queue().peek_request()

    def pop_request(self) -> Request:
        request = self._first_queue().pop_request()
        self._num_ready -= 1
        self._count_removed(request.tenant)
        return request

    def remove_request(self, request: Request) -> None:
        queue = self._queues[request.tenant]
        num_ready = queue.num_ready
        queue.remove_request(request)
        self._num_ready += queue.num_ready - num_ready
        self._count_removed(request.tenant)

    def park_request(self, request: Request) -> None:
        self._queues[request.tenant].park_request(request)
        self._num_ready -= 1

    def unpark_request(self, request: Request) -> None:
        self._queue_for(request).unpark_request(request)
        self._count_ready(request.tenant)

    def reorder_request(self, request: Request) -> None:
        queue = self._queues[request.tenant]
        queue.reorder_request(request)
        if queue.num_ready:
            self._note_head(request.tenant)

    @property
    def num_ready(self) -> int:
        return self._num_ready

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Request]:
        """Return the order of now; every admission changes what its tenant was served."""
        served = {tenant: (self._stats.served(tenant), tenant) for tenant in self._queues}
        requests = [request for queue in self._queues.values() for request in queue]
        return iter(
            sorted(
                requests, key=lambda request: (self._priority_key(request), served[request.tenant])
            )
        )

    def _queue_for(self, request: Request) -> RequestQueue:
        queue = self._queues.get(request.tenant)
        if queue is None:
            queue = self._queues[request.tenant] = self._make_queue()
        if not queue.num_ready:
            self._stats.begin_waiting(request.tenant)
        return queue

    def _count_ready(self, tenant: int) -> None:
        self._num_ready += 1
        self._note_head(tenant)

    def _note_head(self, tenant: int) -> None:
        """Push a new entry if the tenant's head goes earlier than its entry in the heap says."""
        rank = self._rank(tenant)
        valid = self._valid.get(tenant)
        if valid is None or rank < valid[0]:
            heappush(self._heap, self._new_entry(rank, tenant))
            self._clean_up()

    def _count_removed(self, tenant: int) -> None:
        self._len -= 1
        if not len(self._queues[tenant]):
            del self._queues[tenant]
            self._valid.pop(tenant, None)

    def _rank(self, tenant: int) -> Rank:
        head = self._queues[tenant].peek_request()
        return self._priority_key(head), self._stats.served(tenant), head.order

    def _new_entry(self, rank: Rank, tenant: int) -> Entry:
        entry = self._valid[tenant] = (rank, tenant)
        return entry

    def _first_queue(self) -> RequestQueue:
        """Return the queue whose head is next; there must be one."""
        if len(self._queues) == 1:
            return next(iter(self._queues.values()))
        heap, valid = self._heap, self._valid
        while True:
            tenant = heap[0][1]
            if valid.get(tenant) != heap[0]:
                heappop(heap)
                continue
            queue = self._queues[tenant]
            if not queue.num_ready:
                heappop(heap)
                del valid[tenant]
                continue
            rank = self._rank(tenant)
            if rank == heap[0][0]:
                return queue
            heapreplace(heap, self._new_entry(rank, tenant))

    def _clean_up(self) -> None:
        if len(self._heap) > 2 * len(self._valid) + _SLACK:
            self._heap = list(self._valid.values())
            heapify(self._heap)


class FairSchedulingPolicy:
    """A scheduling policy with fairness: requests of the least served tenant are preempted last.

    inner: orders the requests of one tenant; its priority key counts before fairness.
    """

    def __init__(self, inner: SchedulingPolicy, usage: TenantUsage) -> None:
        self._inner = inner
        self._usage = usage
        self.priority_key = inner.priority_key
        self.preemption_key = inner.preemption_key

    def make_queue(self) -> RequestQueue:
        return FairQueue(self._inner.make_queue, self.priority_key, self._usage)

    def rank(self, request: Request) -> tuple[int, float]:
        """Return the rank of a request; the lower is admitted first."""
        return self.priority_key(request), self._usage.served(request.tenant)

    def served(self, tenant: int) -> float:
        return self._usage.served(tenant)
