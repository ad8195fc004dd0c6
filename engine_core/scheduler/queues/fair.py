"""Fairness among tenants: the tenant that was served least goes first.

    tenant 7   served 120   ▸ ▸ ▸
    tenant 0   served 900   ▸ ▸ ▸ ▸ ▸ ▸ ▸ ▸ ▸
    tenant 3   served 340   ▸              next: the first request of tenant 7

Requests of one tenant keep the order of the scheduling policy. A policy with priorities puts a more
urgent head before the tenant that was served less; among tenants that were served the same, the
head that arrived first goes first.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from engine_core.request import Request
from engine_core.scheduler.keyed_heap import KeyedHeap
from engine_core.scheduler.queues.base import RequestQueue

Rank = tuple[int, float, Any]
"""Priority key of the head, what its tenant was served, and the order of the head."""


class TenantStats(Protocol):
    """Service that tenants have received, as the queue reads and updates it: `TenantUsage`."""

    def served(self, tenant: int) -> float:
        """Return what a tenant was served; it never falls while the tenant has requests."""

    def register_request(self, request: Request) -> None:
        """Count a new request."""

    def begin_waiting(self, tenant: int) -> None:
        """Update the counter of a tenant that had no ready request and gets one."""

    def end_running(self, request: Request) -> None:
        """Stop charging for a request that was running."""


class FairQueue:
    """A queue for each tenant, and a heap of their heads.

    make_queue: returns an empty queue for one tenant. priority_key: of a request, the lower goes
    first.

    Each tenant with a ready request is in the heap. What a tenant was served only grows, so its key
    may be too low and never too high: it is checked when it comes to the top, and no other key
    changes when tenants are served.
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
        self._heads: KeyedHeap[int] = KeyedHeap()  # tenants by rank
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
        """Move a tenant up if its head goes earlier than its key in the heap says."""
        rank = self._rank(tenant)
        known = self._heads.key_of(tenant)
        if known is None or rank < known:
            self._heads.set_key(tenant, rank, tenant)

    def _count_removed(self, tenant: int) -> None:
        self._len -= 1
        if not len(self._queues[tenant]):
            del self._queues[tenant]
            self._heads.remove(tenant)

    def _rank(self, tenant: int) -> Rank:
        head = self._queues[tenant].peek_request()
        return self._priority_key(head), self._stats.served(tenant), head.order

    def _first_queue(self) -> RequestQueue:
        """Return the queue whose head is next; there must be one."""
        if len(self._queues) == 1:
            return next(iter(self._queues.values()))
        while True:
            first = self._heads.first()
            assert first is not None, "no request is ready"
            rank, tenant, _ = first
            queue = self._queues[tenant]
            if not queue.num_ready:
                self._heads.remove(tenant)
                continue
            new_rank = self._rank(tenant)
            if new_rank == rank:
                return queue
            self._heads.set_key(tenant, new_rank, tenant)
