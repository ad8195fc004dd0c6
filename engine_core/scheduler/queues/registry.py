"""Scheduling policies: who is admitted first, and who gives way first.

A policy owns no request. It names the queue for those that wait and the order of
victims for those that run. FairShares puts the order of tenants around another one.
"""

from typing import Any, Literal, Protocol

from engine_core.request import Request
from engine_core.scheduler.preemption import LastAdmittedFirst, LowestKeyFirst, PreemptionQueue
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.queues.continuum import ContinuumQueue
from engine_core.scheduler.queues.fair import FairQueue
from engine_core.scheduler.queues.fcfs import FCFSQueue
from engine_core.scheduler.queues.priority import PriorityQueue
from engine_core.scheduler.tenant_usage import TenantUsage

PolicyName = Literal["fcfs", "priority", "continuum"]


class SchedulingPolicy(Protocol):
    """One answer to the questions of order."""

    def make_queue(self) -> RequestQueue:
        """An empty queue for waiting requests."""
        ...

    def make_preemption_queue(self) -> PreemptionQueue:
        """For the running requests of one tenant, those that are less urgent first."""
        ...

    def preemption_key(self, request: Request) -> Any:
        """Where tenants are equal, the one of the higher gives way; of a running request."""
        ...

    def priority_key(self, request: Request) -> int:
        """What counts before fairness among tenants; the lower goes first."""
        ...


class FirstComeFirstServed:
    """The request admitted last gives way, so that in one step no victim has been planned."""

    def make_queue(self) -> RequestQueue:
        return FCFSQueue()

    def make_preemption_queue(self) -> PreemptionQueue:
        return LastAdmittedFirst()

    def preemption_key(self, request: Request) -> Any:
        return request.place

    def priority_key(self, request: Request) -> int:
        return 0


class ByPriority:
    """The request that would be admitted last gives way, wherever it stands."""

    def make_queue(self) -> RequestQueue:
        return PriorityQueue()

    def make_preemption_queue(self) -> PreemptionQueue:
        return LowestKeyFirst(_from_last)

    def preemption_key(self, request: Request) -> Any:
        return request.order

    def priority_key(self, request: Request) -> int:
        return request.priority


class ByJobs:
    """Turns of jobs in the order of the jobs; who continues one gives way last.

    The KV of those was kept for them, or would have been: their next turn wants it as well.
    """

    def make_queue(self) -> RequestQueue:
        return ContinuumQueue()

    def make_preemption_queue(self) -> PreemptionQueue:
        return LowestKeyFirst(_from_last_job)

    def preemption_key(self, request: Request) -> Any:
        continues, arrival, request_id, choice = _from_last_job(request)
        return not continues, -arrival, -request_id, -choice

    def priority_key(self, request: Request) -> int:
        return 0


class FairShares:
    """Among tenants the one that was served least goes first and gives way last.

    inner: orders the requests of one tenant; what is urgent to it goes before fairness.
    """

    def __init__(self, inner: SchedulingPolicy, usage: TenantUsage) -> None:
        self._inner = inner
        self._usage = usage
        self.priority_key = inner.priority_key
        self.make_preemption_queue = inner.make_preemption_queue

    def make_queue(self) -> RequestQueue:
        return FairQueue(self._inner.make_queue, self.priority_key, self._usage)

    def rank(self, request: Request) -> tuple[int, float]:
        """The lower goes first."""
        return self.priority_key(request), self._usage.served(request.tenant)

    def served(self, tenant: int) -> float:
        return self._usage.served(tenant)

    def preemption_rank(self, request: Request) -> tuple[int, float, Any]:
        """The higher gives way first."""
        priority_key, served = self.rank(request)
        return priority_key, served, self._inner.preemption_key(request)


def policy_of(name: PolicyName, usage: TenantUsage) -> FairShares:
    """The policy of `--scheduling-policy`, fair to the tenants of the usage."""
    if name == "continuum":
        return FairShares(ByJobs(), usage)
    return FairShares(ByPriority() if name == "priority" else FirstComeFirstServed(), usage)


def _from_last(request: Request) -> tuple[int, float, int, int]:
    priority, arrival, request_id, choice = request.order
    return -priority, -arrival, -request_id, -choice


def _from_last_job(request: Request) -> tuple[bool, float, int, int]:
    _, _, request_id, choice = request.order
    return request.continues_job, -request.job_arrival, -request_id, -choice
