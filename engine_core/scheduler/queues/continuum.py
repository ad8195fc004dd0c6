"""First come, first served, by jobs: a turn has the arrival of its job's first one.

    preempted │ turns whose prefix is kept, by job │ all others, by job

So a job that has begun gets done before younger ones, and finds its KV. A turn whose prefix is
kept goes before jobs that came up to LEAD_SECONDS earlier: in practice before all others. A job's
age counts for OLDEST_SECONDS at most, so that a client that puts all it asks for into one job
does not overtake everybody for ever. What belongs to no job is a job of one turn.
"""

from typing import Any, Final

from engine_core.request import Request
from engine_core.scheduler.queues.base import (
    LowestKeyFirst,
    OrderedQueue,
    PreemptionQueue,
    RequestQueue,
)

LEAD_SECONDS: Final = 600.0
OLDEST_SECONDS: Final = 3600.0


class ContinuumQueue(OrderedQueue):
    """Requests by job; a preempted one goes back to the head.

    Preemption takes the youngest first, so several victims stand in their old order again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_restored = 0

    def add(self, request: Request) -> None:
        self.put(request, self._key(request))

    def restore(self, request: Request) -> None:
        self._num_restored += 1
        self.put(request, (0, -self._num_restored))

    def reorder(self, request: Request) -> None:
        """The lead of a turn that has not run follows its session's retained prefix."""
        self.replace_key(request, self._key(request))

    @staticmethod
    def _key(request: Request) -> tuple[int, float, float, int, int]:
        came = max(request.job_arrival, request.arrival_time - OLDEST_SECONDS)
        came -= LEAD_SECONDS if request.finds_retained_prefix else 0.0
        return 1, came, request.arrival_time, request.request_id, request.choice


class ByJobs:
    """Turns in the order of their jobs; a turn that continues a job is preempted last.

    Its KV was retained, or would have been: the next turn of the job wants it as well.
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


def _from_last_job(request: Request) -> tuple[bool, float, int, int]:
    _, _, request_id, choice = request.order
    return request.continues_job, -request.job_arrival, -request_id, -choice
