"""The watchdog: pings processes, removes those that hang, and reports why the daemon is not ready.

Once a hung process was killed, its exit is handled like any other (recovery.py, reload/).

    front ends                                          one hang detector
    standby processes                                   one, without effect on readiness
    an engine and its workers                           one
    those of another generation (during a reload)       one, without effect on readiness

A hung process prints its stacks and is killed:

    disconnected ── 0.1 s ──▶ SIGUSR1, SIGCONT ── 0.5 s ──▶ SIGKILL

The other processes disconnect from it first, because a process that was only stopped continues to
run while it prints its stacks.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from deploy.display import Display
from deploy.supervisor.epochs import EpochCounter
from deploy.supervisor.hang_detector import HangDetector, HangLimits, Process
from deploy.supervisor.processes import Child
from deploy.supervisor.recovery import Recovery
from deploy.supervisor.shutdown import DueSignals
from proto.messages.lifecycle import (
    Alive,
    EngineAlive,
    EngineReady,
    FrontEndReady,
    HealthStatus,
    NotReady,
    Ping,
    Prepared,
    WaitingForRanks,
)

DISCONNECT_SECONDS: Final = 0.1
"""Time that the other processes have to disconnect from a process that will be killed."""
STACKS_SECONDS: Final = 0.5
"""Time for the signal handler that prints the stacks, in a process that may rarely be scheduled."""
_STUCK_SECONDS: Final = 10.0


class HungProcessRemoval(DueSignals):
    """The signals to one hung process. since: when the other processes were asked to disconnect."""

    def __init__(self, process: Child, clock: Callable[[], float] = time.monotonic) -> None:
        self._process = process
        self.since = clock()
        stacks_due = self.since + DISCONNECT_SECONDS
        kill = partial(process.send_signal, signal.SIGKILL)
        super().__init__(
            [(stacks_due, process.dump_stacks), (stacks_due + STACKS_SECONDS, kill)], clock
        )

    @property
    def done(self) -> bool:
        return self._process.has_ended()

    @property
    def stuck(self) -> bool:
        """Whether the process still exists long after SIGKILL, stuck in the kernel."""
        return self._clock() - self.since > _STUCK_SECONDS and not self.done


_Group = tuple[int, int | None]
"""Generation and index of an engine."""
_FRONT_ENDS: Final[_Group] = (0, None)
"""The group of front ends, which belong to no generation."""
_STANDBY: Final[_Group] = (-1, None)


class Watchdog:
    """Watches all processes of a daemon until its shutdown.

    The main loop of the supervisor calls, in every turn: `note_message` for each message, then
    `find_hung`, `begin_removal` for each process found, `continue_removals` and `report_health`.
    """

    def __init__(
        self,
        limits: HangLimits,
        epochs: EpochCounter,
        recovery: Recovery,
        display: Display,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._epochs = epochs
        self._recovery = recovery
        self._display = display
        self._clock = clock
        self._detectors: dict[_Group, HangDetector] = {}
        self._watched: dict[tuple[_Group, Process], Child] = {}
        self._removals: dict[Child, HungProcessRemoval] = {}
        self._last_status: dict[Child, HealthStatus] = {}
        self._paused_since: float | None = None

    @property
    def can_recover(self) -> bool:
        """Whether all hung processes could be killed; if not, only a restart of all helps."""
        return not any(removal.stuck for removal in self._removals.values())

    def note_message(self, child: Child, message: Any) -> None:
        """Note a message of a process as a sign of life, and what an engine says of its workers."""
        key = _key(child)
        if self._watched.get(key) is not child:
            return
        group, process = key
        detector = self._detectors[group]
        if isinstance(message, Alive | EngineAlive):
            detector.note_answer(process)
        elif isinstance(message, EngineReady | FrontEndReady) or (
            isinstance(message, Prepared) and not child.has_place
        ):
            detector.note_ready(process)
        elif isinstance(message, WaitingForRanks):
            detector.note_awaits_ranks(process)
        else:
            detector.note_message(process)
        if isinstance(message, EngineAlive) and child.engine is not None:
            # workers are replaced only in the current generation
            is_current = self._epochs.is_current(child)
            epochs = self._epochs.worker_epochs
            epoch = epochs[child.engine] if is_current else message.worker_epoch
            detector.note_engine_report(message, epoch)

    def find_hung(self, running: Sequence[Child]) -> list[Child]:
        """Ping the processes that are due, and return those that hang since the last call.

        running: all processes that were not asked to exit.
        """
        self._update_watched(running)
        found = []
        for group, detector in self._detectors.items():
            for process in detector.pop_due_pings():
                self._watched[group, process].send(Ping())
            for hang in detector.find_hangs():
                detector.ignore(hang.process)
                child = self._watched[group, hang.process]
                self._display.event(
                    child.name,
                    f"(pid {child.pid}) hangs, {hang.missing} for {hang.seconds:.1f} s "
                    f"({hang.flag}): it prints its stacks and is killed",
                    "WARNING",
                )
                found.append(child)
        return found

    def begin_removal(self, hung: Child) -> None:
        """Begin to remove a hung process; the other processes disconnect from it first."""
        self._removals[hung] = HungProcessRemoval(hung, self._clock)

    def continue_removals(self) -> None:
        """Send the signals that are due to hung processes."""
        running = {child: removal for child, removal in self._removals.items() if not removal.done}
        self._removals = running
        for removal in running.values():
            removal.send_due_signals()

    def report_health(
        self, running: Sequence[Child], standby_engines: int = 0, standby_workers: int = 0
    ) -> None:
        """Send the reasons why the daemon is not ready to front ends that do not know them.

        standby_engines, standby_workers: standby processes that are ready.
        """
        reasons = (*self._not_ready(), *self._recovery.not_ready())
        status = HealthStatus(reasons, standby_engines, standby_workers)
        for child in running:
            if child.role != "api_server":
                continue
            if self._last_status.get(child, HealthStatus()) != status:
                self._last_status[child] = status
                child.send(status)

    def seconds_to_next_check(self) -> float:
        """Return the seconds until the next call of `find_hung` and `continue_removals`."""
        signals = [removal.seconds_to_next_signal() for removal in self._removals.values()]
        return min(limit for limit in (self._limits.interval, *signals) if limit is not None)

    def _update_watched(self, running: Sequence[Child]) -> None:
        """Watch new processes, and stop watching ended ones."""
        now = {_key(child): child for child in running}
        for key, child in list(self._watched.items()):
            if now.get(key) is not child:
                group, process = key
                self._detectors[group].unwatch(process)
                self._last_status.pop(child, None)
                del self._watched[key]
        self._detectors = {
            group: self._detectors.get(group) or self._new_detector(group) for group, _ in now
        }
        for key, child in now.items():
            if key not in self._watched:
                group, process = key
                self._detectors[group].watch(process, is_prepared=child.is_prepared)
                self._watched[key] = child

    def _new_detector(self, group: _Group) -> HangDetector:
        _, engine = group
        first_worker = 0 if engine is None else self._epochs.workers_of(engine)[0]
        return HangDetector(self._limits, self._clock, engine, first_worker)

    def _not_ready(self) -> Iterator[NotReady]:
        """Yield reasons: a pause, and processes that hang, or are near their limit.

        Of processes those of the current generation.
        """
        if self._epochs.pause_mode is None:
            self._paused_since = None
        else:
            if self._paused_since is None:
                self._paused_since = self._clock()
            yield NotReady("paused by POST /pause", self._paused_since)
        for engine in range(self._epochs.num_engines):
            detector = self._detectors.get((self._epochs.generations[engine], engine))
            if detector is not None:
                yield from detector.not_ready()
        for child, removal in self._removals.items():
            if child.has_place and self._epochs.is_current(child):
                what = f"{child.name} hangs and is killed"
                yield NotReady(what, removal.since, child.engine)


def _key(child: Child) -> tuple[_Group, Process]:
    """Return the group of a process, and its role and index."""
    if not child.has_place:
        return _STANDBY, (child.role, child.index)
    is_front_end = child.role == "api_server"
    group = _FRONT_ENDS if is_front_end else (child.generation, child.engine)
    return group, (child.role, child.index)
