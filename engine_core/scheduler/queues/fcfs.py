"""First come, first served."""

from typing import Any

from engine_core.request import Request
from engine_core.scheduler.queues.base import (
    LastAdmittedFirst,
    OrderedQueue,
    PreemptionQueue,
    RequestQueue,
)


class FCFSQueue(OrderedQueue):
    """Requests in order of arrival; a preempted one goes back to the head.

    Preemption takes the youngest running request first, so several victims put
    back one after the other stand in their old order again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = 0
        self._first = 0

    def add(self, request: Request) -> None:
        self._last += 1
        self.put(request, self._last)

    def restore(self, request: Request) -> None:
        self._first -= 1
        self.put(request, self._first)


class FirstComeFirstServed:
    """Preempts the request admitted last, so that no victim has been planned in the same step."""

    def make_queue(self) -> RequestQueue:
        return FCFSQueue()

    def make_preemption_queue(self) -> PreemptionQueue:
        return LastAdmittedFirst()

    def preemption_key(self, request: Request) -> Any:
        return request.place

    def priority_key(self, request: Request) -> int:
        return 0
