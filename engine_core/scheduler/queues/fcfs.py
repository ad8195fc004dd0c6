"""The policy fcfs: first come, first served."""

from typing import Any

from engine_core.request import Request
from engine_core.scheduler.queues.base import OrderedQueue


class FCFSQueue(OrderedQueue):
    """Requests in the order of arrival; a preempted one goes back to the head.

    Preemption takes the youngest running request first, so several preempted requests are in their
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
        """Preempt the last request of the running list, which the step has not planned yet."""
        return -request.running_index
