"""What the engine answers when the supervisor asks whether it still moves.

Owns nothing: it looks at the workers of now, and at the scheduler once there is one. The
answer names who is waited for, so that a worker that hangs is not taken for an engine
that does.
"""

from collections.abc import Callable
from typing import Protocol

from engine_core.scheduler.scheduler import Scheduler
from proto.lifecycle import EngineAlive


class Crewed(Protocol):
    """What is known of the workers; see `Crew`."""

    @property
    def epoch(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def awaits(self) -> tuple[int, ...]: ...


class Vitals:
    """Of one engine, from its first moment on."""

    def __init__(self, crew: Crewed) -> None:
        self._crew = crew
        self._has_work: Callable[[], bool] = _nothing_yet

    def watch(self, has_work: Callable[[], bool]) -> None:
        """From now on there is a scheduler, which may have something to do."""
        self._has_work = has_work

    def report(self) -> EngineAlive:
        crew = self._crew
        return EngineAlive(crew.epoch, crew.num_steps, crew.awaits, crew.ready, self._has_work())


def owes_step(scheduler: Scheduler) -> bool:
    """Whether the engine has something to do that depends on nobody else.

    Who waits for a load, or for room that a copy gives back, waits for somebody else; but as
    long as anybody runs there are steps, however many blocks are being copied.
    """
    if not scheduler.has_work:
        return False
    return bool(scheduler.running) or not scheduler.external.keeps_waiting


def _nothing_yet() -> bool:
    return False
