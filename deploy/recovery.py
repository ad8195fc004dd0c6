"""Who died, and who is to be started in their place, when.

Owns the gaps: the time from a death to the moment at which those who take over are at
work. A worker dies with all others that compute with it; an engine or a front end alone.
Starts nothing itself.
"""

import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deploy import obituary
from deploy.births import Announcement, Births
from deploy.obituary import Deceased
from deploy.reporting import Reporter
from deploy.restart_budget import RestartBudget
from proto.codec import Message
from proto.lifecycle import (
    EngineReady,
    FrontEndReady,
    Heartbeat,
    Paused,
    ProcessBoot,
    Restarted,
    Role,
    WorkersReady,
    process_name,
)

Place = tuple[Role, int]
"""What a process is, whichever life of it. All workers share the place of the first."""


@dataclass(slots=True)
class _Gap:
    """Nobody is in this place, or nobody who is at work yet. Seconds on the monotonic clock."""

    since: float
    due: float
    started: bool = False


@dataclass(frozen=True, slots=True)
class Succession:
    """told: what those who live hear of it first. boots: of the processes to start."""

    told: list[Announcement]
    boots: list[ProcessBoot]


class Recovery:
    """Plans the restarts of a daemon that serves.

    num_workers: that compute together.
    """

    def __init__(
        self,
        births: Births,
        budget: RestartBudget,
        reporter: Reporter,
        num_workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._births = births
        self._budget = budget
        self._reporter = reporter
        self._num_workers = num_workers
        self._clock = clock
        self._gaps: dict[Place, _Gap] = {}

    def can_replace(self, dead: Deceased) -> bool:
        """Not where the user must change something first, nor for ever without progress."""
        if obituary.user_error(dead.last_words) is not None:
            return False
        if self._is_expected(dead):
            return True
        if self._budget.exhausted:
            message = f"{self._budget.most} restarts have not led to one completed step"
            self._reporter.notice(message)
            return False
        return True

    def note_death(self, dead: Deceased) -> None:
        """Plan that another process takes its place."""
        if self._is_expected(dead):
            return
        wait = self._budget.spend()
        now = self._clock()
        before = self._gaps.get(_place(dead))
        since = now if before is None else before.since
        self._gaps[_place(dead)] = _Gap(since, now + wait)
        lines = [f"(pid {dead.pid}) {obituary.manner(dead)}; it is started again"]
        if wait:
            lines[0] += f" in {wait:g} s"
        if dead.last_words is not None:
            lines.append(textwrap.indent(dead.last_words.traceback.rstrip(), "  "))
        self._reporter.notice("\n".join(lines), dead.name)

    @property
    def has_gaps(self) -> bool:
        """Somebody is missing, or not at work yet."""
        return bool(self._gaps)

    def must_go(self, role: Role) -> bool:
        """Those that still run in this role are to be killed: who computed with them is dead."""
        gap = self._gaps.get((role, 0))
        return role == "worker" and gap is not None and not gap.started

    def seconds_to_next(self) -> float | None:
        """How long there is nothing to start; None for ever."""
        dues = [gap.due for gap in self._gaps.values() if not gap.started]
        return max(0.0, min(dues) - self._clock()) if dues else None

    def take_due(self, running: Iterable[Deceased]) -> list[Succession]:
        """Whom to start now, the engine before anyone else. running: processes that live."""
        now = self._clock()
        occupied = {_place(each) for each in running}
        due = [
            place
            for place, gap in self._gaps.items()
            if not gap.started and gap.due <= now and place not in occupied
        ]
        return [self._succeed(place) for place in sorted(due, key=_engine_first)]

    def note(self, message: Message) -> None:
        """What processes tell of themselves: who is back, and whether there is progress."""
        if isinstance(message, Heartbeat):
            if message.worker_epoch == self._births.worker_epoch:
                self._budget.renew()
        elif isinstance(message, Paused):
            self._births.pause_mode = message.mode
        elif isinstance(message, WorkersReady):
            if message.worker_epoch == self._births.worker_epoch:
                self._close(("worker", 0))
        elif isinstance(message, EngineReady):
            if message.epoch == self._births.epoch:
                self._close(("engine_core", 0))
        elif isinstance(message, FrontEndReady):
            self._close(("api_server", message.index))

    def _succeed(self, place: Place) -> Succession:
        role, index = place
        self._gaps[place].started = True
        indices = [index]
        if role == "engine_core":
            told = self._births.new_engine()
        elif role == "worker":
            told = self._births.new_workers()
            indices = list(range(self._num_workers))
        else:
            told = self._births.new_front_end(index)
        told.append(("api_server", Restarted(role)))
        return Succession(told, [self._births.boot(role, each) for each in indices])

    def _close(self, place: Place) -> None:
        gap = self._gaps.get(place)
        if gap is not None and gap.started:
            del self._gaps[place]
            seconds = self._clock() - gap.since
            self._reporter.notice(f"is back after {seconds:.1f} s", process_name(*place))

    def _is_expected(self, dead: Deceased) -> bool:
        """It was killed here, because another one that it computed with had died."""
        return self.must_go(dead.role)


def _place(process: Deceased) -> Place:
    return process.role, 0 if process.role == "worker" else process.index


def _engine_first(place: Place) -> bool:
    return place[0] != "engine_core"
