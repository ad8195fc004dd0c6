"""The policy continuum: first come, first served, by agent sessions.

    preempted │ turns whose prefix is retained, by session │ all others, by session

A turn has the arrival time of its session's first turn. So a session that has begun is completed
before younger ones, and finds its KV. A turn whose prefix is retained goes before sessions that
arrived up to LEAD_SECONDS earlier, in practice before all others. A session's age counts for
OLDEST_SECONDS at most, so a client that sends all requests in one session does not overtake others
for ever. A request without a session is a session of one turn.
"""

from typing import Any, Final

from engine_core.request import Request
from engine_core.scheduler.queues.base import OrderedQueue

LEAD_SECONDS: Final = 600.0
OLDEST_SECONDS: Final = 3600.0


class ContinuumQueue(OrderedQueue):
    """Requests by session; a preempted one goes back to the head.

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
