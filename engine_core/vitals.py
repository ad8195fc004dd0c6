"""What the engine answers when the supervisor asks whether it still moves.

Owns nothing: it looks at the workers of now, and at the scheduler once there is one. The
answer names who is waited for, so that a worker that hangs is not taken for an engine
that does.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine_core.scheduler.scheduler import Scheduler
from proto.lifecycle import EngineAlive, WorkerReady


class Crewed(Protocol):
    """What is known of the workers; see `Crew`."""

    @property
    def epoch(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def num_reports(self) -> int: ...
    @property
    def awaits(self) -> tuple[int, ...]: ...
    @property
    def workers(self) -> Sequence[WorkerReady]: ...


class Vitals:
    """Of one engine, from its first moment on."""

    def __init__(self, crew: Crewed) -> None:
        self._crew = crew
        self._has_work = self._awaits_copies = _nothing_yet

    def watch(self, has_work: Callable[[], bool], awaits_copies: Callable[[], bool]) -> None:
        """From now on there is a scheduler, which may have something to do, or wait for copies."""
        self._has_work = has_work
        self._awaits_copies = awaits_copies

    def report(self) -> EngineAlive:
        """Which rank has not reported a copy is not known: each of them may be it."""
        crew = self._crew
        awaits = crew.awaits
        if not awaits and self._awaits_copies():
            awaits = tuple(worker.rank for worker in crew.workers)
        return EngineAlive(
            crew.epoch, crew.num_steps, awaits, crew.ready, self._has_work(), crew.num_reports
        )


def owes_step(scheduler: Scheduler) -> bool:
    """Whether the engine has something to do that depends on nobody else.

    Who waits for a load, or for room that a copy gives back, waits for somebody else; but as
    long as anybody runs there are steps, however many blocks are being copied.
    """
    if not scheduler.has_work:
        return False
    return bool(scheduler.running) or not scheduler.kv_transfer.keeps_waiting


def awaits_copies(scheduler: Scheduler) -> bool:
    """Whether nobody can go on before workers report a copy.

    Media that may be slow give a copy up by themselves, long before a step takes too long; so who
    reports none for so long hangs, and ends with what its copies hold.
    """
    return not scheduler.running and scheduler.kv_transfer.awaits_copies


def _nothing_yet() -> bool:
    return False
