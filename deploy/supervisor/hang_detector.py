"""Who hangs: what is asked of the processes, and what is made of answers and silence.

Owns, per process, since when it owes an answer. A clock and reports go in, verdicts come
out; sends and kills nothing itself.

    engine, front end   are asked every now and then, and answer from their loops
    worker              answers the engine; that it owes one, the engine says when it is asked

So a worker is judged only by what an engine said that was still moving, and an engine is
not blamed for a worker that it waits for. Who is idle answers, or owes nothing. Of workers that
share a model those that said that they wait for the others are not blamed, unless all wait.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from proto.config import ReliabilityConfig
from proto.lifecycle import EngineAlive, NotReady, Role, process_name

FIRST_STEPS: Final = 8
"""Steps of new workers, or for a new engine, that may take longer than others."""
FIRST_STEPS_FACTOR: Final = 3.0
"""How much longer: kernels are compiled and loaded, memory is touched for the first time. It
is bounded, so that a request that hangs whoever computes it is found out all the same."""
_ASKED_PER_LIMIT: Final = 8.0
_LONGEST_INTERVAL: Final = 5.0
_SHORTEST_INTERVAL: Final = 0.05
_STRIDE: Final = 2.0
"""Intervals. More time than this between two looks was lost by us: the machine slept, or we were
stopped, and so were the others."""

Process = tuple[Role, int]
"""Role and index, whichever life."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without progress: of a process that starts, in its first steps, and later."""

    start: float
    first_steps: float
    step: float

    @classmethod
    def of(cls, config: ReliabilityConfig) -> "Limits":
        step = config.step_timeout or math.inf
        return cls(config.start_timeout or math.inf, step * FIRST_STEPS_FACTOR, step)

    @property
    def interval(self) -> float:
        """Seconds between an answer and the next question."""
        aimed_at = min(self.start, self.step) / _ASKED_PER_LIMIT
        return max(_SHORTEST_INTERVAL, min(_LONGEST_INTERVAL, aimed_at))


@dataclass(frozen=True, slots=True)
class Hang:
    """Somebody does not move. what: is missing. seconds: for so long; since: on the clock."""

    process: Process
    what: str
    seconds: float
    since: float


@dataclass(slots=True)
class _Life:
    """Of one process. Times are those of the watch; infinite: never.

    next_question: when to ask; infinite while an answer is due, and for workers.
    owes_since: a question of ours or, of a worker, one of the engine has no answer since.
    started: it has answered, said that it is ready, or taken steps, in this life.
    awaits_ranks: it has said so since a step was complete.
    """

    next_question: float
    owes_since: float = math.inf
    started: bool = False
    condemned: bool = False
    awaits_ranks: bool = False


class HangDetector:
    """Watches the front ends of a daemon that is not ending, or the engine and workers of one
    generation.

    Time counts while somebody looks, which has to be once an interval.
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
        """Seconds until somebody has to look again, at most."""
        return self._limits.interval

    def begin(self, process: Process) -> None:
        """A process was started."""
        role, _ = process
        self._lives[process] = _Life(math.inf if role == "worker" else self._look())

    def end(self, process: Process) -> None:
        """It is gone."""
        role, _ = process
        del self._lives[process]
        if role == "engine_core":
            self._engine_owes_since = math.inf

    def condemn(self, process: Process) -> None:
        """It is about to be ended: nothing is expected of it any more."""
        self._lives[process].condemned = True

    def note_sign(self, process: Process) -> None:
        """It said something, so it was at work when it did."""
        life = self._lives[process]
        if life.owes_since != math.inf:
            life.owes_since = self._look()

    def note_ready(self, process: Process) -> None:
        """It said that its start is over."""
        self._lives[process].started = True
        self.note_sign(process)

    def note_answer(self, process: Process) -> None:
        """It answered a question of ours."""
        life = self._lives[process]
        life.started = True
        life.owes_since = math.inf
        life.next_question = self._look() + self._limits.interval

    def note_awaits_ranks(self, process: Process) -> None:
        """A worker waits for others in the middle of a step."""
        self._lives[process].awaits_ranks = True

    def note_engine(self, report: EngineAlive, worker_epoch: int) -> None:
        """What the engine answered. worker_epoch: of the workers that there are now."""
        if report.worker_epoch != worker_epoch:
            report = EngineAlive(worker_epoch)  # it has not heard of them yet, they owe nothing
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
        """Whom to ask now. They owe an answer from now on."""
        now = self._look()
        due = [process for process, life in self._lives.items() if life.next_question <= now]
        for process in due:
            self._lives[process].next_question = math.inf
            self._lives[process].owes_since = now
        return due

    def hangs(self) -> list[Hang]:
        """Those who have not moved for longer than they may."""
        return list(self._standing(1.0))

    def not_ready(self) -> list[NotReady]:
        """What requests wait for, when half of the time for it is over."""
        return [
            NotReady(f"{process_name(*hang.process)}: {hang.what}", hang.since)
            for hang in self._standing(0.5)
            if hang.process[0] != "api_server"
        ]

    def _standing(self, part: float) -> Iterator[Hang]:
        """Who has not moved for this part of the time that it may take."""
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
        """What may be missing: its name, since when, until when that is known, the limit."""
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
        """Nobody is left who could be to blame but those who wait."""
        return all(
            life.awaits_ranks
            for (role, _), life in self._lives.items()
            if role == "worker" and life.owes_since != math.inf
        )

    @property
    def _step_limit(self) -> float:
        """Of the step that is under way, if one is."""
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
    """Since when something is owed: what moves owes something new each time."""
    if not owes:
        return math.inf
    return now if moved or before == math.inf else before
