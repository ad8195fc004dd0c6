"""Who died, and who is to be started in their place, when.

Owns the gaps: the time from a death to the moment at which those who take over are at
work. A worker dies with all others that compute with it; an engine or a front end alone.
Who talks nonsense is to be killed, which is a death like any other. Starts and kills
nothing itself.
"""

import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from deploy.display import Reporter
from deploy.supervisor import exit_report
from deploy.supervisor.epochs import Announcement, EpochCounter
from deploy.supervisor.exit_report import Child
from proto.codec import Message
from proto.lifecycle import (
    EngineReady,
    FrontEndReady,
    Heartbeat,
    NotReady,
    Paused,
    ProcessBoot,
    ProtocolViolation,
    Restarted,
    Role,
    WorkersReady,
    process_name,
)

# How often processes may be started again. Owns the count; starts nothing.


_FREE: Final = 2
_FIRST: Final = 0.25
_LONGEST: Final = 4.0
_FORGIVEN_SECONDS: Final = 600.0


class RestartBudget:
    """How often in a row processes may be started again, and how soon.

        restarts so far   0  1  2    3    4  5  6  …
        seconds to wait   0  0  0.25 0.5  1  2  4  4

    "In a row" is without a completed step in between. What happened long ago does
    not count either: an idle daemon completes no step for days. most: in a row.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._spent = 0
        self._last = 0.0

    @property
    def exhausted(self) -> bool:
        """One more is too much."""
        self._forget_old()
        return self._spent >= self.most

    def spend(self) -> float:
        """Count a restart; returns the seconds to wait before it."""
        self._forget_old()
        self._last = self._clock()
        self._spent += 1
        if self._spent <= _FREE:
            return 0.0
        return float(min(_LONGEST, _FIRST * 2 ** (self._spent - _FREE - 1)))

    def renew(self) -> None:
        """A step was completed."""
        self._spent = 0

    def _forget_old(self) -> None:
        if self._clock() - self._last > _FORGIVEN_SECONDS:
            self._spent = 0


Place = tuple[Role, int]
"""What a process is, whichever life of it. All workers share the place of the first."""


@dataclass(slots=True)
class _Gap:
    """Nobody is in this place, or nobody who is at work yet. Seconds on the monotonic clock."""

    since: float
    due: float
    started: bool = False


@dataclass(frozen=True, slots=True)
class Replacement:
    """told: what those who live hear of it first. boots: of the processes to start."""

    told: list[Announcement]
    boots: list[ProcessBoot]


class Recovery:
    """Plans the restarts of a daemon that serves.

    num_workers: that compute together.
    """

    def __init__(
        self,
        epochs: EpochCounter,
        budget: RestartBudget,
        reporter: Reporter,
        num_workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epochs = epochs
        self._budget = budget
        self._reporter = reporter
        self._num_workers = num_workers
        self._clock = clock
        self._gaps: dict[Place, _Gap] = {}
        self._cut_off: set[Place] = set()
        self._distrusted: dict[Role, int] = {}

    def can_replace(self, dead: Child) -> bool:
        """Not where the user must change something first, nor for ever without progress."""
        if exit_report.user_error(dead.last_words) is not None:
            return False
        if self._is_expected(dead):
            return True
        if self._budget.exhausted:
            message = f"{self._budget.most} restarts have not led to one completed step"
            self._reporter.notice(message)
            return False
        return True

    def cut_off(self, hung: Child) -> list[Announcement]:
        """It hangs and will be killed: what the others hear of it now, and not again when it died.

        They let go of it and wait for the next one, so whatever it still does reaches nobody.
        """
        place = _place(hung)
        if place in self._cut_off:
            return []
        self._cut_off.add(place)
        return self._announce(place)

    def note_death(self, dead: Child) -> None:
        """Plan that another process takes its place."""
        if self._is_expected(dead):
            return
        wait = self._budget.spend()
        now = self._clock()
        before = self._gaps.get(_place(dead))
        since = now if before is None else before.since
        self._gaps[_place(dead)] = _Gap(since, now + wait)
        lines = [f"(pid {dead.pid}) {exit_report.manner(dead)}; it is started again"]
        if wait:
            lines[0] += f" in {wait:g} s"
        if dead.last_words is not None:
            lines.append(textwrap.indent(dead.last_words.traceback.rstrip(), "  "))
        self._reporter.notice("\n".join(lines), dead.name)

    @property
    def has_gaps(self) -> bool:
        """Somebody is missing, or about to be ended, or not at work yet."""
        return bool(self._gaps or self._cut_off)

    def must_go(self, role: Role) -> bool:
        """Those that still run in this role are to be killed.

        Who computed with them is dead, or one of them is not to be trusted.
        """
        return self._is_incomplete(role) or self._distrusted.get(role) == self._epoch_of(role)

    def not_ready(self) -> list[NotReady]:
        """Whom requests wait for. A front end's clients have others to go to."""
        return [
            NotReady(f"{process_name(*place)} is being restarted", gap.since)
            for place, gap in self._gaps.items()
            if place[0] != "api_server"
        ]

    def seconds_to_next(self) -> float | None:
        """How long there is nothing to start; None for ever."""
        dues = [gap.due for gap in self._gaps.values() if not gap.started]
        return max(0.0, min(dues) - self._clock()) if dues else None

    def take_due(self, running: Iterable[Child]) -> list[Replacement]:
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
            if message.worker_epoch == self._epochs.worker_epoch:
                self._budget.renew()
        elif isinstance(message, Paused):
            self._epochs.pause_mode = message.mode
        elif isinstance(message, WorkersReady):
            if message.worker_epoch == self._epochs.worker_epoch:
                self._close(("worker", 0))
        elif isinstance(message, EngineReady):
            if message.epoch == self._epochs.epoch:
                self._close(("engine_core", 0))
        elif isinstance(message, FrontEndReady):
            self._close(("api_server", message.index))
        elif isinstance(message, ProtocolViolation):
            self._note_distrust(message)

    def _succeed(self, place: Place) -> Replacement:
        role, index = place
        self._gaps[place].started = True
        hung = place in self._cut_off
        told = [] if hung else self._announce(place)
        self._cut_off.discard(place)
        told.append(("api_server", Restarted(role, hung)))
        indices = range(self._num_workers) if role == "worker" else (index,)
        return Replacement(told, [self._epochs.boot(role, each, hung=hung) for each in indices])

    def _announce(self, place: Place) -> list[Announcement]:
        """Take the numbers of those who follow; what the others hear of it."""
        role, index = place
        if role == "engine_core":
            return self._epochs.new_engine()
        if role == "worker":
            return self._epochs.new_workers()
        return self._epochs.new_front_end(index)

    def _close(self, place: Place) -> None:
        gap = self._gaps.get(place)
        if gap is not None and gap.started:
            del self._gaps[place]
            seconds = self._clock() - gap.since
            self._reporter.notice(f"is back after {seconds:.1f} s", process_name(*place))

    def _note_distrust(self, message: ProtocolViolation) -> None:
        """Of whoever lives in the present epoch; an older one has gone already."""
        is_news = self._distrusted.get(message.role) != message.epoch
        if is_news and message.epoch == self._epoch_of(message.role):
            self._distrusted[message.role] = message.epoch
            name = process_name(message.role, message.index)
            self._reporter.notice(f"is not to be trusted and is ended: {message.reason}", name)

    def _epoch_of(self, role: Role) -> int:
        return self._epochs.worker_epoch if role == "worker" else self._epochs.epoch

    def _is_expected(self, dead: Child) -> bool:
        """It was killed here, because another one that it computed with had died."""
        return self._is_incomplete(dead.role)

    def _is_incomplete(self, role: Role) -> bool:
        gap = self._gaps.get((role, 0))
        return role == "worker" and gap is not None and not gap.started


def _place(process: Child) -> Place:
    return process.role, 0 if process.role == "worker" else process.index


def _engine_first(place: Place) -> bool:
    return place[0] != "engine_core"
