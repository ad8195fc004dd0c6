"""Pauses: no new request starts, or nothing is scheduled at all."""

from typing import ClassVar

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import Candidate, SchedulerFeature
from engine_core.scheduler.request_lifecycle import RequestLifecycle
from proto.messages.engine_io import PauseMode


class Pause(SchedulerFeature):
    """Holds requests back while an operator pauses the engine.

    In mode finish_running, requests that have not begun are held; others continue to their end,
    with all their choices, also after a preemption or in a new engine. In mode freeze, the
    scheduler plans nothing.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_RESUME

    def __init__(self, lifecycle: RequestLifecycle) -> None:
        self._choices = lifecycle.choices
        self._waiting = lifecycle.waiting
        self._unblock = lifecycle.unblock
        self._begun: set[int] = set()  # ids of requests that have begun with some choice
        self.mode: PauseMode | None = None
        self._blocked: dict[int, Request] = {}

    @property
    def frozen(self) -> bool:
        """Whether nothing is scheduled."""
        return self.mode == "freeze"

    def begin_pause(self, mode: PauseMode) -> None:
        self.mode = mode
        for request in self._waiting:
            if request.status is RequestStatus.WAITING_FOR_ENCODER and self.blocks(request):
                request.status = self.status  # nothing is encoded for it
                self._blocked[request.seq_id] = request

    def end_pause(self) -> None:
        """End the pause and unblock all requests that it blocked; without a pause do nothing."""
        self.mode = None
        blocked, self._blocked = self._blocked, {}
        for request in blocked.values():
            self._unblock(request)

    def blocks(self, request: Request) -> bool:
        """Return whether a request must not begin during the pause."""
        if self.mode is None or request.request_id in self._begun:
            return False
        return not request.num_output_tokens

    def is_blocked(self, candidate: Candidate) -> bool:
        request = candidate.request
        if not self.blocks(request):
            return False
        self._blocked[request.seq_id] = request
        return True

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self._begun.add(request.request_id)

    def on_released(self, request: Request) -> None:
        self._blocked.pop(request.seq_id, None)
        if len(self._choices[request.request_id]) == 1:
            self._begun.discard(request.request_id)
