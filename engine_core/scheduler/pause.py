"""Pausing: no new request starts, or nothing is scheduled at all.

Owns the mode and the requests that wait for its end.
"""

from collections.abc import Mapping
from typing import ClassVar

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.gates import Candidate, Wake
from engine_core.scheduler.step_plan import StepPlan
from proto.engine_io import PauseMode


class Pause:
    """A gate that is open, unless an operator has asked otherwise.

    finish_running: requests that have not begun are held; the others go on to their
    end, with all their choices, also those that are preempted meanwhile or come from an
    engine that died. freeze: the scheduler plans nothing.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_RESUME

    def __init__(self, choices: Mapping[int, Mapping[int, Request]]) -> None:
        """choices: unfinished choices by number, by request id; read only."""
        self._choices = choices
        self._begun: set[int] = set()  # ids of requests that have begun with some choice
        self._mode: PauseMode | None = None
        self._held: dict[int, Request] = {}

    @property
    def mode(self) -> PauseMode | None:
        """None without a pause."""
        return self._mode

    @property
    def frozen(self) -> bool:
        return self._mode == "freeze"

    def begin_pause(self, mode: PauseMode) -> None:
        """Pause, or change the mode of the pause."""
        self._mode = mode

    def end_pause(self) -> None:
        """Let everyone back into the line; nothing happens without a pause."""
        self._mode = None
        held, self._held = self._held, {}
        for request in held.values():
            self._wake(request)

    def attach(self, wake: Wake) -> None:
        self._wake = wake

    def begin(self, plan: StepPlan) -> None:
        """Nothing changes by a step."""

    def stops(self, request: Request) -> bool:
        """Whether a request is not to begin as long as this lasts."""
        if self._mode is None or request.request_id in self._begun:
            return False
        return not request.num_output_tokens

    def holds(self, candidate: Candidate) -> bool:
        request = candidate.request
        if not self.stops(request):
            return False
        self._held[request.handle] = request
        return True

    def admitted(self, request: Request, num_new_tokens: int) -> None:
        self._begun.add(request.request_id)

    def forget(self, request: Request) -> None:
        self._held.pop(request.handle, None)
        if len(self._choices[request.request_id]) == 1:
            self._begun.discard(request.request_id)
