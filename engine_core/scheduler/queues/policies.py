"""The scheduling policies by the names of `--scheduling-policy`, and fairness among tenants.

docs/extending.md says how to add one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from engine_core.request import Request
from engine_core.scheduler.features.tenant_usage import TenantUsage
from engine_core.scheduler.queues.base import OrderedQueue, RequestQueue
from engine_core.scheduler.queues.fair import FairQueue
from engine_core.scheduler.queues.outside import SchedulingPolicy
from proto.runtime.plugins import load_part

LEAD_SECONDS: Final = 600.0
OLDEST_SECONDS: Final = 3600.0


class FCFSQueue(OrderedQueue):
    """Requests in the order of arrival; a preempted one goes back to the head.

    Preemption takes the last of the running list first, so several preempted requests are in their
    old order again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = 0
        self._first = 0

    def add_request(self, request: Request) -> None:
        self._last += 1
        self.insert(request, self._last)

    def requeue_preempted(self, request: Request) -> None:
        self._first -= 1
        self.insert(request, self._first)

    @staticmethod
    def preemption_key(request: Request) -> Any:
        """Preempt the last request of the running list, which a step plans last."""
        return -request.running_index


class PriorityQueue(OrderedQueue):
    """The most urgent (lowest) priority first, then the oldest request, new or preempted."""

    def add_request(self, request: Request) -> None:
        self.insert(request, request.order)

    def requeue_preempted(self, request: Request) -> None:
        self.insert(request, request.order)

    @staticmethod
    def preemption_key(request: Request) -> Any:
        """Preempt the request that would be admitted last, wherever it is in the running list."""
        priority, arrival, request_id, choice = request.order
        return -priority, -arrival, -request_id, -choice

    @staticmethod
    def priority_key(request: Request) -> int:
        return request.priority


class ContinuumQueue(OrderedQueue):
    """First come, first served, by agent sessions; a preempted request goes back to the head.

        preempted │ turns whose prefix is retained, by session │ all others, by session

    A turn has the arrival time of its session's first turn. So a session that has begun is
    completed before younger ones, and finds its KV. A turn whose prefix is retained goes before
    sessions that arrived up to LEAD_SECONDS earlier, in practice before all others. A session's age
    counts for OLDEST_SECONDS at most, so a client that sends all requests in one session does not
    overtake others for ever. A request without a session is a session of one turn.

    Preemption takes the youngest first, so several preempted requests are in their old order again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_requeued = 0

    def add_request(self, request: Request) -> None:
        self.insert(request, self._key(request))

    def requeue_preempted(self, request: Request) -> None:
        self._num_requeued += 1
        self.insert(request, (0, -self._num_requeued))

    def reorder_request(self, request: Request) -> None:
        """Move a waiting turn whose session has gained or lost its retained prefix."""
        self.replace_key(request, self._key(request))

    @staticmethod
    def _key(request: Request) -> tuple[int, float, float, int, int]:
        came = max(request.agent_session_arrival, request.arrival_time - OLDEST_SECONDS)
        came -= LEAD_SECONDS if request.finds_retained_prefix else 0.0
        return 1, came, request.arrival_time, request.request_id, request.choice

    @staticmethod
    def preemption_key(request: Request) -> Any:
        """Preempt a turn that continues a session last: its next turn can use its KV as well."""
        _, _, request_id, choice = request.order
        arrival = request.agent_session_arrival
        return request.continues_agent_session, -arrival, -request_id, -choice


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

    def admission_key(self, request: Request) -> tuple[int, float]:
        """Return the key of a request among all tenants; the lowest is admitted first."""
        return self.priority_key(request), self._usage.served(request.tenant)

    def served(self, tenant: int) -> float:
        return self._usage.served(tenant)
