"""Simulation of arrivals through the real scheduler, on a virtual clock.

    time ──▶   due arrivals ▸ the oldest step, if finished ▸ one more step, if another may be in
               flight ▸ otherwise advance to the next arrival or the end of the step

The loop follows the engine's busy loop; step times come from a model. There is no randomness and no
real time, so equal orders give equal figures.
"""

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_core.busy_loop import OVERLAPPED, SYNCHRONOUS
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_connector.base import SchedulerConnector
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.retention.retained_prefixes import RetainedPrefix
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.step_plan import StepPlan
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.sched_trace import Result, Step, TraceHeader, TraceLine
from proto.messages.scheduler_output import SchedulerOutput
from tests.benchmarks.simulator.messages import ReplayFigures, Spread, StepModel
from tests.benchmarks.simulator.recording import Arrivals, RecordedRequest, Recording
from tests.benchmarks.simulator.rig import NO_TIER, Both, FileTape, Rig, Tier

# Step times, fitted to a trace.
#
# A step's time is from its decision, or from the previous result if that is later, to its result.
# Without overlap the engine takes some time between a result and the next decision; its median is
# part of every step.
#
#     overlapped     decide 1, 2     result 1 ├──── step 2 ────┤ result 2
#     otherwise      decide 1 ├──── step 1 ────┤ result 1 ├ engine ┤ decide 2


Matrix = NDArray[np.float64]

FEWEST = 8
"""Least number of steps for a fit."""
_TRIMMED = 0.98
"""Share of the steps that is used; the worst fitting ones are ignored."""


class TooFewStepsError(ValueError):
    """The trace has too few steps to fit a model."""


def fit(lines: Sequence[TraceLine], overlapped: bool) -> StepModel:
    """Fit the model by least squares without negative terms; raise TooFewStepsError."""
    shapes, times = _samples(lines)
    if len(times) < FEWEST:
        raise TooFewStepsError(f"{len(times)} steps are too few to know how long they take")
    features, measured = np.array(shapes, dtype=np.float64), np.array(times)
    weights = least_squares(features, measured)
    errors = np.abs(features @ weights - measured)
    kept = errors <= np.quantile(errors, _TRIMMED)
    weights = least_squares(features[kept], measured[kept])
    base, per_token, per_row, per_context = (float(each) / 1e3 for each in weights)
    return StepModel(
        base_ms=base + (0.0 if overlapped else _turnaround(lines) / 1e3),
        per_token_ms=per_token,
        per_row_ms=per_row,
        per_context_ms=per_context,
    )


def _samples(lines: Sequence[TraceLine]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return (1, tokens, sequences, context) and microseconds of each step with a result."""
    shapes: list[tuple[int, ...]] = []
    times: list[int] = []
    open_steps: dict[int, Step] = {}
    before = 0
    for line in lines:
        if isinstance(line, Step):
            open_steps[line.step] = line
        elif isinstance(line, Result):
            step = open_steps.pop(line.step, None)
            if step is not None:
                made = step.decision
                num_rows = len(made.new) + len(made.resumed) + len(made.running)
                shapes.append((1, made.num_tokens, num_rows, made.context_tokens))
                times.append(line.time_us - max(step.time_us, before))
            before = line.time_us
    return shapes, times


def _turnaround(lines: Sequence[TraceLine]) -> float:
    """Return median microseconds from a result to the next decision while requests run."""
    result: Result | None = None
    found: list[int] = []
    for line in lines:
        if isinstance(line, Result):
            result = line
        elif isinstance(line, Step):
            if result is not None and line.snapshot.running:
                found.append(line.time_us - result.time_us)
            result = None
    return float(np.median(found)) if found else 0.0


def least_squares(features: Matrix, measured: Matrix) -> Matrix:
    """Solve least squares; negative terms are removed, the most negative one first."""
    used = list(range(features.shape[1]))
    weights = np.zeros(features.shape[1])
    while used:
        scale = np.maximum(np.abs(features[:, used]).max(axis=0), 1.0)
        solved = np.linalg.lstsq(features[:, used] / scale, measured, rcond=None)[0]
        if (solved >= 0).all():
            weights[used] = solved / scale
            break
        del used[int(solved.argmin())]
    return weights


@dataclass(slots=True)
class Course:
    """Times of one sequence in seconds; first and end are None before they happen.

    num_found: cached prompt tokens at its first admission.
    """

    sequence: RecordedRequest
    arrived: float
    first: float | None = None
    end: float | None = None
    num_found: int = 0


@dataclass
class Outcome:
    """The result of a simulation.

    courses: by seq_id. pins: taken, hit, expired, released. seconds: of the virtual clock."""

    courses: dict[int, Course] = field(default_factory=dict)
    num_steps: int = 0
    num_preemptions: int = 0
    num_queried: int = 0
    num_hit: int = 0
    pins: tuple[int, int, int, int] = (0, 0, 0, 0)
    seconds: float = 0.0


class Simulation:
    """One simulation. header: settings. arrivals: of sequences of this recording with an end.

    tape_path: file for its own trace; "" for none. tier: behind the pool.
    """

    def __init__(
        self,
        recording: Recording,
        header: TraceHeader,
        arrivals: Arrivals,
        step_model: StepModel,
        one_tenant: bool = False,
        tape_path: str = "",
        tier: Tier = NO_TIER,
    ) -> None:
        self._recording = recording
        self._offers = arrivals
        self._model = step_model
        self.now = 0.0
        self.outcome = Outcome()
        self._meter = _Meter(self)
        self._tape: FileTape | None = None
        if tape_path:
            sequences = recording.sequences
            self._tape = FileTape(
                tape_path, header, lambda seq_id: sequences[seq_id].arrival.job, lambda: self.now
            )
        self._rig = Rig(
            header,
            self._meter if self._tape is None else Both(self._tape.recorder, self._meter),
            lambda: self.now,
            one_tenant=one_tenant,
            pool_observers=() if self._tape is None else (self._tape.recorder.block_counter,),
            tier=tier,
        )
        self._tier = tier
        self._max_in_flight = OVERLAPPED if header.scheduler.async_scheduling else SYNCHRONOUS
        self._in_flight: deque[tuple[float, SchedulerOutput, ModelRunnerOutput]] = deque()
        self._free_at = 0.0
        self._read: list[RecordedRequest] = []
        self._leaving: list[tuple[float, int]] = []

    def run(self) -> Outcome:
        """Run until all requests are finished."""
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
        if self._tape is not None:
            self._tape.close()
        scheduler = self._rig.scheduler
        assert not scheduler.num_unfinished, "a request never finishes"
        outcome, stats = self.outcome, scheduler.pop_stats()
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
        """Note the end of a sequence."""
        course = self.outcome.courses[request.seq_id]
        course.end, course.num_found = self.now, request.num_cached_tokens
        self._offers.ended(request.seq_id, self.now)
        if request.agent.session and request.status is not RequestStatus.FINISHED_ABORTED:
            self._read.append(course.sequence)

    def _arrive(self) -> None:
        scheduler = self._rig.scheduler
        while (sequence := self._offers.take(self.now)) is not None:
            arrival = sequence.arrival
            self.outcome.courses[arrival.seq_id] = Course(sequence, self.now)
            self._rig.add(sequence, self._recording.tokens(sequence), self.now)
            assert sequence.finish is not None
            if not sequence.finish.num_output_tokens:
                patience = (sequence.finish.time_us - arrival.time_us) / 1e6
                heapq.heappush(self._leaving, (self.now + patience, arrival.seq_id))
        while self._leaving and self._leaving[0][0] <= self.now:
            arrival = self.outcome.courses[heapq.heappop(self._leaving)[1]].sequence.arrival
            scheduler.abort_request(arrival.request_id, arrival.choice)

    def _copied(self) -> None:
        """Report finished copies before the next step."""
        while (report := self._tier.take(self.now)) is not None:
            self._rig.scheduler.update_from_connector(report)

    def _take(self) -> bool:
        """Process the oldest step, if finished."""
        if not self._in_flight or self._in_flight[0][0] > self.now:
            return False
        _, output, result = self._in_flight.popleft()
        self._rig.scheduler.update_from_output(output, result)
        self._turns_end()
        return True

    def _turns_end(self) -> None:
        """End finished turns; front ends read their answers immediately."""
        for sequence in self._read:
            arrival = sequence.arrival
            self._rig.scheduler.report_tool(arrival.request_id, arrival.job, sequence.tool)
        self._read.clear()

    def _send(self) -> bool:
        """Send one more step; return False if there was none."""
        scheduler = self._rig.scheduler
        if not scheduler.has_work or len(self._in_flight) == self._max_in_flight:
            return False
        wanted = scheduler.kv_transfer.wants_step
        scheduler.crash_isolation.isolate_suspect()
        output = scheduler.schedule()
        result = self._rig.worker.answer(output)
        may_begin = self._tier.begin(output.connector_metadata, self.now)
        if output.has_result:
            self.outcome.num_steps += 1
            begin = max(may_begin, self._free_at)
            seconds = self._model.seconds(*self._meter.shape)
            self._free_at = begin + seconds
            result = msgspec.structs.replace(result, compute_seconds=seconds)
            self._in_flight.append((self._free_at, output, result))
            return True
        if wanted or output.connector_metadata or output.free_encoder_mm_hashes:
            return True
        return bool(output.finished_seq_ids or output.preempted_seq_ids)

    def _next_arrival(self) -> list[float]:
        """Yield the next arrival time, if known."""
        return [self._offers.next_time] if self._offers else []

    def _next_end(self) -> list[float]:
        return [self._in_flight[0][0]] if self._in_flight else []

    def _next_exit(self) -> list[float]:
        return [self._leaving[0][0]] if self._leaving else []


class _Meter:
    """An observer of the simulation's scheduler.

    shape: tokens, sequences and context of the last step.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.shape = (0, 0, 0)

    def on_request_added(self, request: Request) -> None: ...

    def on_step_begin(
        self,
        plan: StepPlan,
        waiting: RequestQueue,
        running: Sequence[Request],
        kv_cache: KVCacheManager,
        connector: SchedulerConnector,
    ) -> None: ...

    def on_step_scheduled(self, step: int, plan: StepPlan) -> None:
        num_tokens = sum(plan.continued_tokens) + sum(plan.admitted_tokens)
        rows = plan.continued + plan.admitted
        context = num_tokens + sum([each.num_computed_tokens for each in rows])
        self.shape = (num_tokens, len(rows), context)
        self._simulation.outcome.num_preemptions += len(plan.preempted)

    def on_external_hit(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None: ...

    def on_step_result(self, result: ModelRunnerOutput) -> None:
        courses, now = self._simulation.outcome.courses, self._simulation.now
        for seq_id, tokens in zip(result.seq_ids, result.sampled_token_ids, strict=True):
            if tokens:
                course = courses[seq_id]
                if course.first is None:
                    course.first = now

    def on_request_finished(self, request: Request) -> None:
        self._simulation.ended(request)

    def on_turn_ended(self, request_id: int, job: str, tool: str) -> None: ...

    def on_prefix_retained(self, pin: RetainedPrefix, ttl: float) -> None: ...

    def on_prefix_released(self, pin: RetainedPrefix, reason: str) -> None: ...

    def on_event(self, what: str, detail: str) -> None: ...


# From the courses of a simulation to its figures.


def figures_of(
    outcome: Outcome, policy: str, num_left_out: int, step_model: StepModel
) -> ReplayFigures:
    """Return all figures of the table; a request without a job is a job of one turn."""
    pins_taken, pins_hit, pins_expired, pins_unpinned = outcome.pins
    courses = list(outcome.courses.values())
    jobs: dict[str, list[Course]] = defaultdict(list)
    others: dict[int, list[Course]] = defaultdict(list)
    for course in courses:
        arrival = course.sequence.arrival
        if arrival.job:
            jobs[arrival.job].append(course)
        else:
            others[arrival.request_id].append(course)
    agents, alone = _seconds(jobs.values()), _seconds(others.values())
    return ReplayFigures(
        policy=policy,
        num_requests=len(courses),
        num_left_out=num_left_out,
        num_jobs=len(jobs) + len(others),
        num_steps=outcome.num_steps,
        seconds=outcome.seconds,
        output_tokens=sum(each.sequence.num_outputs for each in courses),
        completion=spread(_end(each) - each.arrived for each in courses),
        jobs=spread(agents + alone),
        agents=spread(agents),
        others=spread(alone),
        ttft=spread(each.first - each.arrived for each in courses if each.first is not None),
        preemptions=outcome.num_preemptions,
        hit_rate=outcome.num_hit / outcome.num_queried if outcome.num_queried else 0.0,
        step_model=step_model,
        pins_taken=pins_taken,
        pins_hit=pins_hit,
        pins_expired=pins_expired,
        pins_unpinned=pins_unpinned,
        num_prompt_tokens=sum(each.sequence.arrival.num_prompt_tokens for each in courses),
        num_found_tokens=sum(each.num_found for each in courses),
        other_prompt_tokens=sum(
            each.sequence.arrival.num_prompt_tokens for found in others.values() for each in found
        ),
    )


def spread(values: Iterable[float]) -> Spread:
    """Return mean and percentiles (nearest rank); zeros without values."""
    ordered = sorted(values)
    if not ordered:
        return Spread()
    return Spread(
        math.fsum(ordered) / len(ordered), _percentile(ordered, 50), _percentile(ordered, 99)
    )


def _seconds(jobs: Iterable[list[Course]]) -> list[float]:
    """Return the seconds of each job from its first arrival to its last end."""
    return [max(map(_end, turns)) - min(each.arrived for each in turns) for turns in jobs]


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _end(course: Course) -> float:
    assert course.end is not None, "a simulation runs until all sequences have ended"
    return course.end


# The working set: KV of live jobs in a simulation.
#
# A job's KV is that of all its tokens so far, from its first arrival to its last token, whether or
# not the pool holds it; a shared prefix counts once.
#
#     job A     ├ turn ┤  tool  ├ turn ┤  tool  ├ turn ┤
#     blocks    ▁▁▂▂▂▂▂▂▂▂▂▂▂▂▂▃▃▃▄▄▄▄▄▄▄▄▄▄▄▄▄▄▅▅▅▆▆▆ then none


_WARM: float = 0.1
"""Share of the jobs that must have arrived before the measurement."""


def live_blocks(recording: Recording, courses: Collection[Course]) -> tuple[float, int]:
    """Return mean over time and peak, in full blocks; zeros without jobs."""
    changes = _changes(recording, courses)
    starts = sorted(_starts(courses))
    if not starts:
        return 0.0, 0
    begin, end = starts[int(_WARM * len(starts))], starts[-1]
    level, peak, area = 0, 0, 0.0
    for (time, change), (until, _) in pairwise([*changes, (end, 0)]):
        level += change
        spanned = min(until, end) - max(time, begin)
        if spanned > 0:
            area += level * spanned
            peak = max(peak, level)
    return (area / (end - begin) if end > begin else float(level)), peak


def _starts(courses: Collection[Course]) -> list[float]:
    first: dict[str, float] = {}
    for each in courses:
        job = each.sequence.arrival.job
        if job:
            first[job] = min(each.arrived, first.get(job, each.arrived))
    return list(first.values())


def _changes(recording: Recording, courses: Collection[Course]) -> list[tuple[float, int]]:
    """Return (time, change in blocks), by time."""
    jobs: dict[str, list[Course]] = defaultdict(list)
    for each in courses:
        if each.sequence.arrival.job:
            jobs[each.sequence.arrival.job].append(each)
    events: list[tuple[float, bool, list[int]]] = []
    for turns in jobs.values():
        held: dict[int, None] = {}
        for turn in sorted(turns, key=lambda each: each.arrived):
            asked = recording.chains.blocks(turn.sequence.arrival.blocks)
            said = recording.chains.blocks(turn.sequence.content)
            for time, blocks in ((turn.arrived, asked), (_end(turn), said)):
                events.append((time, True, [each for each in blocks if each not in held]))
                held.update(dict.fromkeys(blocks))
        events.append((max(map(_end, turns)), False, list(held)))
    events.sort(key=lambda each: each[0])
    users: Counter[int] = Counter()
    found = []
    for time, begins, blocks in events:
        if begins:
            found.append((time, sum(not users[each] for each in blocks)))
            users.update(blocks)
        else:
            users.subtract(blocks)
            found.append((time, -sum(not users[each] for each in blocks)))
    return found
