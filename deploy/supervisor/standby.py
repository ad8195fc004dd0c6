"""Standby processes: started, prepared, and without a place until they replace another process.

    started ── imports, weights ──▶ ready ── another process dies ──▶ it has the place
       ▲                                                                  │
       └────────── another one, when the engines have caught up ◀─────────┘

`StandbyProcesses` says when one is started; `ChildProcesses.start` gives a place to one.
"""

import signal
import time
from collections.abc import Callable
from typing import Any, Final

from deploy.display import Display
from deploy.supervisor import exit_report
from deploy.supervisor.epochs import EpochCounter
from deploy.supervisor.processes import Child, ChildProcesses, StartError
from deploy.supervisor.recovery import Recovery
from proto.messages.lifecycle import EngineAlive, Role
from proto.settings.config import ReliabilityConfig

_FIRST_DELAY: Final = 1.0
_MAX_DELAY: Final = 300.0
_LONG_LIFE: Final = 600.0
"""Seconds after which the death of a standby process is no consequence of the one before it."""

_Slot = tuple[Role, int]
"""Role of a standby process, and its index among those of the role."""


class StandbyProcesses:
    """Keeps as many standby processes of each role as `config` wants.

    A new one is started when no process is missing and all engines have caught up with what a
    crash has interrupted. One that dies is started again after 1, 2, 4 … 300 seconds; that counts
    in no budget of restarts. Workers with weights of before a reload are replaced.
    """

    def __init__(
        self,
        children: ChildProcesses,
        epochs: EpochCounter,
        recovery: Recovery,
        config: ReliabilityConfig,
        display: Display,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._children = children
        self._epochs = epochs
        self._recovery = recovery
        self._display = display
        self._clock = clock
        numbers: dict[Role, int] = {
            "engine_core": config.standby_engines,
            "worker": config.standby_workers,
        }
        # When each was started last, and is started again
        self._started = {(role, each): 0.0 for role in numbers for each in range(numbers[role])}
        self._due = dict(self._started)
        self._delays: dict[_Slot, float] = {}
        self._caught_up: dict[int, int] = {}  # engine → epoch of the workers with which it has
        self._discarded: set[Child] = set()

    def num_ready(self, role: Role) -> int:
        """Return how many processes of a role could take a place now."""
        return sum(each.role == role and each.is_prepared for each in self._children.standby)

    def note_message(self, child: Child, message: Any) -> None:
        """Note whether an engine has caught up."""
        if isinstance(message, EngineAlive) and child.engine is not None:
            self._caught_up.pop(child.engine, None)
            if message.ready and not message.catches_up:
                self._caught_up[child.engine] = message.worker_epoch

    def start_missing(self) -> None:
        """Start those that are due, unless an engine still has to catch up."""
        if any(map(self._catches_up, range(self._epochs.num_engines))):
            return
        for slot in self._due_slots():
            if self._due[slot] > (now := self._clock()):
                continue
            self._started[slot] = now
            boot = self._epochs.make_standby_boot(*slot)
            try:
                self._children.start_standby(boot)
            except StartError as error:
                self._plan_restart(slot, boot.name, f"cannot be started: {error.reason}")

    def seconds_to_next_start(self) -> float | None:
        """Return the seconds until one is due that is not started now; None if none is."""
        due = min((self._due[slot] for slot in self._due_slots()), default=None)
        # One that is due already waits for an engine, whose message ends the sleep.
        return None if due is None or due <= self._clock() else due - self._clock()

    def discard_outdated(self) -> None:
        """Kill workers that have weights of before a reload."""
        for child in self._children.standby:
            if child.role == "worker" and (
                child.weights_generation != self._epochs.weights_generation
            ):
                self._discard(child)

    def discard_all(self) -> None:
        """Kill all: the daemon ends, and they have nothing to finish."""
        for child in self._children.standby:
            self._discard(child)

    def note_death(self, dead: Child) -> None:
        """Plan the start of another one."""
        if dead in self._discarded:
            self._discarded.remove(dead)
            return
        what = f"(pid {dead.pid}) {exit_report.describe_exit(dead)}"
        self._plan_restart((dead.role, dead.index), dead.name, what)

    def _plan_restart(self, slot: _Slot, name: str, what: str) -> None:
        now = self._clock()
        if now - self._started[slot] > _LONG_LIFE:
            self._delays.pop(slot, None)
        delay = self._delays.get(slot, _FIRST_DELAY)
        self._delays[slot] = min(_MAX_DELAY, 2 * delay)
        self._due[slot] = now + delay
        self._display.event(name, f"{what}; another is started in {delay:g} s", "WARNING")

    def _discard(self, child: Child) -> None:
        if child not in self._discarded:
            self._discarded.add(child)
            child.is_prepared = False
            child.send_signal(signal.SIGKILL)

    def _due_slots(self) -> list[_Slot]:
        taken = {(each.role, each.index) for each in self._children.standby}
        return [slot for slot in self._due if slot not in taken]

    def _catches_up(self, engine: int) -> bool:
        is_there = not self._recovery.rests(engine)
        return is_there and self._caught_up.get(engine) != self._epochs.worker_epochs[engine]
