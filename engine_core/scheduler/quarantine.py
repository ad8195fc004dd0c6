"""Requests that processes may have died of are computed alone.

A crash does not say which request caused it. One that was being computed in several
crashes in a row, without a token in between, is a *suspect*:

    crash, crash, crash ─▶ suspect ─▶ its trial: nothing runs beside it ─┬▶ a token: no suspect
                                                                         └▶ two more crashes: ended

As long as there are suspects nobody else is computed: one that has got its token waits, too,
until the others have had their trials.

Owns the suspects and those who wait for the end of a trial. The counts are in the
requests; where the engine itself died they come from the front ends.
"""

from collections.abc import Callable
from typing import ClassVar, Final

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.gates import Candidate, Wake
from engine_core.scheduler.step_plan import StepPlan
from proto.engine_io import EngineCoreOutput, FinishReason
from proto.errors import ErrorInfo

TRIALS: Final = 2
"""Crashes of a request that was computed alone, until it is ended."""


class Quarantine:
    """A gate that is open as long as there are no suspects.

    running: the running requests; read only.
    make_room: takes everyone out of the running list and the plan; they wait again.
    crashes_until_alone: crashes in a row that make a suspect.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_TRIAL

    def __init__(
        self,
        running: list[Request],
        make_room: Callable[[StepPlan], None],
        crashes_until_alone: int,
    ) -> None:
        self._running = running
        self._make_room = make_room
        self._crashes_until_alone = crashes_until_alone
        self._tokens_at_crash: dict[int, int] = {}
        self._suspects: dict[int, Request] = {}
        self._held: dict[int, Request] = {}
        self._trials: list[Request] = []

    def enter(self, request: Request) -> None:
        """A request is added; it may bring crashes of an engine along."""
        if request.crash_count:
            self._tokens_at_crash[request.handle] = request.num_output_tokens
            self._suspect(request)

    def note_crash(self) -> list[Request]:
        """The workers died over what runs now; returns those of it that are to be ended."""
        poisonous = []
        for request in self._running:
            if request.num_output_tokens > self._tokens_at_crash.get(request.handle, 0):
                request.crash_count = 0
            request.crash_count += 1
            self._tokens_at_crash[request.handle] = request.num_output_tokens
            self._suspect(request)
            if is_poisonous(request.crash_count, self._crashes_until_alone):
                poisonous.append(request)
        return poisonous

    def take_trials(self) -> list[Request]:
        """Suspects that have begun to run alone since the last call."""
        if not self._trials:
            return self._trials
        trials, self._trials = self._trials, []
        return trials

    def attach(self, wake: Wake) -> None:
        self._wake = wake

    def begin(self, plan: StepPlan) -> None:
        if not self._suspects:
            return
        for request in list(self._suspects.values()):
            if request.num_output_tokens > self._tokens_at_crash[request.handle]:
                request.crash_count = 0
                self._clear(request)
        if self._suspects and any(each.handle not in self._suspects for each in self._running):
            self._make_room(plan)

    def holds(self, candidate: Candidate) -> bool:
        request = candidate.request
        if not self._suspects or (request.handle in self._suspects and not self._running):
            return False
        self._held[request.handle] = request
        return True

    def admitted(self, request: Request, num_new_tokens: int) -> None:
        if request.handle in self._suspects:
            self._trials.append(request)

    def forget(self, request: Request) -> None:
        self._held.pop(request.handle, None)
        self._tokens_at_crash.pop(request.handle, None)
        if self._suspects:
            self._clear(request)

    def _suspect(self, request: Request) -> None:
        if request.crash_count >= self._crashes_until_alone:
            self._suspects[request.handle] = request

    def _clear(self, request: Request) -> None:
        """Nobody suspects it any more, or it is over: those who are held may ask again."""
        self._suspects.pop(request.handle, None)
        held, self._held = self._held, {}
        for each in held.values():
            self._wake(each)


def is_poisonous(crash_count: int, crashes_until_alone: int) -> bool:
    """It had its trials, and nobody but it was there when the last processes died."""
    return crash_count >= crashes_until_alone + TRIALS


def poison_error(crash_count: int) -> ErrorInfo:
    """What a client is told whose request is not tried again."""
    return ErrorInfo(
        "internal",
        f"the server crashed {crash_count} times while it computed this request, at last with "
        "nothing else under way; it is not tried again",
    )


def poison_output(request: Request) -> EngineCoreOutput:
    """The final output of such a request; the tokens it had before are sent already."""
    return EngineCoreOutput(
        request.request_id,
        request.choice,
        request.num_output_tokens,
        [],
        FinishReason.ERROR,
        error=poison_error(request.crash_count),
    )
