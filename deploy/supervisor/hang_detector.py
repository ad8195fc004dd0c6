"""Hang detection: decides from answers and a clock which processes hang.

Holds since when each process owes an answer. Sends no messages and kills no processes itself.

    engine, API server   are pinged at intervals, and answer from their main loops
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

from proto.config import ReliabilityConfig
from proto.lifecycle import EngineAlive, NotReady, Role, process_name

FIRST_STEPS: Final = 8
"""First steps of new workers or of a new engine, which may take longer."""
FIRST_STEPS_FACTOR: Final = 3.0
"""How much longer: kernels are compiled and memory is touched for the first time. The limit is
finite, so that a request that hangs every engine is still detected."""
_ASKED_PER_LIMIT: Final = 8.0
_LONGEST_INTERVAL: Final = 5.0
_SHORTEST_INTERVAL: Final = 0.05
_STRIDE: Final = 2.0
"""Intervals. A longer time between two checks is not counted: the machine was suspended, or all
processes were stopped."""

Process = tuple[Role, int]
"""Role and index."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds without progress: during the start, in the first steps, and later."""

    start: float
    first_steps: float
    step: float

    @classmethod
    def of(cls, config: ReliabilityConfig) -> "Limits":
        step = config.step_timeout or math.inf
        return cls(config.start_timeout or math.inf, step * FIRST_STEPS_FACTOR, step)

    @property
    def interval(self) -> float:
        """Seconds between an answer and the next ping."""
        aimed_at = min(self.start, self.step) / _ASKED_PER_LIMIT
        return max(_SHORTEST_INTERVAL, min(_LONGEST_INTERVAL, aimed_at))


@dataclass(frozen=True, slots=True)
class Hang:
    """A process that hangs. what: the missing sign of life. since: on the clock, `seconds` ago."""

    process: Process
    what: str
    seconds: float
    since: float


@dataclass(slots=True)
class _Life:
    """State of one process. Times are those of the detector; infinite means never.

    next_question: time of the next ping; infinite while an answer is due, and for workers.
    owes_since: time since which it owes an answer, to a ping or, for a worker, to the engine.
    started: whether it has answered, reported readiness, or completed steps.
    condemned: whether it is about to be killed.
    awaits_ranks: whether it has reported to wait for other ranks since the last complete step.
    """

    next_question: float
    owes_since: float = math.inf
    started: bool = False
    condemned: bool = False
    awaits_ranks: bool = False


class HangDetector:
    """Watches all API servers, or the engine and workers of one generation.

    Its clock advances only while it is called, which must happen at least once per interval.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._looked = clock()
        self._now = 0.0
        self._lives: dict[Process, _Life] = {}
        self._report = EngineAlive(worker_epoch=0)
        self._reported = 0.0
        self._engine_owes_since = math.inf

    @property
    def interval(self) -> float:
        """Maximum seconds until the next call."""
        return self._limits.interval

    def begin(self, process: Process) -> None:
        """Watch a new process."""
        role, _ = process
        self._lives[process] = _Life(math.inf if role == "worker" else self._look())

    def end(self, process: Process) -> None:
        """Stop watching a process that has ended."""
        role, _ = process
        del self._lives[process]
        if role == "engine_core":
            self._engine_owes_since = math.inf

    def condemn(self, process: Process) -> None:
        """Expect nothing more of a process that is about to be killed."""
        self._lives[process].condemned = True

    def note_sign(self, process: Process) -> None:
        """Take any message of a process as a sign of life."""
        life = self._lives[process]
        if life.owes_since != math.inf:
            life.owes_since = self._look()

    def note_ready(self, process: Process) -> None:
        """Note that a process has reported readiness."""
        self._lives[process].started = True
        self.note_sign(process)

    def note_answer(self, process: Process) -> None:
        """Note the answer to a ping."""
        life = self._lives[process]
        life.started = True
        life.owes_since = math.inf
        life.next_question = self._look() + self._limits.interval

    def note_awaits_ranks(self, process: Process) -> None:
        """Note that a worker waits for other ranks in the middle of a step."""
        self._lives[process].awaits_ranks = True

    def note_engine(self, report: EngineAlive, worker_epoch: int) -> None:
        """Note the answer of the engine to a ping. worker_epoch: of the present workers."""
        if report.worker_epoch != worker_epoch:
            report = EngineAlive(
                worker_epoch
            )  # the engine does not know the new workers yet: they owe nothing
        now, moved = self._look(), _progress(report) != _progress(self._report)
        self._report, self._reported = report, now
        for (role, index), life in self._lives.items():
            if role == "worker":
                life.started |= report.ready
                life.awaits_ranks &= not moved
                owes = index in report.awaits
                life.owes_since = _since(life.owes_since, owes, moved, now)
        owes = report.has_work and not report.awaits
        self._engine_owes_since = _since(self._engine_owes_since, owes, moved, now)

    def take_questions(self) -> list[Process]:
        """Return the processes to ping now; from now on they owe an answer."""
        now = self._look()
        due = [process for process, life in self._lives.items() if life.next_question <= now]
        for process in due:
            self._lives[process].next_question = math.inf
            self._lives[process].owes_since = now
        return due

    def hangs(self) -> list[Hang]:
        """Return the processes without progress for longer than their limit."""
        return list(self._standing(1.0))

    def not_ready(self) -> list[NotReady]:
        """Return the processes without progress for half of their limit, except API servers."""
        return [
            NotReady(f"{process_name(*hang.process)}: {hang.what}", hang.since)
            for hang in self._standing(0.5)
            if hang.process[0] != "api_server"
        ]

    def _standing(self, part: float) -> Iterator[Hang]:
        """Processes without progress for this part of their limit."""
        now = self._look()
        for process, life in self._lives.items():
            for what, since, until, limit in self._debts(process[0], life, now):
                if until - since > part * limit and not life.condemned:
                    on_the_clock = round(self._looked - now + since, 1)
                    yield Hang(process, what, until - since, on_the_clock)
                    break

    def _debts(
        self, role: Role, life: _Life, now: float
    ) -> Iterator[tuple[str, float, float, float]]:
        """Answers that a process may owe: name, since when, until when that is known, limit."""
        start, step = self._limits.start, self._limits.step
        if role == "worker":
            if not life.awaits_ranks or self._all_await_ranks:
                limit = self._step_limit if life.started else start
                yield "no completed step", life.owes_since, self._reported, limit
            return
        yield "no sign of life", life.owes_since, now, step if life.started else start
        if role == "engine_core":
            yield "work but no step", self._engine_owes_since, self._reported, self._step_limit

    @property
    def _all_await_ranks(self) -> bool:
        """Whether all workers that owe an answer wait for other ranks."""
        return all(
            life.awaits_ranks
            for (role, _), life in self._lives.items()
            if role == "worker" and life.owes_since != math.inf
        )

    @property
    def _step_limit(self) -> float:
        """Limit of the current step."""
        if self._report.ready and self._report.num_steps >= FIRST_STEPS:
            return self._limits.step
        return self._limits.first_steps

    def _look(self) -> float:
        now = self._clock()
        self._now += min(now - self._looked, _STRIDE * self._limits.interval)
        self._looked = now
        return self._now


def _progress(report: EngineAlive) -> tuple[int, int, int, bool]:
    return report.worker_epoch, report.num_steps, report.num_reports, report.ready


def _since(before: float, owes: bool, moved: bool, now: float) -> float:
    """Return since when an answer is owed; progress starts the time again."""
    if not owes:
        return math.inf
    return now if moved or before == math.inf else before
