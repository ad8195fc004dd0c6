"""The scheduling policies by the names of `--scheduling-policy`, and fairness among tenants."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from engine_core.request import Request
from engine_core.scheduler.features.tenant_usage import TenantUsage
from engine_core.scheduler.queues.base import OrderedQueue, RequestQueue
from engine_core.scheduler.queues.continuum import ContinuumQueue
from engine_core.scheduler.queues.fair import FairQueue
from engine_core.scheduler.queues.fcfs import FCFSQueue
from engine_core.scheduler.queues.outside import SchedulingPolicy
from engine_core.scheduler.queues.priority import PriorityQueue
from proto.runtime.plugins import load_part

POLICIES: Final[dict[str, type[OrderedQueue]]] = {
    "fcfs": FCFSQueue,
    "priority": PriorityQueue,
    "continuum": ContinuumQueue,
}
"""A new policy needs its name in `PARTS` of proto/settings/config.py, too."""


class KeyedQueue(OrderedQueue):
    """Requests of one tenant by the keys of a policy from outside."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        super().__init__()
        self._policy = policy

    def add_request(self, request: Request) -> None:
        self.insert(request, self._policy.waiting_key(request))

    def requeue_preempted(self, request: Request) -> None:
        self.insert(request, self._policy.preempted_key(request))

    @staticmethod
    def preemption_key(request: Request) -> Any:
        raise AssertionError("the policy is asked")


class FairSchedulingPolicy:
    """A scheduling policy with fairness: requests of the least served tenant are preempted last.

    name: of the policy that orders the requests of one tenant; its priority key counts before
    fairness. Raises ConfigError for a policy from outside that cannot be loaded.
    """

    def __init__(self, name: str, usage: TenantUsage) -> None:
        self._usage = usage
        queue_class = POLICIES.get(name)
        if queue_class is not None:
            self._make_tenant_queue: Callable[[], RequestQueue] = queue_class
            self.priority_key: Callable[[Request], int] = queue_class.priority_key
            self.preemption_key: Callable[[Request], Any] = queue_class.preemption_key
        else:
            policy: SchedulingPolicy = load_part(
                "scheduling_policy", name, "scheduling_policy", SchedulingPolicy
            )()
            self._make_tenant_queue = partial(KeyedQueue, policy)
            self.priority_key = policy.priority_key
            self.preemption_key = policy.preemption_key

    def make_queue(self) -> RequestQueue:
        return FairQueue(self._make_tenant_queue, self.priority_key, self._usage)

    def rank(self, request: Request) -> tuple[int, float]:
        """Return the rank of a request; the lower is admitted first."""
        return self.priority_key(request), self._usage.served(request.tenant)

    def served(self, tenant: int) -> float:
        return self._usage.served(tenant)
