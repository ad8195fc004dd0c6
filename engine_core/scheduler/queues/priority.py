"""The lowest priority number first; among equals the one that arrived first."""

from typing import Any

from engine_core.request import Request
from engine_core.scheduler.queues.base import (
    LowestKeyFirst,
    OrderedQueue,
    PreemptionQueue,
    RequestQueue,
)


class PriorityQueue(OrderedQueue):
    """Requests by (priority, arrival, request id, choice), whether new or preempted."""

    def add(self, request: Request) -> None:
        self.put(request, request.order)

    def restore(self, request: Request) -> None:
        self.put(request, request.order)


class ByPriority:
    """Preempts the request that would be admitted last, wherever it stands."""

    def make_queue(self) -> RequestQueue:
        return PriorityQueue()

    def make_preemption_queue(self) -> PreemptionQueue:
        return LowestKeyFirst(_from_last)

    def preemption_key(self, request: Request) -> Any:
        return request.order

    def priority_key(self, request: Request) -> int:
        return request.priority


def _from_last(request: Request) -> tuple[int, float, int, int]:
    priority, arrival, request_id, choice = request.order
    return -priority, -arrival, -request_id, -choice
