"""The policy priority: the lowest number first; among equals the request that arrived first."""

from typing import Any

from engine_core.request import Request
from engine_core.scheduler.queues.base import OrderedQueue


class PriorityQueue(OrderedQueue):
    """Requests by (priority, arrival, request id, choice), whether new or preempted."""

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
