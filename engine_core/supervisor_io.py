"""The engine's side of its channel to the supervisor: commands, health reports, heartbeats.

Owns the commands until the busy loop carries them out. A `Ping` is answered as soon as it is
received.
"""

import time
from collections.abc import Callable
from typing import Final

from engine_core.scheduler.scheduler import Scheduler
from engine_core.worker_group import WorkerGroup
from proto.messages.engine_io import PauseMode
from proto.messages.lifecycle import (
    EngineAlive,
    FrontEndStalled,
    Heartbeat,
    NewFrontEnd,
    NewWorkers,
    Notice,
    Paused,
    Ping,
    Shutdown,
)
from proto.messages.lora import AdapterList
from proto.runtime.sockets import Link

HEARTBEAT_SECONDS: Final = 0.5
"""Least time between two heartbeats, except that the first step of new workers is reported."""


class SupervisorIO:
    """Receives commands of the supervisor and reports to it.

    link: the channel. is_stopped: whether `Shutdown` was received.
    scheduler: read for health reports; None until the workers have loaded.
    clock: seconds, for heartbeats.
    """

    def __init__(
        self,
        link: Link,
        workers: WorkerGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = link
        self.is_stopped = False
        self.scheduler: Scheduler | None = None
        self._workers = workers
        self._clock = clock
        self._new_worker_epochs: list[int] = []
        self._new_front_ends: list[NewFrontEnd] = []
        self._pauses: list[Paused] = []
        self._adapter_lists: list[AdapterList] = []
        self._next_heartbeat = 0.0
        self._heartbeat_epoch = 0

    def receive_commands(self) -> bool:
        """Receive commands and answer pings. Return whether a command other than Ping came."""
        messages = self.link.receive()
        for message in messages:
            if isinstance(message, Ping):
                self.link.send(self.health_report())
            elif isinstance(message, Shutdown):
                self.is_stopped = True
            elif isinstance(message, NewWorkers):
                self._new_worker_epochs.append(message.worker_epoch)
            elif isinstance(message, NewFrontEnd):
                self._new_front_ends.append(message)
            elif isinstance(message, Paused):
                self._pauses.append(message)
            elif isinstance(message, AdapterList):
                self._adapter_lists.append(message)
        return not all(isinstance(message, Ping) for message in messages)

    def pop_worker_epochs(self) -> list[int]:
        """Return the epochs of new workers, of which only the last is alive; empties the list."""
        epochs, self._new_worker_epochs = self._new_worker_epochs, []
        return epochs

    def pop_front_ends(self) -> list[NewFrontEnd]:
        front_ends, self._new_front_ends = self._new_front_ends, []
        return front_ends

    def pop_pauses(self) -> list[Paused]:
        """Return the pauses that this engine takes over from another one; empties the list."""
        pauses, self._pauses = self._pauses, []
        return pauses

    def pop_adapter_lists(self) -> list[AdapterList]:
        """Return the adapters that this engine takes over from another one; empties the list."""
        lists, self._adapter_lists = self._adapter_lists, []
        return lists

    def health_report(self) -> EngineAlive:
        """Return the answer to a Ping: completed steps, and the ranks that owe a result.

        The ranks are named so that the supervisor does not blame the engine for a hung worker.
        Slow media give up a copy long before --step-timeout, so if all requests wait for copies,
        every rank is named.
        """
        workers, scheduler = self._workers, self.scheduler
        awaited = workers.awaited_ranks
        if not awaited and scheduler is not None and awaits_copies(scheduler):
            awaited = tuple(worker.rank for worker in workers.workers)
        has_work = scheduler is not None and owes_step(scheduler)
        return EngineAlive(
            workers.epoch,
            workers.num_steps,
            awaited,
            workers.is_ready,
            has_work,
            workers.num_kv_reports,
            scheduler is None or scheduler.crash_isolation.is_catching_up,
        )

    def send_heartbeat(self, worker_epoch: int, step: int) -> None:
        """Report a completed step, at most once in HEARTBEAT_SECONDS."""
        now = self._clock()
        if now >= self._next_heartbeat or worker_epoch != self._heartbeat_epoch:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            self._heartbeat_epoch = worker_epoch
            self.link.send(Heartbeat(worker_epoch, step))

    def report_pause(self, mode: PauseMode | None) -> None:
        """Report that the engine was paused, or resumed (None), so that a successor is, too."""
        self.link.send(Paused(mode))

    def report_stalled_front_end(self, front_end: int, incarnation: int, num_aborted: int) -> None:
        """Ask the supervisor to replace a front end that does not read its messages."""
        self.link.send(
            Notice(
                f"front end {front_end} does not read its messages: it is replaced, "
                f"and its {num_aborted} requests are aborted",
                is_warning=True,
            )
        )
        self.link.send(FrontEndStalled(front_end, incarnation))


def owes_step(scheduler: Scheduler) -> bool:
    """Return whether the engine has work that does not wait for a KV transfer.

    Waiting requests may wait for a load, or for blocks that a copy holds; a running request always
    leads to a step.
    """
    if not scheduler.has_work:
        return False
    return bool(scheduler.running) or not scheduler.kv_transfer.keeps_waiting


def awaits_copies(scheduler: Scheduler) -> bool:
    """Return whether no request can continue before workers report the end of a KV copy."""
    return not scheduler.running and scheduler.kv_transfer.awaits_copies
