"""Plans restarts: which processes are started in place of dead ones, and when.

An outage lasts from the death of a process until its successor is ready. All workers of an engine
are restarted together, an engine or a front end alone; each engine has a budget of restarts. A
process that violates the protocol is killed and restarted like a dead one. The supervisor starts
and kills the processes.
"""

import math
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
"""Role and index of a process; all workers of an engine share the key of the first."""


@dataclass(slots=True)
class _Outage:
    """Time without a process. since: its death. due: when the successor is started.

    Seconds of the monotonic clock. started: whether the successor was started. is_reload: a reload
    has ended the process, which is known to the others.
    """

    since: float
    due: float
    started: bool = False
    is_reload: bool = False


class RestartPlan(NamedTuple):
    """Messages to the other processes, to be sent first, and boot messages of those to start."""

    announcements: list[Announcement]
    boots: list[ProcessBoot]


class Recovery:
    """Plans the restarts of a daemon that has been ready.

    An engine that restarts do not help rests for ten minutes as long as another one is left, and
    ends the daemon if none is.

    max_restarts: of each engine with its workers, and of all front ends together.
    """

    def __init__(
        self,
        epochs: EpochCounter,
        max_restarts: int,
        display: Display,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epochs = epochs
        self._max_restarts = max_restarts
        self._display = display
        self._clock = clock
        self._budgets: dict[int | None, RestartBudget] = {
            engine: RestartBudget(max_restarts, clock)
            for engine in (*range(epochs.num_engines), None)
        }
        self._resting: dict[int, float] = {}  # engine → when it is restarted; inf: see `reserve`
        self._outages: dict[ProcessKey, _Outage] = {}
        self._disconnected: set[ProcessKey] = set()
        self._violations: dict[tuple[Role, int], int] = {}

    def can_restart(self, dead: Child) -> bool:
        """Whether to restart a dead process, now or after a rest of its engine.

        Not after an error that the user must fix, nor beyond the budget, if no other engine is
        left.
        """
        if self._is_expected(dead) or not self._must_rest(dead) or self._has_other(dead.engine):
            return True
        if exit_report.user_error(dead.fatal_error) is None:
            number = self._max_restarts
            message = "a process is not started again: --max-restarts is 0"
            if number:
                times = "restart has" if number == 1 else "restarts have"
                message = f"{number} {times} not led to one completed step (--max-restarts)"
            self._display.notice(message, level="WARNING")
        return False

    def disconnect(self, hung: Child) -> list[Announcement]:
        """Return the messages that disconnect the other processes from one that will be killed.

        The others wait for its successor, so its further messages have no effect. Nothing more is
        announced when it has died.
        """
        key = self._key_of(hung)
        if key in self._disconnected:
            return []
        self._disconnected.add(key)
        return self._announce(key)

    def note_death(self, dead: Child) -> None:
        """Plan the restart of a dead process."""
        if self._is_expected(dead):
            return
        now, key = self._clock(), self._key_of(dead)
        engine = dead.engine
        if engine is not None and self._must_rest(dead):
            wait = self._resting.setdefault(engine, now + _FORGET_SECONDS) - now
        else:
            wait = self._budgets[engine].count_restart()
        before = self._outages.get(key)
        since = now if before is None else before.since
        self._outages[key] = _Outage(since, now + wait)
        lines = [f"(pid {dead.pid}) {exit_report.describe_exit(dead)}; it is restarted"]
        if wait:
            lines[0] += f" in {wait:.3g} s"
        if dead.fatal_error is not None:
            lines.append(textwrap.indent(dead.fatal_error.traceback.rstrip(), "  "))
        self._display.event(dead.name, "\n".join(lines), "WARNING")

    def note_failed_start(self, boot: ProcessBoot, error: StartError) -> None:
        """Plan another attempt to start a process; raise the error if that must not be."""
        engine = None if boot.role == "api_server" else boot.engine
        budget, now = self._budgets[engine], self._clock()
        if not budget.exhausted:
            wait = max(_FIRST_DELAY, budget.count_restart())
        elif engine is not None and self._has_other(engine):
            wait = self._resting.setdefault(engine, now + _FORGET_SECONDS) - now
        else:
            raise error
        key = self._key_of(boot)
        self._outages[key] = _Outage(self._outages[key].since, now + wait)
        text = f"cannot be started: {error.reason}; it is tried again in {wait:.3g} s"
        self._display.event(process_name(boot.role, boot.index), text, "WARNING")

    @property
    def has_outages(self) -> bool:
        """Whether a process is missing, about to be killed, or not ready yet.

        Except of engines that rest: their cure may be a reload.
        """
        engines = map(self._engine_of, self._outages)
        return bool(self._disconnected) or any(each not in self._resting for each in engines)

    def rests(self, engine: int) -> bool:
        """Whether an engine is not restarted for minutes, or reserved."""
        return engine in self._resting

    def reserve(self, engine: int) -> None:
        """Start an engine and its workers, which a reload has ended, only after `release`."""
        self._resting[engine] = math.inf
        for key in self._keys_of(engine):
            self._outages[key] = _Outage(self._clock(), math.inf, is_reload=True)

    def release(self, engine: int) -> None:
        """Start a reserved engine and its workers; do nothing if it is not reserved."""
        if self._resting.get(engine) == math.inf:
            del self._resting[engine]
            self._budgets[engine].reset()
            now = self._clock()
            for key in self._keys_of(engine):
                self._outages[key] = _Outage(now, now, is_reload=True)

    def note_replaced(self, engine: int) -> None:
        """Note that a reload has started an engine and its workers, which may have been missing."""
        self._resting.pop(engine, None)
        for key in self._keys_of(engine):
            self._outages.pop(key, None)

    def must_kill(self, running: Child) -> bool:
        """Whether a running process must be killed.

        That is so if another worker of its engine died, or after a protocol violation.
        """
        if running.engine is None:
            return False
        violation = self._violations.get((running.role, running.engine))
        epoch = self._epoch_of(running.role, running.engine)
        return violation == epoch or self._is_expected(running)

    def not_ready(self) -> list[NotReady]:
        """Return the reasons why engines are not ready: a missing engine or missing workers."""
        found = []
        for key, outage in self._outages.items():
            engine = self._engine_of(key)
            if engine is not None:
                rests = engine in self._resting
                what = "rests before its next restart" if rests else "is being restarted"
                what = f"{process_name(*key)} {'is being reloaded' if outage.is_reload else what}"
                found.append(NotReady(what, outage.since, engine, is_restarted=True, rests=rests))
        return found

    def seconds_to_next_restart(self) -> float | None:
        """Seconds until the next start; None if none is planned."""
        dues = [outage.due for outage in self._outages.values() if not outage.started]
        due = min(dues, default=math.inf)
        return None if due == math.inf else max(0.0, due - self._clock())

    def pop_due_restarts(self, running: Iterable[Child]) -> list[RestartPlan]:
        """Return the restarts that are due, the engine first. running: processes that exist."""
        now = self._clock()
        occupied = {self._key_of(child) for child in running}
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
            engine = self._epochs.engine_of("worker", message.worker_epoch)
            if engine is not None:
                self._budgets[engine].reset()
                self._budgets[None].reset()
        elif isinstance(message, Paused):
            self._epochs.pause_mode = message.mode
        elif isinstance(message, AdapterList):
            self._epochs.note_adapters(message)
        elif isinstance(message, WorkersReady):
            engine = self._epochs.engine_of("worker", message.worker_epoch)
            if engine is not None:
                self._end_outage(("worker", self._epochs.workers_of(engine)[0]))
        elif isinstance(message, EngineReady):
            engine = self._epochs.engine_of("engine_core", message.epoch)
            if engine is not None:
                self._end_outage(("engine_core", engine))
        elif isinstance(message, FrontEndReady):
            self._end_outage(("api_server", message.index))
        elif isinstance(message, ProtocolViolation):
            self._note_violation(message)

    def _plan_restart(self, key: ProcessKey) -> RestartPlan:
        role, index = key
        engine = self._engine_of(key)
        outage = self._outages[key]
        outage.started = True
        if engine is not None and self._resting.pop(engine, None) is not None:
            self._budgets[engine].reset()
        hung = key in self._disconnected
        announcements = [] if hung or outage.is_reload else self._announce(key)
        self._disconnected.discard(key)
        if not outage.is_reload:
            announcements.append(Announcement("api_server", Restarted(role, hung, engine)))
        indices = range(index, index + self._epochs.num_ranks) if role == "worker" else (index,)
        boots = [self._epochs.make_boot(role, number, hung=hung) for number in indices]
        return RestartPlan(announcements, boots)

    def _announce(self, key: ProcessKey) -> list[Announcement]:
        """Assign the epoch of the successor; return the messages that announce it."""
        role, index = key
        engine = self._engine_of(key)
        if engine is None:
            return self._epochs.new_front_end(index)
        if role == "engine_core":
            return self._epochs.new_engine(engine)
        return self._epochs.new_workers(engine)

    def _end_outage(self, key: ProcessKey) -> None:
        outage = self._outages.get(key)
        if outage is not None and outage.started:
            del self._outages[key]
            seconds = self._clock() - outage.since
            self._display.event(process_name(*key), f"is back after {seconds:.1f} s")

    def _note_violation(self, message: ProtocolViolation) -> None:
        """Note a violation, unless it is by a process of an older epoch, which has ended."""
        engine = self._epochs.engine_of(message.role, message.epoch)
        if engine is None or self._violations.get((message.role, engine)) == message.epoch:
            return
        self._violations[message.role, engine] = message.epoch
        name = process_name(message.role, message.index)
        what = f"sent an invalid message and is killed: {message.reason}"
        self._display.event(name, what, "WARNING")

    def _epoch_of(self, role: Role, engine: int) -> int:
        epochs = self._epochs.worker_epochs if role == "worker" else self._epochs.epochs
        return epochs[engine]

    def _must_rest(self, dead: Child) -> bool:
        """Whether a restart now does not help: after an error of the user's, or many restarts.

        Workers of an engine that rests end, too, when no engine comes.
        """
        is_error = exit_report.user_error(dead.fatal_error) is not None
        return is_error or dead.engine in self._resting or self._budgets[dead.engine].exhausted

    def _has_other(self, engine: int | None) -> bool:
        """Whether another engine than this one is left that does not rest.

        None stands for a front end, for which no other can be.
        """
        others = set(range(self._epochs.num_engines)) - self._resting.keys() - {engine}
        return engine is not None and self._max_restarts > 0 and bool(others)

    def _is_expected(self, process: Child) -> bool:
        """Whether it is killed because another worker of its engine has died."""
        outage = self._outages.get(self._key_of(process))
        return process.role == "worker" and outage is not None and not outage.started

    def _key_of(self, process: Child | ProcessBoot) -> ProcessKey:
        index = process.index
        if process.role == "worker":
            index -= index % self._epochs.num_ranks
        return process.role, index

    def _keys_of(self, engine: int) -> tuple[ProcessKey, ProcessKey]:
        """Return the keys of an engine and of its workers."""
        return ("engine_core", engine), ("worker", self._epochs.workers_of(engine)[0])

    def _engine_of(self, key: ProcessKey) -> int | None:
        """Return the engine of a process; None for a front end."""
        role, index = key
        if role == "worker":
            return index // self._epochs.num_ranks
        return index if role == "engine_core" else None
