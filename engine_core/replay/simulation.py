"""Arrivals through the real scheduler, on a clock that only this moves.

    time ──▶   arrivals that are due ▸ the oldest step, if it is over ▸ one more step, if there is
               room in flight ▸ nothing of these: on to the next arrival or the end of the step

The loop is the engine's own (`stepper.py`); steps take as long as a model of them says. Nothing
is drawn and nothing is timed, so the same orders give the same figures.
"""

import heapq
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.queues.base import RequestQueue
from engine_core.replay.offers import Offers
from engine_core.replay.recording import Recording, Sequence
from engine_core.replay.rig import Rig
from engine_core.replay.taping import Both, FileTape
from engine_core.replay.tier import NO_TIER, Tier
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.pin_order import Pin
from engine_core.scheduler.step_plan import StepPlan
from engine_core.stepper import OVERLAPPED, SYNCHRONOUS
from engine_core.trace.tracing import NO_TRACING, Tracing
from proto.model_runner_output import ModelRunnerOutput
from proto.replay import StepModel
from proto.sched_trace import TraceHeader
from proto.scheduler_output import SchedulerOutput


@dataclass(slots=True)
class Course:
    """Seconds of one sequence; first and end are None before they happen.

    num_found: tokens of its prompt that were there when it was first admitted.
    """

    sequence: Sequence
    arrived: float
    first: float | None = None
    end: float | None = None
    num_found: int = 0


@dataclass
class Outcome:
    """courses: by handle. pins: taken, hit, expired, given up. seconds: of the virtual clock."""

    courses: dict[int, Course] = field(default_factory=dict)
    num_steps: int = 0
    num_preemptions: int = 0
    num_queried: int = 0
    num_hit: int = 0
    pins: tuple[int, int, int, int] = (0, 0, 0, 0)
    seconds: float = 0.0


class Simulation:
    """One run. header: settings. offers: of sequences of this recording that have an end.

    tape_path: file for its own trace; "" for none. tier: behind the pool.
    """

    def __init__(
        self,
        recording: Recording,
        header: TraceHeader,
        offers: Offers,
        step_model: StepModel,
        one_tenant: bool = False,
        tape_path: str = "",
        tier: Tier = NO_TIER,
    ) -> None:
        self._recording = recording
        self._offers = offers
        self._model = step_model
        self.now = 0.0
        self.outcome = Outcome()
        self._meter = _Meter(self)
        self._tape: Tracing = NO_TRACING
        if tape_path:
            sequences = recording.sequences
            self._tape = FileTape(
                tape_path, header, lambda handle: sequences[handle].arrival.job, lambda: self.now
            )
        self._rig = Rig(
            header,
            Both(self._tape.scheduler_observer, self._meter) if tape_path else self._meter,
            lambda: self.now,
            one_tenant=one_tenant,
            pool_observers=self._tape.pool_observers,
            tier=tier,
        )
        self._tier = tier
        self._max_in_flight = OVERLAPPED if header.scheduler.async_scheduling else SYNCHRONOUS
        self._in_flight: deque[tuple[float, SchedulerOutput, ModelRunnerOutput]] = deque()
        self._free_at = 0.0
        self._read: list[Sequence] = []
        self._leaving: list[tuple[float, int]] = []

    def run(self) -> Outcome:
        """Until everybody has had an answer."""
        while True:
            self._arrive()
            self._copied()
            taken = self._take()
            if self._send() or taken:
                continue
            due = [*self._next_arrival(), *self._next_end(), *self._next_exit()]
            due += self._tier.next_end()
            if not due:
                break
            self.now = max(self.now, min(due))
        self._tape.close()
        scheduler = self._rig.scheduler
        assert not scheduler.num_unfinished, "somebody waits for ever"
        outcome, stats = self.outcome, scheduler.take_stats()
        outcome.num_queried, outcome.num_hit = stats.prefix_cache_queries, stats.prefix_cache_hits
        outcome.pins = (
            stats.num_pins_taken,
            stats.num_pins_hit,
            stats.num_pins_expired,
            stats.num_pins_given_up,
        )
        outcome.seconds = self.now
        return outcome

    def ended(self, request: Request) -> None:
        """A sequence is over."""
        course = self.outcome.courses[request.handle]
        course.end, course.num_found = self.now, request.num_cached_tokens
        self._offers.ended(request.handle, self.now)
        if request.agent.job and request.status is not RequestStatus.FINISHED_ABORTED:
            self._read.append(course.sequence)

    def _arrive(self) -> None:
        scheduler = self._rig.scheduler
        while (sequence := self._offers.take(self.now)) is not None:
            arrival = sequence.arrival
            self.outcome.courses[arrival.handle] = Course(sequence, self.now)
            self._rig.add(sequence, self._recording.tokens(sequence), self.now)
            assert sequence.finish is not None
            if not sequence.finish.num_output_tokens:
                patience = (sequence.finish.time_us - arrival.time_us) / 1e6
                heapq.heappush(self._leaving, (self.now + patience, arrival.handle))
        while self._leaving and self._leaving[0][0] <= self.now:
            arrival = self.outcome.courses[heapq.heappop(self._leaving)[1]].sequence.arrival
            scheduler.abort(arrival.request_id, arrival.choice)

    def _copied(self) -> None:
        """Copies that are over: they are reported before the step that comes after them."""
        while (report := self._tier.take(self.now)) is not None:
            self._rig.scheduler.update_from_connector(report)

    def _take(self) -> bool:
        """The oldest step, if it is over."""
        if not self._in_flight or self._in_flight[0][0] > self.now:
            return False
        _, output, result = self._in_flight.popleft()
        self._rig.scheduler.update_from_output(output, result)
        self._turns_end()
        return True

    def _turns_end(self) -> None:
        """Front ends read the answers of turns that are over as soon as they have them."""
        for sequence in self._read:
            arrival = sequence.arrival
            self._rig.scheduler.end_turn(arrival.request_id, arrival.job, sequence.tool)
        self._read.clear()

    def _send(self) -> bool:
        """One more step; False if nothing was sent."""
        scheduler = self._rig.scheduler
        if not scheduler.has_work or len(self._in_flight) == self._max_in_flight:
            return False
        wanted = scheduler.external.wants_step
        scheduler.convene()
        output = scheduler.schedule()
        result = self._rig.worker.answer(output)
        may_begin = self._tier.begin(output.connector_metadata, self.now)
        if output.total_num_scheduled_tokens:
            self.outcome.num_steps += 1
            begin = max(may_begin, self._free_at)
            seconds = self._model.seconds(*self._meter.shape)
            self._free_at = begin + seconds
            result = msgspec.structs.replace(result, compute_seconds=seconds)
            self._in_flight.append((self._free_at, output, result))
            return True
        if wanted or output.connector_metadata:
            return True
        return bool(output.finished_handles or output.preempted_handles)

    def _next_arrival(self) -> list[float]:
        """Of none or one."""
        return [self._offers.next_time] if self._offers else []

    def _next_end(self) -> list[float]:
        return [self._in_flight[0][0]] if self._in_flight else []

    def _next_exit(self) -> list[float]:
        return [self._leaving[0][0]] if self._leaving else []


class _Meter:
    """What the simulation wants to know of its scheduler.

    shape: tokens, sequences and context of the last step.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.shape = (0, 0, 0)

    def watch(
        self, waiting: RequestQueue, running: Collection[Request], kv_cache: KVCacheManager
    ) -> None: ...

    def added(self, request: Request) -> None: ...

    def step_begins(self, plan: StepPlan) -> None: ...

    def step_decided(self, step: int, plan: StepPlan) -> None:
        num_tokens = sum(plan.continued_tokens) + sum(plan.admitted_tokens)
        rows = plan.continued + plan.admitted
        context = num_tokens + sum([each.num_computed_tokens for each in rows])
        self.shape = (num_tokens, len(rows), context)
        self._simulation.outcome.num_preemptions += len(plan.preempted)

    def found_elsewhere(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None: ...

    def step_done(self, result: ModelRunnerOutput) -> None:
        courses, now = self._simulation.outcome.courses, self._simulation.now
        for handle, tokens in zip(result.handles, result.sampled_token_ids, strict=True):
            if tokens:
                course = courses[handle]
                if course.first is None:
                    course.first = now

    def finished(self, request: Request) -> None:
        self._simulation.ended(request)

    def turn_ended(self, request_id: int, job: str, tool: str) -> None: ...

    def pinned(self, pin: Pin, ttl: float) -> None: ...

    def unpinned(self, pin: Pin, reason: str) -> None: ...

    def happened(self, what: str, detail: str) -> None: ...
