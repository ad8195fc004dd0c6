"""Pausing: no new request starts, or nothing is scheduled at all.

Owns the mode and the requests that wait for its end.
"""

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.gates import Candidate, Wake
from engine_core.scheduler.step_plan import StepPlan
from proto.engine_io import PauseMode


class Pause:
    """A gate that is open, unless an operator has asked otherwise.

    finish_running: requests that have not begun are held; the others go on to their
    end, also those that are preempted meanwhile or come from an engine that died.
    freeze: the scheduler plans nothing.
    """

    status = RequestStatus.WAITING_FOR_RESUME

    def __init__(self) -> None:
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

    def holds(self, candidate: Candidate) -> bool:
        request = candidate.request
        if self._mode is None or request.num_preemptions or request.num_output_tokens:
            return False
        self._held[request.handle] = request
        return True

    def admitted(self, request: Request, num_new_tokens: int) -> None:
        """Who runs is none of its business."""

    def forget(self, request: Request) -> None:
        self._held.pop(request.handle, None)
