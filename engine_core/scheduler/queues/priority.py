"""The lowest priority number first; among equals the one that arrived first."""

from engine_core.request import Request
from engine_core.scheduler.queues.base import OrderedQueue


class PriorityQueue(OrderedQueue):
    """Requests by (priority, arrival, request id, choice), whether new or preempted."""

    def add(self, request: Request) -> None:
        self.put(request, request.order)

    def restore(self, request: Request) -> None:
        self.put(request, request.order)
