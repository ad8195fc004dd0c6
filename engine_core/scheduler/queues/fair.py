"""The tenant that was served least goes first; its own requests keep the order of a policy.

    tenant 7   served 120   ▸ ▸ ▸
    tenant 0   served 900   ▸ ▸ ▸ ▸ ▸ ▸ ▸ ▸ ▸
    tenant 3   served 340   ▸              next: the first of 7, then, when that is charged, …

Owns a line for each tenant that waits, and the order among them. Where the policy knows
priority_key, the more urgent head goes before the tenant that was served less; among tenants
that were served the same, the head that arrived first.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Final, Protocol

from engine_core.request import Request
from engine_core.scheduler.queues.base import RequestQueue, SchedulingPolicy
from engine_core.scheduler.tenant_usage import TenantUsage

_SLACK: Final = 64
"""So many void entries are never worth a clean-up."""

Rank = tuple[int, float, Any]
"""Urgency of the head, what its tenant was served, and the order of the head."""
Entry = tuple[Rank, int]
"""Rank and tenant."""


class TenantStats(Protocol):
    """What the queue asks about tenants, and tells of them."""

    def served(self, tenant: int) -> float:
        """The lower goes first; it never falls while the tenant has requests here."""
        ...

    def enter(self, request: Request) -> None:
        """A new request."""
        ...

    def line_up(self, tenant: int) -> None:
        """A tenant of which nothing waited begins to wait."""
        ...

    def stop(self, request: Request) -> None:
        """A request ran and waits again."""
        ...


class FairQueue:
    """Lines by tenant; with a single tenant it is that tenant's line.

    make_line: an empty queue for one tenant. priority_key: of a request, the lower goes first;
    in a line the heads become less urgent, but for what is put in.

    Each tenant with a request that is ready has one entry in the heap that counts. What a
    tenant was served only grows, so an entry may promise too much, never too little: it is
    looked at again when it comes to the top, and nothing else moves while others are served.
    Entries are compared by value: compiled, a tuple has no identity.
    """

    def __init__(
        self,
        make_line: Callable[[], RequestQueue],
        priority_key: Callable[[Request], int],
        stats: TenantStats,
    ) -> None:
        self._make_line = make_line
        self._urgency = priority_key
        self._stats = stats
        self._lines: dict[int, RequestQueue] = {}
        self._heap: list[Entry] = []
        self._counting: dict[int, Entry] = {}
        self._num_ready = 0
        self._len = 0

    def add(self, request: Request) -> None:
        self._stats.enter(request)
        self._line_for(request).add(request)
        self._came(request.tenant)
        self._len += 1

    def restore(self, request: Request) -> None:
        self._stats.stop(request)
        self._line_for(request).restore(request)
        self._came(request.tenant)
        self._len += 1

    def peek(self) -> Request:
        return self._first().peek()

    def pop(self) -> Request:
        request = self._first().pop()
        self._num_ready -= 1
        self._went(request.tenant)
        return request

    def remove(self, request: Request) -> None:
        line = self._lines[request.tenant]
        num_ready = line.num_ready
        line.remove(request)
        self._num_ready += line.num_ready - num_ready
        self._went(request.tenant)

    def park(self, request: Request) -> None:
        self._lines[request.tenant].park(request)
        self._num_ready -= 1

    def unpark(self, request: Request) -> None:
        self._line_for(request).unpark(request)
        self._came(request.tenant)

    def reorder(self, request: Request) -> None:
        line = self._lines[request.tenant]
        line.reorder(request)
        if line.num_ready:
            self._note_head(request.tenant)

    @property
    def num_ready(self) -> int:
        return self._num_ready

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Request]:
        """As things stand: every admission changes what its tenant was served."""
        served = {tenant: (self._stats.served(tenant), tenant) for tenant in self._lines}
        everyone = [request for line in self._lines.values() for request in line]
        return iter(sorted(everyone, key=lambda each: (self._urgency(each), served[each.tenant])))

    def _line_for(self, request: Request) -> RequestQueue:
        line = self._lines.get(request.tenant)
        if line is None:
            line = self._lines[request.tenant] = self._make_line()
        if not line.num_ready:
            self._stats.line_up(request.tenant)
        return line

    def _came(self, tenant: int) -> None:
        """One more request of a tenant is ready."""
        self._num_ready += 1
        self._note_head(tenant)

    def _note_head(self, tenant: int) -> None:
        """The tenant's head may go earlier than its entry in the heap says."""
        rank = self._rank(tenant)
        counting = self._counting.get(tenant)
        if counting is None or rank < counting[0]:
            heappush(self._heap, self._enter(rank, tenant))
            self._clean_up()

    def _went(self, tenant: int) -> None:
        """One less of a tenant is here."""
        self._len -= 1
        if not len(self._lines[tenant]):
            del self._lines[tenant]
            self._counting.pop(tenant, None)

    def _rank(self, tenant: int) -> Rank:
        head = self._lines[tenant].peek()
        return self._urgency(head), self._stats.served(tenant), head.order

    def _enter(self, rank: Rank, tenant: int) -> Entry:
        entry = self._counting[tenant] = (rank, tenant)
        return entry

    def _first(self) -> RequestQueue:
        """The line whose head is next; there must be one."""
        if len(self._lines) == 1:
            return next(iter(self._lines.values()))
        heap, counting = self._heap, self._counting
        while True:
            tenant = heap[0][1]
            if counting.get(tenant) != heap[0]:
                heappop(heap)
                continue
            line = self._lines[tenant]
            if not line.num_ready:
                heappop(heap)
                del counting[tenant]
                continue
            rank = self._rank(tenant)
            if rank == heap[0][0]:
                return line
            heapreplace(heap, self._enter(rank, tenant))

    def _clean_up(self) -> None:
        if len(self._heap) > 2 * len(self._counting) + _SLACK:
            self._heap = list(self._counting.values())
            heapify(self._heap)


class FairShares:
    """Admits requests of the tenant that was served least first, and preempts them last.

    inner: orders the requests of one tenant; its priority key counts before fairness.
    """

    def __init__(self, inner: SchedulingPolicy, usage: TenantUsage) -> None:
        self._inner = inner
        self._usage = usage
        self.priority_key = inner.priority_key
        self.make_preemption_queue = inner.make_preemption_queue

    def make_queue(self) -> RequestQueue:
        return FairQueue(self._inner.make_queue, self.priority_key, self._usage)

    def rank(self, request: Request) -> tuple[int, float]:
        """Of a request; the lower is admitted first."""
        return self.priority_key(request), self._usage.served(request.tenant)

    def served(self, tenant: int) -> float:
        """Weighted tokens that a tenant was served."""
        return self._usage.served(tenant)

    def preemption_rank(self, request: Request) -> tuple[int, float, Any]:
        """Of a request; the higher is preempted first."""
        priority_key, served = self.rank(request)
        return priority_key, served, self._inner.preemption_key(request)
