"""Time limits: until when a request must have begun, and until when it must be over.

Owns the deadlines of the requests that have any, by request id. Deadlines are moments on
the monotonic clock of the machine, named by the front end from the arrival of the request,
so they stand whatever dies meanwhile. Ends nothing itself.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import ClassVar, Final

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.gates import Candidate, Wake
from engine_core.scheduler.step_plan import StepPlan
from proto.engine_io import EngineCoreRequest
from proto.errors import ErrorInfo

_SLACK: Final = 64
"""So many left-over moments are never worth a clean-up."""


@dataclass(slots=True)
class _Limited:
    """client_index: whose request it is. num_choices: that are not over.

    queue_deadline: infinite once any choice has begun.
    """

    client_index: int
    arrival: float
    queue_deadline: float
    deadline: float
    num_choices: int = 0


@dataclass(frozen=True, slots=True)
class Overdue:
    """A request whose time is over, all its choices with it."""

    request_id: int
    client_index: int
    error: ErrorInfo


class Deadlines:
    """A gate that holds nobody, so that it hears who begins and who is over."""

    status: ClassVar[RequestStatus] = RequestStatus.WAITING

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limited: dict[int, _Limited] = {}
        self._moments: list[tuple[float, int]] = []  # a heap; those of requests now over stay

    def enter(self, request: Request, message: EngineCoreRequest) -> None:
        """A choice of a message is in the queue. One that has tokens from before has begun."""
        queue_deadline = inf if any(message.output_token_ids) else message.queue_deadline
        if queue_deadline == message.deadline == inf:
            return
        limited = self._limited.get(request.request_id)
        if limited is None:
            limited = self._limited[request.request_id] = _Limited(
                request.client_index, message.arrival_time, queue_deadline, message.deadline
            )
            for moment in {queue_deadline, message.deadline} - {inf}:
                heappush(self._moments, (moment, request.request_id))
        limited.num_choices += 1

    @property
    def seconds_to_next_end(self) -> float | None:
        """Until it is worth looking for who is overdue; None for never."""
        return max(0.0, self._moments[0][0] - self._clock()) if self._moments else None

    def take_overdue(self) -> list[Overdue]:
        """Those whose time has come since the last call; the caller ends them."""
        overdue: list[Overdue] = []
        while self._moments and self._moments[0][0] <= (now := self._clock()):
            _, request_id = heappop(self._moments)
            limited = self._limited.get(request_id)
            if limited is not None and min(limited.deadline, limited.queue_deadline) <= now:
                del self._limited[request_id]
                error = _error(limited, now)
                overdue.append(Overdue(request_id, limited.client_index, error))
        return overdue

    def attach(self, wake: Wake) -> None:
        """Nobody is held, so nobody is woken."""

    def begin(self, plan: StepPlan) -> None:
        """Nothing changes by a step."""

    def holds(self, candidate: Candidate) -> bool:
        return False

    def admitted(self, request: Request, num_new_tokens: int) -> None:
        limited = self._limited.get(request.request_id)
        if limited is not None:
            limited.queue_deadline = inf

    def forget(self, request: Request) -> None:
        limited = self._limited.get(request.request_id)
        if limited is None:
            return
        limited.num_choices -= 1
        if not limited.num_choices:
            del self._limited[request.request_id]
            self._clean_up()

    def _clean_up(self) -> None:
        """A request has two moments at most."""
        if len(self._moments) > 4 * len(self._limited) + _SLACK:
            self._moments = [each for each in self._moments if each[1] in self._limited]
            heapify(self._moments)


def _error(limited: _Limited, now: float) -> ErrorInfo:
    if limited.deadline <= now:
        seconds = limited.deadline - limited.arrival
        return ErrorInfo(
            "time_limit", f"the request was not over within {seconds:g} s", "timeout_ms"
        )
    seconds = limited.queue_deadline - limited.arrival
    return ErrorInfo(
        "queue_timeout",
        f"the request had not begun within {seconds:g} s, the longest that it was to wait",
        "queue_timeout_ms",
    )
