"""Scheduling policies: who is admitted first, and who gives way first.

A policy owns no request. It names the queue for those that wait and picks the
victim among those that run. FairShares puts the order of tenants around another one.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Final, Literal, Protocol

from engine_core.queues.base import RequestQueue
from engine_core.queues.fair import FairQueue
from engine_core.queues.fcfs import FCFSQueue
from engine_core.queues.priority import PriorityQueue
from engine_core.request import Request
from engine_core.scheduler.tenants import TenantLedger

PolicyName = Literal["fcfs", "priority"]

_order: Final = attrgetter("order")


class SchedulingPolicy(Protocol):
    """One answer to the questions of order."""

    def make_queue(self) -> RequestQueue:
        """An empty queue for waiting requests."""
        ...

    def victim(self, running: Sequence[Request]) -> int:
        """Index of the running request that gives way; `running` is in order of admission."""
        ...

    def urgency(self, request: Request) -> int:
        """What counts before fairness among tenants; the lower goes first."""
        ...


class FirstComeFirstServed:
    """The request admitted last gives way, so that in one step no victim has been planned."""

    def make_queue(self) -> RequestQueue:
        return FCFSQueue()

    def victim(self, running: Sequence[Request]) -> int:
        return len(running) - 1

    def urgency(self, request: Request) -> int:
        return 0


class ByPriority:
    """The request that would be admitted last gives way, wherever it stands."""

    def make_queue(self) -> RequestQueue:
        return PriorityQueue()

    def victim(self, running: Sequence[Request]) -> int:
        return running.index(max(running, key=_order))

    def urgency(self, request: Request) -> int:
        return request.priority


class FairShares:
    """Among tenants the one that was served least goes first and gives way last.

    inner: orders the requests of one tenant; what is urgent to it goes before fairness.
    With one tenant there is only the inner policy.
    """

    def __init__(self, inner: SchedulingPolicy, ledger: TenantLedger) -> None:
        self._inner = inner
        self._ledger = ledger
        self.urgency = inner.urgency

    def make_queue(self) -> RequestQueue:
        return FairQueue(self._inner.make_queue, self.urgency, self._ledger)

    def rank(self, request: Request) -> tuple[int, float]:
        """The lower goes first."""
        return self.urgency(request), self._ledger.served(request.tenant)

    def victim(self, running: Sequence[Request]) -> int:
        if self._ledger.num_tenants == 1:
            return self._inner.victim(running)
        ranks = [self.rank(each) for each in running]
        last = max(ranks)
        candidates = [index for index, rank in enumerate(ranks) if rank == last]
        return candidates[self._inner.victim([running[index] for index in candidates])]


def policy_of(name: PolicyName, ledger: TenantLedger) -> FairShares:
    """The policy of `--scheduling-policy`, fair to the tenants of the ledger."""
    return FairShares(ByPriority() if name == "priority" else FirstComeFirstServed(), ledger)
