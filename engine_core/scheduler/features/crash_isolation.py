"""Crash isolation: requests that may have crashed processes are computed alone.

A crash does not say which request caused it. A request that was being computed in several crashes
in a row, and made no progress in between, is a *suspect*:

    crash, crash, crash ─▶ suspect ─▶ its trial: it runs alone ─┬▶ progress: no suspect any more
                                                                └▶ two more crashes: ended

Progress is a new token, or complete steps that computed all that was in flight at the crash:

    prompt       |------- computed -------|--- in flight ---|----------|
    crash                                   caused here?
    later        |------------ computed -----------------------|        it did not cause the crash

A request that crashes wherever it is computed never makes progress, however its prompt is cut into
chunks; a long prompt or a beam search that happens to run when processes are killed mostly does. A
request whose image is encoded at the crash, running or not, has progressed when it is computed past
the image.

The choices of a request are tried together, because the rows of a beam search need each other.
While a suspect may begin (a pause may hold it) no other request is computed. `isolate_suspect`
chooses the suspect before the step is planned and parks all other requests, so that `schedule` does
not even look at them:

    read messages ─▶ isolate_suspect: reports "alone" ─▶ schedule() ─▶ send ─▶ …
                                              └── a crash anywhere from here counts ──▶

Crash counts are in the requests; for crashes of the engine itself the front ends count. So the
engine reports a suspect to them before it does anything else for it, and later how far it is
computed (`RequestProgress`). An engine that ends with an exception sends its reports first; an
engine that is killed microseconds before a report is sent costs one more trial.
"""

import sys
from collections.abc import Callable
from typing import ClassVar, Final

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import Candidate, SchedulerFeature
from engine_core.scheduler.features.encoder_inputs import EncoderInputs
from engine_core.scheduler.features.pause import Pause
from engine_core.scheduler.preemption import Preemption
from engine_core.scheduler.request_lifecycle import RequestLifecycle
from engine_core.scheduler.step_plan import StepPlan
from proto.errors import ErrorInfo

TRIALS: Final = 2
"""Crashes of a suspect during its trial after which it is ended."""


ReportBegun = Callable[[Request, bool], None]
"""Tells the front end of a request, at once, that it is computed from now on; and whether alone."""


class _Record:
    """A request that was being computed in a crash.

    num_output_tokens, num_in_flight: at the last crash, its output tokens, and its computed tokens
    including tokens of steps in flight. computed: tokens in complete steps since.
    of_engine: an engine crashed, and a front end counts. reported_begun, reported_alone: what was
    reported to the front end.
    """

    def __init__(self, request: Request, num_in_flight: int, *, of_engine: bool) -> None:
        self.request = request
        self.of_engine = of_engine
        self.reported_begun = self.reported_alone = False
        self.note_crash(num_in_flight)

    def note_crash(self, num_in_flight: int) -> None:
        self.num_output_tokens = self.request.num_output_tokens
        self.num_in_flight = num_in_flight
        self.computed = self._seen = 0

    def update_computed(self) -> None:
        """Note the complete steps, before a step; at most the last one before it is in flight."""
        self.computed = max(self.computed, self._seen)
        self._seen = self.request.num_computed_tokens

    @property
    def has_token(self) -> bool:
        return self.request.num_output_tokens > self.num_output_tokens

    @property
    def has_progressed(self) -> bool:
        return self.has_token or self.computed >= self.num_in_flight


class CrashIsolation(SchedulerFeature):
    """Holds all requests back while a suspect runs alone.

    crashes_until_isolated: crashes in a row that make a request a suspect. report_begun: None if no
    front end counts crashes.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_ISOLATION

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        pause: Pause,
        preemption: Preemption,
        crashes_until_isolated: int,
        report_begun: ReportBegun | None,
        encoder_inputs: EncoderInputs | None,
    ) -> None:
        self._encoder_inputs = encoder_inputs
        self._running = lifecycle.running
        self._waiting = lifecycle.waiting
        self._pause = pause
        self._preemption = preemption
        self._unblock = lifecycle.unblock
        self._crashes_until_isolated = crashes_until_isolated
        self._records: dict[int, _Record] = {}
        self._suspects: dict[int, Request] = {}
        self._blocked: dict[int, Request] = {}
        self._report = report_begun

    @property
    def is_catching_up(self) -> bool:
        """Whether requests that a crash has interrupted are not yet where they were."""
        return any(not record.has_progressed for record in self._records.values())

    def on_request_added(self, request: Request) -> None:
        """Note whether a request was being computed when an engine crashed."""
        if request.crash_count:
            self._records[request.seq_id] = _Record(request, sys.maxsize, of_engine=True)
            self._suspect_if_repeated(request)

    def note_crash(self) -> list[Request]:
        """Count a crash of the workers for requests that they computed, or encoded an image of.

        Returns those that have to be ended.
        """
        crashing = []
        for request, num_in_flight in self._in_flight():
            record = self._records.get(request.seq_id)
            if record is None:
                record = _Record(request, num_in_flight, of_engine=False)
                self._records[request.seq_id] = record
            elif record.has_progressed:
                request.crash_count = 0
            request.crash_count += 1
            record.note_crash(num_in_flight)
            self._suspect_if_repeated(request)
            if is_repeated_crash(request.crash_count, self._crashes_until_isolated):
                crashing.append(request)
        return crashing

    def isolate_suspect(self) -> None:
        """Report the suspect that runs alone next, and park all other requests.

        Does nothing without suspects. The report comes first, so that a crash before other features
        are asked is counted for this suspect, too.
        """
        if self._blocked and not self.has_pending_trials:
            self._unblock_all()
        if not self._suspects or not self._waiting.num_ready:
            return
        ready = [request for request in self._waiting if not request.status.is_blocked]
        tried = next(filter(self._may_be_tried, self._running or ready), None)
        if tried is None:
            return
        for request in ready:
            if request.request_id != tried.request_id:
                self._block_request(request)
                self._waiting.park_request(request)
        self._report_begun(tried)

    def progress(self) -> list[tuple[Request, int]]:
        """Return running requests that may have crashed an engine, and their computed tokens."""
        if not self._records:
            return []
        return [
            (record.request, record.computed)
            for record in self._records.values()
            if record.of_engine and record.request.status is RequestStatus.RUNNING
        ]

    def begin_admission(self, plan: StepPlan) -> None:
        if not self._records:
            return
        for record in list(self._records.values()):
            record.update_computed()
            request = record.request
            if record.has_progressed and request.seq_id in self._suspects:
                request.crash_count = 0
                self._clear_suspect(request)
            if record.has_token and not request.sampling_params.beam_width:
                request.crash_count = 0
                del self._records[request.seq_id]
        if self.has_pending_trials:
            if not all(map(self._is_suspected, self._running)):
                self._preemption.preempt_running(plan)
            if self._encoder_inputs is not None:
                self._stop_encoding(self._encoder_inputs)

    def is_blocked(self, candidate: Candidate) -> bool:
        if not self._records:
            return False
        request = candidate.request
        if self._pause.blocks(request):
            return False  # the pause blocks it
        if self.has_pending_trials and not (
            self._is_suspected(request) and self._is_alone(request)
        ):
            self._block_request(request)
            return True
        self._report_begun(request)
        return False

    def on_released(self, request: Request) -> None:
        self._blocked.pop(request.seq_id, None)
        self._records.pop(request.seq_id, None)
        if self._suspects:
            self._clear_suspect(request)

    def _in_flight(self) -> list[tuple[Request, int]]:
        """Return requests that workers compute or encode, and up to which token."""
        found = {request: request.num_computed_tokens for request in self._running}
        if self._encoder_inputs is not None:
            for request, end in self._encoder_inputs.in_flight():
                found[request] = max(found.get(request, 0), end)
        return list(found.items())

    def _stop_encoding(self, encoder_inputs: EncoderInputs) -> None:
        """Encode nothing for requests that are no suspects."""
        for request in self._waiting:
            if request.mm_features and not self._is_suspected(request):
                encoder_inputs.release_all(request)
                if request.status is RequestStatus.WAITING_FOR_ENCODER:
                    self._block_request(request)

    def _block_request(self, request: Request) -> None:
        request.status = self.status
        self._blocked[request.seq_id] = request

    @property
    def has_pending_trials(self) -> bool:
        """Whether a suspect may begin; until it has, no other request does."""
        return any(not self._pause.blocks(suspect) for suspect in self._suspects.values())

    def _may_be_tried(self, request: Request) -> bool:
        return self._is_suspected(request) and not self._pause.blocks(request)

    def _report_begun(self, request: Request) -> None:
        """Report a request once, although it may wait for room for many steps."""
        record = self._records.get(request.seq_id)
        if record is None:
            return
        alone = request.seq_id in self._suspects
        if (alone and not record.reported_alone) or (
            record.of_engine and not record.reported_begun
        ):
            if self._report is not None:
                self._report(request, alone)
            record.reported_begun = True
            record.reported_alone = alone

    def _suspect_if_repeated(self, request: Request) -> None:
        if request.crash_count >= self._crashes_until_isolated:
            self._suspects[request.seq_id] = request

    def _is_suspected(self, request: Request) -> bool:
        """Return whether any choice of the same request is a suspect."""
        suspects = self._suspects
        return request.seq_id in suspects or any(
            suspect.request_id == request.request_id for suspect in suspects.values()
        )

    def _is_alone(self, request: Request) -> bool:
        return all(other.request_id == request.request_id for other in self._running)

    def _clear_suspect(self, request: Request) -> None:
        """Remove a suspect and unblock all requests that it blocked."""
        self._suspects.pop(request.seq_id, None)
        self._unblock_all()

    def _unblock_all(self) -> None:
        blocked, self._blocked = self._blocked, {}
        for request in blocked.values():
            self._unblock(request)


def is_repeated_crash(crash_count: int, crashes_until_isolated: int) -> bool:
    """Return whether a request has crashed all its trials, in which it ran alone."""
    return crash_count >= crashes_until_isolated + TRIALS


def repeated_crash_error(crash_count: int) -> ErrorInfo:
    """Return the error for the client of a request that is not tried again."""
    return ErrorInfo(
        "internal",
        f"the server crashed {crash_count} times while it computed this request, at last with "
        "no other request running; it is not tried again",
    )
