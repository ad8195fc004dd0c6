"""Follow a trace line by line and check that the scheduler makes the same decisions.

The lines are the clock: arrivals, steps, results and aborts happen in their order. So nothing
depends on durations, and a difference is one of the scheduler, or of events that a trace does not
contain: grammars, sessions and beam searches wait for more than capacity.
"""

from collections import deque

import msgspec

from engine_core.trace.recorder import TraceRecorder
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.sched_trace import (
    Arrival,
    Decision,
    Dropped,
    Event,
    Finish,
    PinEnd,
    Result,
    Step,
    TraceLine,
    TurnEnd,
)
from proto.messages.scheduler_output import SchedulerOutput
from tests.benchmarks.simulator.messages import Verdict
from tests.benchmarks.simulator.recording import Recording
from tests.benchmarks.simulator.rig import CUT_SHORT, EPOCH, RecordedDrafts, Rig

_SHOWN = 120
"""Characters of a decision in a message."""


class Follower:
    """Follows one recording, up to the first difference."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._now = 0.0
        self._decision = Decision()
        encoder = recording.header.encoder
        recorder = TraceRecorder(
            self._note,
            started_at=0.0,
            num_seats=0,
            clock=lambda: self._now,
            image_token_id=-1 if encoder is None else encoder.vision.image_token_id,
        )
        self._drafts = _drafts_of(recording)
        self._rig = Rig(
            recording.header, recorder, lambda: self._now, aborts=True, drafts=self._drafts
        )
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._num_steps = self._num_admitted = self._num_preempted = 0
        self._epoch = EPOCH

    def run(self) -> Verdict:
        difference = ""
        for line in self._recording.lines:
            self._now = line.time_us / 1e6
            difference = self._follow(line)
            if difference:
                break
        return Verdict(
            num_steps=self._num_steps,
            num_admitted=self._num_admitted,
            num_preempted=self._num_preempted,
            difference=difference,
        )

    def _note(self, line: msgspec.Struct) -> None:
        if isinstance(line, Step):
            self._decision = line.decision

    def _follow(self, line: TraceLine) -> str:
        """Apply a line; return the difference, "" for none."""
        scheduler = self._rig.scheduler
        match line:
            case Arrival():
                sequence = self._recording.sequences[line.seq_id]
                tokens = self._recording.tokens(sequence)
                self._rig.add(sequence, tokens, line.arrived_us / 1e6)
            case Step():
                return self._step(line)
            case Result():
                return self._result(line)
            case Finish() if line.reason in CUT_SHORT:
                arrival = self._recording.sequences[line.seq_id].arrival
                scheduler.abort_request(arrival.request_id, arrival.choice)
            case TurnEnd():
                scheduler.report_tool(line.request_id, line.job, line.tool)
            case PinEnd() if line.reason == "expired":
                scheduler.agent_sessions.release_expired()  # perhaps outside a step
            case Event():
                self._event(line)
            case Dropped():
                return f"{line.num_lines} lines are missing"
        return ""

    def _step(self, line: Step) -> str:
        scheduler = self._rig.scheduler
        scheduler.crash_isolation.isolate_suspect()
        self._drafts.begin(line.step)
        output = scheduler.schedule()
        result = self._rig.worker.answer(output, self._drafts.accepted)
        self._in_flight.append((output, result))
        if self._decision != line.decision:
            return _difference(line, self._decision)
        self._num_steps += 1
        self._num_admitted += len(line.decision.hits)
        self._num_preempted += len(line.decision.preempted)
        return ""

    def _result(self, line: Result) -> str:
        """Process a result; earlier steps without tokens have no result."""
        while self._in_flight:
            output, result = self._in_flight.popleft()
            if output.step == line.step:
                result = msgspec.structs.replace(
                    result,
                    compute_seconds=line.compute_seconds,
                    encoder_seconds=line.encoder_seconds,
                )
                self._rig.scheduler.update_from_output(output, result)
                return ""
        return f"step {line.step}: a result for a step that was not sent"

    def _event(self, line: Event) -> None:
        scheduler = self._rig.scheduler
        match line.what:
            case "restart":
                self._in_flight.clear()
                self._epoch += 1
                scheduler.begin_worker_epoch(self._epoch)
            case "pause":
                scheduler.pause("freeze" if line.detail == "freeze" else "finish_running")
            case "resume":
                scheduler.resume()
            case "encoder reset":
                scheduler.reset_encoder_cache()
            case "reset":
                scheduler.reset_prefix_cache(preempting=bool(line.detail))


def _drafts_of(recording: Recording) -> RecordedDrafts:
    steps = {line.step: line.decision for line in recording.lines if isinstance(line, Step)}
    results = [line for line in recording.lines if isinstance(line, Result) and line.accepted]
    accepted = {
        line.step: dict(zip(steps[line.step].drafted, line.accepted, strict=True))
        for line in results
    }
    computes_ahead = bool(recording.header.scheduler.async_scheduling)
    return RecordedDrafts(steps, accepted, computes_ahead=computes_ahead)


def _difference(line: Step, ours: Decision) -> str:
    """Return the first field in which the steps differ."""
    for name in Decision.__struct_fields__:
        theirs, mine = getattr(line.decision, name), getattr(ours, name)
        if theirs != mine:
            return (
                f"step {line.step}: {name} is {str(mine)[:_SHOWN]}, and was {str(theirs)[:_SHOWN]}"
            )
    raise AssertionError("they are the same")
