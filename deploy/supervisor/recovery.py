"""Plans restarts: which processes are started in place of dead ones, and when.

A gap lasts from the death of a process until its successor is ready. All workers of a model are
restarted together, an engine or an API server alone. A process that violates the protocol is killed
and restarted like a dead one. Starts and kills no processes itself.
"""

import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from deploy.display import Reporter
from deploy.supervisor import exit_report
from deploy.supervisor.epochs import Announcement, EpochCounter
from deploy.supervisor.processes import Child
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

_FREE: Final = 2
_FIRST: Final = 0.25
_LONGEST: Final = 4.0
_FORGIVEN_SECONDS: Final = 600.0


class RestartBudget:
    """Limit and delay of consecutive restarts.

        restarts so far   0  1  2    3    4  5  6  …
        seconds to wait   0  0  0.25 0.5  1  2  4  4

    Restarts are consecutive without a completed step in between. Old ones do not count, because
    an idle daemon completes no steps for days. most: consecutive restarts allowed.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._spent = 0
        self._last = 0.0

    @property
    def exhausted(self) -> bool:
        """Whether no further restart is allowed."""
        self._forget_old()
        return self._spent >= self.most

    def spend(self) -> float:
        """Count a restart and return the seconds to wait before it."""
        self._forget_old()
        self._last = self._clock()
        self._spent += 1
        if self._spent <= _FREE:
            return 0.0
        return float(min(_LONGEST, _FIRST * 2 ** (self._spent - _FREE - 1)))

    def renew(self) -> None:
        """Reset the count, because a step was completed."""
        self._spent = 0

    def _forget_old(self) -> None:
        if self._clock() - self._last > _FORGIVEN_SECONDS:
            self._spent = 0


Place = tuple[Role, int]
"""Role and index of a process; all workers have that of the first."""


@dataclass(slots=True)
class _Gap:
    """A process is missing or not ready yet. Times in seconds of the monotonic clock."""

    since: float
    due: float
    started: bool = False


@dataclass(frozen=True, slots=True)
class Replacement:
    """told: messages to send to the other processes first. boots: of the processes to start."""

    told: list[Announcement]
    boots: list[ProcessBoot]


class Recovery:
    """Plans the restarts of a daemon that has been ready.

    num_workers: workers that share the model.
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
        """Whether to restart: not after an error that the user must fix, nor beyond the budget."""
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
        """Return the messages that disconnect the others from a process that will be killed.

        They wait for its successor, so further messages of it have no effect. Nothing more is
        announced when it has died.
        """
        place = _place(hung)
        if place in self._cut_off:
            return []
        self._cut_off.add(place)
        return self._announce(place)

    def note_death(self, dead: Child) -> None:
        """Plan the restart of a dead process."""
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
        """Whether a process is missing, about to be killed, or not ready yet."""
        return bool(self._gaps or self._cut_off)

    def must_go(self, role: Role) -> bool:
        """Whether the running processes of this role must be killed.

        That is so if a worker of the same model died, or after a protocol violation.
        """
        return self._is_incomplete(role) or self._distrusted.get(role) == self._epoch_of(role)

    def not_ready(self) -> list[NotReady]:
        """Return the missing engine and workers; other API servers stand in for a missing one."""
        return [
            NotReady(f"{process_name(*place)} is being restarted", gap.since)
            for place, gap in self._gaps.items()
            if place[0] != "api_server"
        ]

    def seconds_to_next(self) -> float | None:
        """Seconds until the next start; None if none is planned."""
        dues = [gap.due for gap in self._gaps.values() if not gap.started]
        return max(0.0, min(dues) - self._clock()) if dues else None

    def take_due(self, running: Iterable[Child]) -> list[Replacement]:
        """Return the starts that are due, the engine first. running: processes that exist."""
        now = self._clock()
        occupied = {_place(each) for each in running}
        due = [
            place
            for place, gap in self._gaps.items()
            if not gap.started and gap.due <= now and place not in occupied
        ]
        return [self._succeed(place) for place in sorted(due, key=_engine_first)]

    def note(self, message: Message) -> None:
        """Take a message into account: readiness of a successor, progress, pause, or violation."""
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
        """Assign the numbers of the successor; return the messages that announce it."""
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
        """Note a violation by a process of the current epoch; older ones have ended already."""
        is_news = self._distrusted.get(message.role) != message.epoch
        if is_news and message.epoch == self._epoch_of(message.role):
            self._distrusted[message.role] = message.epoch
            name = process_name(message.role, message.index)
            self._reporter.notice(f"sent an invalid message and is killed: {message.reason}", name)

    def _epoch_of(self, role: Role) -> int:
        return self._epochs.worker_epoch if role == "worker" else self._epochs.epoch

    def _is_expected(self, dead: Child) -> bool:
        """Whether it was killed because another worker of the model had died."""
        return self._is_incomplete(dead.role)

    def _is_incomplete(self, role: Role) -> bool:
        gap = self._gaps.get((role, 0))
        return role == "worker" and gap is not None and not gap.started


def _place(process: Child) -> Place:
    return process.role, 0 if process.role == "worker" else process.index


def _engine_first(place: Place) -> bool:
    return place[0] != "engine_core"
