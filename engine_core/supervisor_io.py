"""The engine's side of its channel to the supervisor: commands, heartbeats, health reports.

Commands are kept until the busy loop acts on them. A `Ping` is answered at once.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine_core.scheduler.scheduler import Scheduler
from proto.codec import Message
from proto.lifecycle import (
    Alive,
    EngineAlive,
    Heartbeat,
    NewFrontEnd,
    NewWorkers,
    Paused,
    Ping,
    Shutdown,
)
from proto.sockets import Link

if TYPE_CHECKING:
    from engine_core.executor.worker_group import WorkerGroup

HEARTBEAT_SECONDS: Final = 0.5
"""Between two heartbeats; the first step of new workers is reported at once."""


class HeartbeatSender:
    """Reports completed steps to the supervisor, which counts them as progress."""

    def __init__(self, supervisor: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self._supervisor = supervisor
        self._clock = clock
        self._due = 0.0
        self._worker_epoch = 0

    def beat(self, worker_epoch: int, step: int) -> None:
        """Report that `step` is complete, at most once in HEARTBEAT_SECONDS."""
        now = self._clock()
        if now >= self._due or worker_epoch != self._worker_epoch:
            self._due = now + HEARTBEAT_SECONDS
            self._worker_epoch = worker_epoch
            self._supervisor.send(Heartbeat(worker_epoch, step))


class HealthReport:
    """The engine's answer to a Ping: completed steps, and the ranks that owe a result.

    Naming the ranks keeps the supervisor from blaming the engine for a worker that hangs.
    """

    def __init__(self, crew: "WorkerGroup") -> None:
        self._crew = crew
        self._has_work = self._awaits_copies = _nothing_yet

    def watch(self, has_work: Callable[[], bool], awaits_copies: Callable[[], bool]) -> None:
        """Include the scheduler's state in reports from now on."""
        self._has_work = has_work
        self._awaits_copies = awaits_copies

    def report(self) -> EngineAlive:
        """Return the report; if all work waits for KV copies, it names every rank."""
        crew = self._crew
        awaits = crew.awaits
        if not awaits and self._awaits_copies():
            awaits = tuple(worker.rank for worker in crew.workers)
        return EngineAlive(
            crew.epoch, crew.num_steps, awaits, crew.ready, self._has_work(), crew.num_reports
        )


def owes_step(scheduler: Scheduler) -> bool:
    """Return whether the engine has work that does not wait for a KV transfer.

    Waiting requests may wait for a load, or for blocks that a copy holds; a running request always
    leads to a step.
    """
    if not scheduler.has_work:
        return False
    return bool(scheduler.running) or not scheduler.kv_transfer.keeps_waiting


def awaits_copies(scheduler: Scheduler) -> bool:
    """Return whether no request can continue before workers report a copy.

    Slow media give up a copy by themselves long before --step-timeout, so workers that report
    nothing for that long are considered hung.
    """
    return not scheduler.running and scheduler.kv_transfer.awaits_copies


def _nothing_yet() -> bool:
    return False


class SupervisorCommands:
    """Commands of the supervisor. stopped: `Shutdown` was received. report: makes the answer to a
    Ping."""

    def __init__(self, link: Link, report: Callable[[], Message] = Alive) -> None:
        self.link = link
        self.stopped = False
        self._report = report
        self._worker_epochs: list[int] = []
        self._front_ends: list[NewFrontEnd] = []
        self._pauses: list[Paused] = []

    def receive(self) -> bool:
        """Take in what has arrived; whether there is anything to do but for what is done here."""
        messages = self.link.receive()
        for message in messages:
            if isinstance(message, Ping):
                self.link.send(self._report())
            elif isinstance(message, Shutdown):
                self.stopped = True
            elif isinstance(message, NewWorkers):
                self._worker_epochs.append(message.worker_epoch)
            elif isinstance(message, NewFrontEnd):
                self._front_ends.append(message)
            elif isinstance(message, Paused):
                self._pauses.append(message)
        return not all(isinstance(each, Ping) for each in messages)

    def take_worker_epochs(self) -> list[int]:
        """The epochs of workers that take over, the last of which counts."""
        if not self._worker_epochs:
            return self._worker_epochs
        taken, self._worker_epochs = self._worker_epochs, []
        return taken

    def take_front_ends(self) -> list[NewFrontEnd]:
        """The front ends that take the place of others."""
        taken, self._front_ends = self._front_ends, []
        return taken

    def take_pauses(self) -> list[Paused]:
        """What the engine of now was told by its operators, for one that is left to do as well."""
        taken, self._pauses = self._pauses, []
        return taken
