"""Plans restarts: which processes are started in place of dead ones, and when.

An outage lasts from the death of a process until its successor is ready. All workers of a model are
restarted together, an engine or a front end alone. A process that violates the protocol is killed
and restarted like a dead one. The supervisor starts and kills the processes.
"""

import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from deploy.display import Display
from deploy.supervisor import exit_report
from deploy.supervisor.epochs import Announcement, EpochCounter
from deploy.supervisor.processes import Child, StartError
from proto.codec import Message
from proto.messages.lifecycle import (
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
from proto.messages.lora import AdapterList

_NUM_IMMEDIATE: Final = 2
_FIRST_DELAY: Final = 0.25
_MAX_DELAY: Final = 4.0
_FORGET_SECONDS: Final = 600.0


class RestartBudget:
    """Limit and delay of consecutive restarts.

        earlier restarts  0  1  2    3    4  5  6  …
        seconds to wait   0  0  0.25 0.5  1  2  4  4

    Restarts are consecutive if no step completes between them. Restarts older than ten minutes
    do not count, because an idle daemon completes no steps for days.

    max_restarts: consecutive restarts allowed.
    """

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_restarts = max_restarts
        self._clock = clock
        self._num_restarts = 0
        self._last_restart = 0.0

    @property
    def exhausted(self) -> bool:
        """Whether no further restart is allowed."""
        self._forget_old()
        return self._num_restarts >= self.max_restarts

    def count_restart(self) -> float:
        """Count a restart and return the seconds to wait before it."""
        self._forget_old()
        self._last_restart = self._clock()
        self._num_restarts += 1
        if self._num_restarts <= _NUM_IMMEDIATE:
            return 0.0
        return float(min(_MAX_DELAY, _FIRST_DELAY * 2 ** (self._num_restarts - _NUM_IMMEDIATE - 1)))

    def reset(self) -> None:
        self._num_restarts = 0

    def _forget_old(self) -> None:
        if self._clock() - self._last_restart > _FORGET_SECONDS:
            self._num_restarts = 0


ProcessKey = tuple[Role, int]
"""Role and index of a process; all workers of a model share the key of the first."""


@dataclass(slots=True)
class _Outage:
    """Time without a process. since: its death. due: when the successor is started.

    Seconds of the monotonic clock. started: whether the successor was started.
    """

    since: float
    due: float
    started: bool = False


class RestartPlan(NamedTuple):
    """Messages to the other processes, to be sent first, and boot messages of those to start."""

    announcements: list[Announcement]
    boots: list[ProcessBoot]


class Recovery:
    """Plans the restarts of a daemon that has been ready.

    num_workers: workers that share the model.
    """

    def __init__(
        self,
        epochs: EpochCounter,
        budget: RestartBudget,
        display: Display,
        num_workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epochs = epochs
        self._budget = budget
        self._display = display
        self._num_workers = num_workers
        self._clock = clock
        self._outages: dict[ProcessKey, _Outage] = {}
        self._disconnected: set[ProcessKey] = set()
        self._violations: dict[Role, int] = {}

    def can_restart(self, dead: Child) -> bool:
        """Whether to restart: not after an error that the user must fix, nor beyond the budget."""
        if exit_report.user_error(dead.fatal_error) is not None:
            return False
        if self._is_expected(dead):
            return True
        if self._budget.exhausted:
            number = self._budget.max_restarts
            message = "a process is not started again: --max-restarts is 0"
            if number:
                times = "restart has" if number == 1 else "restarts have"
                message = f"{number} {times} not led to one completed step (--max-restarts)"
            self._display.notice(message, level="WARNING")
            return False
        return True

    def disconnect(self, hung: Child) -> list[Announcement]:
        """Return the messages that disconnect the other processes from one that will be killed.

        The others wait for its successor, so its further messages have no effect. Nothing more is
        announced when it has died.
        """
        key = _key_of(hung)
        if key in self._disconnected:
            return []
        self._disconnected.add(key)
        return self._announce(key)

    def note_death(self, dead: Child) -> None:
        """Plan the restart of a dead process."""
        if self._is_expected(dead):
            return
        wait = self._budget.count_restart()
        now = self._clock()
        before = self._outages.get(_key_of(dead))
        since = now if before is None else before.since
        self._outages[_key_of(dead)] = _Outage(since, now + wait)
        lines = [f"(pid {dead.pid}) {exit_report.describe_exit(dead)}; it is restarted"]
        if wait:
            lines[0] += f" in {wait:g} s"
        if dead.fatal_error is not None:
            lines.append(textwrap.indent(dead.fatal_error.traceback.rstrip(), "  "))
        self._display.event(dead.name, "\n".join(lines), "WARNING")

    def note_failed_start(self, boot: ProcessBoot, error: StartError) -> None:
        """Plan another attempt to start a process; raise the error if the budget is exhausted."""
        if self._budget.exhausted:
            raise error
        wait = max(_FIRST_DELAY, self._budget.count_restart())
        key = _key_of(boot)
        self._outages[key] = _Outage(self._outages[key].since, self._clock() + wait)
        text = f"cannot be started: {error.reason}; it is tried again in {wait:g} s"
        self._display.event(process_name(boot.role, boot.index), text, "WARNING")

    @property
    def has_outages(self) -> bool:
        """Whether a process is missing, about to be killed, or not ready yet."""
        return bool(self._outages or self._disconnected)

    def must_kill(self, role: Role) -> bool:
        """Whether the running processes of this role must be killed.

        That is so if a worker of the same model died, or after a protocol violation.
        """
        return self._is_incomplete(role) or self._violations.get(role) == self._epoch_of(role)

    def not_ready(self) -> list[NotReady]:
        """Return the reasons why the daemon is not ready: a missing engine or missing workers."""
        return [
            NotReady(f"{process_name(*key)} is being restarted", outage.since)
            for key, outage in self._outages.items()
            if key[0] != "api_server"
        ]

    def seconds_to_next_restart(self) -> float | None:
        """Seconds until the next start; None if none is planned."""
        dues = [outage.due for outage in self._outages.values() if not outage.started]
        return max(0.0, min(dues) - self._clock()) if dues else None

    def pop_due_restarts(self, running: Iterable[Child]) -> list[RestartPlan]:
        """Return the restarts that are due, the engine first. running: processes that exist."""
        now = self._clock()
        occupied = {_key_of(child) for child in running}
        due = [
            key
            for key, outage in self._outages.items()
            if not outage.started and outage.due <= now and key not in occupied
        ]
        due.sort(key=lambda key: key[0] != "engine_core")
        return list(map(self._plan_restart, due))

    def note_message(self, message: Message) -> None:
        """Note a message: readiness, progress, a pause, adapters, or a protocol violation."""
        if isinstance(message, Heartbeat):
            if message.worker_epoch == self._epochs.worker_epoch:
                self._budget.reset()
        elif isinstance(message, Paused):
            self._epochs.pause_mode = message.mode
        elif isinstance(message, AdapterList):
            self._epochs.note_adapters(message)
        elif isinstance(message, WorkersReady):
            if message.worker_epoch == self._epochs.worker_epoch:
                self._end_outage(("worker", 0))
        elif isinstance(message, EngineReady):
            if message.epoch == self._epochs.epoch:
                self._end_outage(("engine_core", 0))
        elif isinstance(message, FrontEndReady):
            self._end_outage(("api_server", message.index))
        elif isinstance(message, ProtocolViolation):
            self._note_violation(message)

    def _plan_restart(self, key: ProcessKey) -> RestartPlan:
        role, index = key
        self._outages[key].started = True
        hung = key in self._disconnected
        announcements = [] if hung else self._announce(key)
        self._disconnected.discard(key)
        announcements.append(("api_server", Restarted(role, hung)))
        indices = range(self._num_workers) if role == "worker" else (index,)
        boots = [self._epochs.make_boot(role, number, hung=hung) for number in indices]
        return RestartPlan(announcements, boots)

    def _announce(self, key: ProcessKey) -> list[Announcement]:
        """Assign the epoch of the successor; return the messages that announce it."""
        role, index = key
        if role == "engine_core":
            return self._epochs.new_engine()
        if role == "worker":
            return self._epochs.new_workers()
        return self._epochs.new_front_end(index)

    def _end_outage(self, key: ProcessKey) -> None:
        outage = self._outages.get(key)
        if outage is not None and outage.started:
            del self._outages[key]
            seconds = self._clock() - outage.since
            self._display.event(process_name(*key), f"is back after {seconds:.1f} s")

    def _note_violation(self, message: ProtocolViolation) -> None:
        """Note a violation, unless it is by a process of an older epoch, which has ended."""
        is_new = self._violations.get(message.role) != message.epoch
        if is_new and message.epoch == self._epoch_of(message.role):
            self._violations[message.role] = message.epoch
            name = process_name(message.role, message.index)
            what = f"sent an invalid message and is killed: {message.reason}"
            self._display.event(name, what, "WARNING")

    def _epoch_of(self, role: Role) -> int:
        return self._epochs.worker_epoch if role == "worker" else self._epochs.epoch

    def _is_expected(self, dead: Child) -> bool:
        """Whether it was killed because another worker of the model had died."""
        return self._is_incomplete(dead.role)

    def _is_incomplete(self, role: Role) -> bool:
        """Whether some workers have died and the others still run."""
        outage = self._outages.get((role, 0))
        return role == "worker" and outage is not None and not outage.started


def _key_of(process: Child | ProcessBoot) -> ProcessKey:
    return process.role, 0 if process.role == "worker" else process.index
