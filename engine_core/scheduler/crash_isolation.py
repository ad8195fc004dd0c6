"""Requests that processes may have died of are computed alone.

A crash does not say which request caused it. One that was being computed in several
crashes in a row, and did not get further in between, is a *suspect*:

    crash, crash, crash ─▶ suspect ─▶ its trial: nothing runs beside it ─┬▶ further: no suspect
                                                                         └▶ two more crashes: ended

It got further when it has a token more, or when steps are complete that computed all that was
under way when the processes died:

    prompt    |------- computed -------|--- under way ---|----------|
    crash                                  guilty here
    later     |------------ computed -----------------------|            it is not guilty of that

What is guilty wherever it is computed never does, however its prompt is cut into chunks; a
long prompt, or a beam search, that happens to run when processes are killed, mostly does.

The choices of a request are tried together, since the rows of a beam search need each other.
As long as a suspect may begin (a pause may forbid it) no other request is computed: one that has
made progress waits too, until every suspect has had its trial. `isolate_suspect` chooses which
one runs before the step is decided and parks all others, so that `schedule` does not even look at
them:

    take messages in ─▶ isolate_suspect: reports "alone" ─▶ schedule() ─▶ send ─▶ …
                                                    └── a death anywhere from here counts ──▶

Owns the suspects and those who wait for the end of a trial. The counts are in the
requests; where the engine itself died they come from the front ends. So these are told whom
this engine begins with, before it looks at what room there is for it, and then how far the
computation is (`RequestProgress`): what it dies of in its own books is known as well. An
engine that dies of an exception gets its words out first; one that is killed in the microseconds
before they are out costs one trial more.
"""

import sys
from typing import ClassVar, Final, Protocol

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.admission import Pause
from engine_core.scheduler.hooks import Candidate, Unblock
from engine_core.scheduler.preemption import Preemption
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.step_plan import StepPlan
from proto.engine_io import EngineCoreOutput, FinishReason
from proto.errors import ErrorInfo

TRIALS: Final = 2
"""Crashes of a request that was computed alone, until it is ended."""


class CrashProgressSink(Protocol):
    """Tells front ends, at once, what they count deaths of an engine by."""

    def begins(self, request: Request, *, alone: bool) -> None:
        """A request is to be computed from now on. alone: with nothing beside it."""
        ...


class _NoHerald:
    """Nobody is told."""

    def begins(self, request: Request, *, alone: bool) -> None: ...


class _Record:
    """Of a request that was being computed in a crash.

    num_output_tokens, under_way: of the last crash: the tokens it had, and the position that
    steps in flight would have reached.
    computed: position that complete steps have reached since.
    of_engine: an engine died, and a front end counts.
    told_begun, told_alone: what its front end has heard of it.
    """

    __slots__ = (
        "_seen",
        "computed",
        "num_output_tokens",
        "of_engine",
        "request",
        "told_alone",
        "told_begun",
        "under_way",
    )

    def __init__(self, request: Request, under_way: int, *, of_engine: bool) -> None:
        self.request = request
        self.of_engine = of_engine
        self.told_begun = self.told_alone = False
        self.note_crash(under_way)

    def note_crash(self, under_way: int) -> None:
        self.num_output_tokens = self.request.num_output_tokens
        self.under_way = under_way
        self.computed = self._seen = 0

    def look(self) -> None:
        """Before a step: of those before it at most one is in flight, the last."""
        self.computed = max(self.computed, self._seen)
        self._seen = self.request.num_computed_tokens

    @property
    def has_token(self) -> bool:
        return self.request.num_output_tokens > self.num_output_tokens

    @property
    def got_further(self) -> bool:
        return self.has_token or self.computed >= self.under_way


class CrashIsolation:
    """A gate that is open as long as there are no suspects.

    running: read only. waiting: all but the suspect that is tried are parked in it.
    pause: tells which suspects may not begin. preemption: makes room for a trial.
    crashes_until_isolated: crashes in a row that make a suspect.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_ISOLATION

    def __init__(
        self,
        running: list[Request],
        waiting: RequestQueue,
        pause: Pause,
        preemption: Preemption,
        crashes_until_isolated: int,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._pause = pause
        self._preemption = preemption
        self._crashes_until_isolated = crashes_until_isolated
        self._records: dict[int, _Record] = {}
        self._suspects: dict[int, Request] = {}
        self._held: dict[int, Request] = {}
        self._herald: CrashProgressSink = _NoHerald()

    def enter(self, request: Request) -> None:
        """A request is added; it may bring crashes of an engine along."""
        if request.crash_count:
            self._records[request.seq_id] = _Record(request, sys.maxsize, of_engine=True)
            self._suspect(request)

    def note_crash(self) -> list[Request]:
        """The workers died over what runs now; returns those of it that are to be ended."""
        poisonous = []
        for request in self._running:
            under_way = request.num_computed_tokens
            record = self._records.get(request.seq_id)
            if record is None:
                record = _Record(request, under_way, of_engine=False)
                self._records[request.seq_id] = record
            elif record.got_further:
                request.crash_count = 0
            request.crash_count += 1
            record.note_crash(under_way)
            self._suspect(request)
            if is_repeated_crash(request.crash_count, self._crashes_until_isolated):
                poisonous.append(request)
        return poisonous

    def tell(self, herald: CrashProgressSink) -> None:
        """Who is begun with is told to this one from now on."""
        self._herald = herald

    def isolate_suspect(self) -> None:
        """Choose who is tried next, or go on with who is; nothing happens without suspects.

        The one is told at once, the others are set aside: what the engine dies of before a gate
        is asked is known to be the fault of what is tried, too.
        """
        if self._held and not self._trials_due:
            self._let_go()
        if not self._suspects or not self._waiting.num_ready:
            return
        ready = [each for each in self._waiting if not each.status.is_blocked]
        tried = next(filter(self._may_be_tried, self._running or ready), None)
        if tried is None:
            return
        for each in ready:
            if each.request_id != tried.request_id:
                self._hold(each)
                self._waiting.park(each)
        self._say_begun(tried)

    def progress(self) -> list[tuple[Request, int]]:
        """What runs and brought crashes of an engine along, and what of it is computed."""
        if not self._records:
            return []
        return [
            (record.request, record.computed)
            for record in self._records.values()
            if record.of_engine and record.request.status is RequestStatus.RUNNING
        ]

    def attach(self, unblock: Unblock) -> None:
        self._unblock = unblock

    def begin_admission(self, plan: StepPlan) -> None:
        if not self._records:
            return
        for record in list(self._records.values()):
            record.look()
            request = record.request
            if record.got_further and request.seq_id in self._suspects:
                request.crash_count = 0
                self._clear(request)
            if record.has_token and not request.sampling_params.beam_width:
                request.crash_count = 0
                del self._records[request.seq_id]
        if self._trials_due and not all(map(self._is_suspected, self._running)):
            self._preemption.preempt_running(plan)

    def is_blocked(self, candidate: Candidate) -> bool:
        if not self._records:
            return False
        request = candidate.request
        if self._pause.stops(request):
            return False  # whatever stops it holds it
        if self._trials_due and not (self._is_suspected(request) and self._is_alone(request)):
            self._hold(request)
            return True
        self._say_begun(request)
        return False

    def on_admitted(self, request: Request, num_new_tokens: int) -> None: ...

    def on_released(self, request: Request) -> None:
        self._held.pop(request.seq_id, None)
        self._records.pop(request.seq_id, None)
        if self._suspects:
            self._clear(request)

    def _hold(self, request: Request) -> None:
        request.status = self.status
        self._held[request.seq_id] = request

    @property
    def _trials_due(self) -> bool:
        """There is a suspect that may begin: until it has, nobody else does."""
        return any(not self._pause.stops(each) for each in self._suspects.values())

    def _may_be_tried(self, request: Request) -> bool:
        return self._is_suspected(request) and not self._pause.stops(request)

    def _say_begun(self, request: Request) -> None:
        """Once: the same request may be looked at in many steps before there is room for it."""
        record = self._records.get(request.seq_id)
        if record is None:
            return
        alone = request.seq_id in self._suspects
        if (alone and not record.told_alone) or (record.of_engine and not record.told_begun):
            self._herald.begins(request, alone=alone)
            record.told_begun = True
            record.told_alone = alone

    def _suspect(self, request: Request) -> None:
        if request.crash_count >= self._crashes_until_isolated:
            self._suspects[request.seq_id] = request

    def _is_suspected(self, request: Request) -> bool:
        """Some choice of its request is."""
        suspects = self._suspects
        return request.seq_id in suspects or any(
            each.request_id == request.request_id for each in suspects.values()
        )

    def _is_alone(self, request: Request) -> bool:
        return all(each.request_id == request.request_id for each in self._running)

    def _clear(self, request: Request) -> None:
        """Nobody suspects it any more, or it is over: those who are held may ask again."""
        self._suspects.pop(request.seq_id, None)
        self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, {}
        for each in held.values():
            self._unblock(each)


def is_repeated_crash(crash_count: int, crashes_until_isolated: int) -> bool:
    """It had its trials, and nobody but it was there when the last processes died."""
    return crash_count >= crashes_until_isolated + TRIALS


def repeated_crash_error(crash_count: int) -> ErrorInfo:
    """What a client is told whose request is not tried again."""
    return ErrorInfo(
        "internal",
        f"the server crashed {crash_count} times while it computed this request, at last with "
        "nothing else under way; it is not tried again",
    )


def repeated_crash_output(request: Request) -> EngineCoreOutput:
    """The final output of such a request; the tokens it had before are sent already."""
    return EngineCoreOutput(
        request.request_id,
        request.choice,
        request.num_output_tokens,
        [],
        FinishReason.ERROR,
        error=repeated_crash_error(request.crash_count),
    )
