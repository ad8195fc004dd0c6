"""Hang detection: decides from answers and a clock which processes hang.

Records since when each process owes an answer. The watchdog sends the pings and kills processes.

    engine, front end,   are pinged at intervals, and answer from their main loops
    standby process
    worker               answers the engine; the engine reports which workers owe an answer

So a worker is judged only by the report of an engine that responds, and an engine is not blamed for
a worker that it waits for. An idle process answers, or owes nothing. Of several workers, those that
reported to wait for other ranks are not blamed, unless all of them wait.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from proto.messages.lifecycle import EngineAlive, NotReady, Role, process_name
from proto.settings.config import ReliabilityConfig

FIRST_STEPS: Final = 8
"""First steps of new workers or of a new engine, which may take longer."""
FIRST_STEPS_FACTOR: Final = 3.0
"""Multiple of the step timeout that first steps may take, since they compile kernels and touch
memory for the first time. It is finite, so that a request that hangs every engine is detected."""
_PINGS_PER_LIMIT: Final = 8.0
_MAX_INTERVAL: Final = 5.0
_MIN_INTERVAL: Final = 0.05
_MAX_COUNTED_INTERVALS: Final = 2.0
"""Maximum that the time between two checks counts, as a multiple of the interval of checks. A
longer time means that the machine was suspended, or that all processes were stopped."""

Process = tuple[Role, int]
"""Role and index of a process."""


@dataclass(frozen=True, slots=True)
class HangLimits:
    """Limits in seconds without progress: during the start, in the first steps, and later."""

    start: float
    first_steps: float
    step: float

    @classmethod
    def of(cls, config: ReliabilityConfig) -> "HangLimits":
        step = config.step_timeout or math.inf
        return cls(config.start_timeout or math.inf, step * FIRST_STEPS_FACTOR, step)

    @property
    def interval(self) -> float:
        """Seconds between an answer and the next ping."""
        interval = min(self.start, self.step) / _PINGS_PER_LIMIT
        return max(_MIN_INTERVAL, min(_MAX_INTERVAL, interval))


@dataclass(frozen=True, slots=True)
class Hang:
    """A process that hangs.

    missing: the missing sign of life, in words. seconds: without it. since: monotonic seconds.
    flag: the setting that limits the wait.
    """

    process: Process
    missing: str
    seconds: float
    since: float
    flag: str


@dataclass(slots=True)
class _ProcessState:
    """State of one process. Times are those of the detector's clock; infinite means never.

    next_ping: time of the next ping; infinite while an answer is due, and for workers.
    owes_since: time since which it owes an answer, to a ping or, for a worker, to the engine.
    started: whether it has answered, reported readiness, or completed steps.
    ignored: whether it is about to be killed.
    awaits_ranks: whether it has reported to wait for other ranks since the last complete step.
    """

    next_ping: float
    owes_since: float = math.inf
    started: bool = False
    ignored: bool = False
    awaits_ranks: bool = False


class HangDetector:
    """Watches all front ends, all standby processes, or an engine and its workers.

    Its clock advances only while it is called, which must happen at least once per interval.

    engine: its index; None for the others, which are all pinged. first_worker: index of its worker
        of rank 0.
    """

    def __init__(
        self,
        limits: HangLimits,
        clock: Callable[[], float] = time.monotonic,
        engine: int | None = 0,
        first_worker: int = 0,
    ) -> None:
        self._limits = limits
        self._engine = engine
        self._first_worker = first_worker
        self._clock = clock
        self._last_reading = clock()
        self._now = 0.0
        self._states: dict[Process, _ProcessState] = {}
        self._report = EngineAlive(worker_epoch=0)
        self._reported_at = 0.0
        self._engine_owes_since = math.inf

    def watch(self, process: Process, *, is_prepared: bool = False) -> None:
        """Watch a process. is_prepared: it was a standby process, so its start is short."""
        next_ping = math.inf if self._is_judged_by_engine(process) else self._read_clock()
        self._states[process] = _ProcessState(next_ping, started=is_prepared)

    def unwatch(self, process: Process) -> None:
        role, _ = process
        del self._states[process]
        if role == "engine_core":
            self._engine_owes_since = math.inf

    def ignore(self, process: Process) -> None:
        """Stop judging a process that is about to be killed."""
        self._states[process].ignored = True

    def note_message(self, process: Process) -> None:
        """Note any message of a process as a sign of life."""
        state = self._states[process]
        if state.owes_since != math.inf:
            state.owes_since = self._read_clock()

    def note_ready(self, process: Process) -> None:
        self._states[process].started = True
        self.note_message(process)

    def note_answer(self, process: Process) -> None:
        state = self._states[process]
        state.started = True
        state.owes_since = math.inf
        if not self._is_judged_by_engine(process):  # it may have been a standby process
            state.next_ping = self._read_clock() + self._limits.interval

    def note_awaits_ranks(self, process: Process) -> None:
        """Note that a worker waits for other ranks in the middle of a step."""
        self._states[process].awaits_ranks = True

    def note_engine_report(self, report: EngineAlive, worker_epoch: int) -> None:
        """Note what the engine reports about itself and its workers in its answer to a ping.

        worker_epoch: that of the current workers.
        """
        if report.worker_epoch != worker_epoch:
            # the engine does not know the new workers yet: they owe nothing
            report = EngineAlive(worker_epoch)
        now, progressed = self._read_clock(), _progress(report) != _progress(self._report)
        self._report, self._reported_at = report, now
        for (role, index), state in self._states.items():
            if role == "worker":
                state.started |= report.ready
                state.awaits_ranks &= not progressed
                owes = index - self._first_worker in report.awaits
                state.owes_since = _owes_since(state.owes_since, owes, progressed, now)
        owes = report.has_work and not report.awaits
        self._engine_owes_since = _owes_since(self._engine_owes_since, owes, progressed, now)

    def pop_due_pings(self) -> list[Process]:
        """Return the processes to ping now; from now on they owe an answer."""
        now = self._read_clock()
        due = [process for process, state in self._states.items() if state.next_ping <= now]
        for process in due:
            self._states[process].next_ping = math.inf
            self._states[process].owes_since = now
        return due

    def find_hangs(self) -> list[Hang]:
        """Return the processes without progress for longer than their limit."""
        return list(self._without_progress(1.0))

    def not_ready(self) -> list[NotReady]:
        """Return the processes without progress for half of their limit, except front ends."""
        return [
            NotReady(f"{process_name(*hang.process)}: {hang.missing}", hang.since, self._engine)
            for hang in self._without_progress(0.5)
            if hang.process[0] != "api_server"
        ]

    def _without_progress(self, share: float) -> Iterator[Hang]:
        """Yield the processes without progress for this share of their limit."""
        now = self._read_clock()
        for process, state in self._states.items():
            flag = "--step-timeout" if state.started else "--start-timeout"
            for missing, since, until, limit in self._owed(process, state, now):
                if until - since > share * limit and not state.ignored:
                    monotonic = round(self._last_reading - now + since, 1)
                    yield Hang(process, missing, until - since, monotonic, flag)
                    break

    def _is_judged_by_engine(self, process: Process) -> bool:
        return process[0] == "worker" and self._engine is not None

    def _owed(
        self, process: Process, state: _ProcessState, now: float
    ) -> Iterator[tuple[str, float, float, float]]:
        """Yield the signs of life that a process has yet to give.

        Each is (name, start of the wait, last time at which it was seen to be still missing, limit
        of the wait in seconds).
        """
        start, step = self._limits.start, self._limits.step
        if self._is_judged_by_engine(process):
            if not state.awaits_ranks or self._all_await_ranks:
                limit = self._step_timeout if state.started else start
                yield "no completed step", state.owes_since, self._reported_at, limit
            return
        yield "no sign of life", state.owes_since, now, step if state.started else start
        if process[0] == "engine_core":
            yield "work but no step", self._engine_owes_since, self._reported_at, self._step_timeout

    @property
    def _all_await_ranks(self) -> bool:
        """Whether all workers that owe an answer wait for other ranks."""
        return all(
            state.awaits_ranks
            for (role, _), state in self._states.items()
            if role == "worker" and state.owes_since != math.inf
        )

    @property
    def _step_timeout(self) -> float:
        if self._report.ready and self._report.num_steps >= FIRST_STEPS:
            return self._limits.step
        return self._limits.first_steps

    def _read_clock(self) -> float:
        """Return the time of the detector's own clock, which omits suspensions."""
        now = self._clock()
        longest = _MAX_COUNTED_INTERVALS * self._limits.interval
        self._now += min(now - self._last_reading, longest)
        self._last_reading = now
        return self._now


def _progress(report: EngineAlive) -> tuple[int, int, int, bool]:
    return report.worker_epoch, report.num_steps, report.num_reports, report.ready


def _owes_since(before: float, owes: bool, progressed: bool, now: float) -> float:
    """Return since when an answer is owed; progress starts the time again."""
    if not owes:
        return math.inf
    return now if progressed or before == math.inf else before
