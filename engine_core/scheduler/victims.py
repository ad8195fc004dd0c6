"""Running requests, to be asked which of them gives way first.

    tenant 7   served 900   ▸ ▸ ▸ ▸        the first of each tenant is known;
    tenant 3   served 340   ▸ ▸            among those the policy's rank decides

Owns who runs, by tenant, and `Request.place`, which grows along the running list. So a victim
costs a look at each tenant that runs, however many requests it has.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Any, Final, Protocol

from engine_core.request import Request

_SLACK: Final = 64
"""So many left-over entries are never worth a clean-up."""

_place: Final = attrgetter("place")


class VictimOrder(Protocol):
    """The running requests of one tenant."""

    def add(self, request: Request) -> None:
        """Its place is behind those of all that are here."""
        ...

    def remove(self, request: Request) -> None:
        """Raises KeyError for one that is not here."""
        ...

    def first(self) -> Request:
        """Who gives way before all others; there must be one."""
        ...

    def __len__(self) -> int: ...


class LastInPlace:
    """The one that stands last in the running list gives way first."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        self._requests[request.handle] = request

    def remove(self, request: Request) -> None:
        del self._requests[request.handle]

    def first(self) -> Request:
        return next(reversed(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)


class LastInOrder:
    """The one that would be admitted last gives way first, wherever it stands.

    reversed_order: a key that never changes; the lowest gives way first. A request that leaves
    stays in the heap as a left-over.
    """

    def __init__(self, reversed_order: Callable[[Request], Any]) -> None:
        self._key = reversed_order
        self._heap: list[tuple[Any, Request]] = []
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        self._requests[request.handle] = request
        heappush(self._heap, (self._key(request), request))

    def remove(self, request: Request) -> None:
        del self._requests[request.handle]
        if len(self._heap) > 2 * len(self._requests) + _SLACK:
            self._heap = [(self._key(each), each) for each in self._requests.values()]
            heapify(self._heap)

    def first(self) -> Request:
        heap = self._heap
        while heap[0][1].handle not in self._requests:
            heappop(heap)
        return heap[0][1]

    def __len__(self) -> int:
        return len(self._requests)


class VictimPolicy(Protocol):
    """What the policy says of victims."""

    def make_victim_order(self) -> VictimOrder:
        """An empty one."""
        ...

    def served(self, tenant: int) -> float:
        """What this tenant was given."""
        ...

    def victim_rank(self, request: Request) -> Any:
        """Of two that are the first of their tenants, the higher gives way."""
        ...


class Victims:
    """Told who begins to run, who ends, and who is put behind the others."""

    def __init__(self, policy: VictimPolicy) -> None:
        self._policy = policy
        self._tenants: dict[int, VictimOrder] = {}
        self._last_place = 0

    def admit(self, request: Request) -> None:
        """It stands at the end of the running list."""
        self._last_place += 1
        request.place = self._last_place
        order = self._tenants.get(request.tenant)
        if order is None:
            order = self._tenants[request.tenant] = self._policy.make_victim_order()
        order.add(request)

    def leave(self, request: Request) -> None:
        """It does not run any more."""
        order = self._tenants[request.tenant]
        order.remove(request)
        if not len(order):
            del self._tenants[request.tenant]

    def move_to_end(self, requests: Iterable[Request]) -> None:
        """They were put to the end of the running list, in this order."""
        for request in requests:
            self.leave(request)
            self.admit(request)

    def first(self, served_above: float = -math.inf) -> Request | None:
        """Who gives way, of the tenants that were served more than this; None for nobody."""
        if len(self._tenants) == 1 and served_above == -math.inf:
            return next(iter(self._tenants.values())).first()
        served = self._policy.served
        candidates = [
            order.first()
            for tenant, order in self._tenants.items()
            if served(tenant) > served_above
        ]
        return max(candidates, key=self._policy.victim_rank, default=None)


def index_of(running: Sequence[Request], request: Request) -> int:
    """Where it stands in the running list; it must be there."""
    index = bisect_left(running, request.place, key=_place)
    assert running[index] is request, f"{request!r} does not run"
    return index
