"""Reloads, one after the other: another generation of engine and workers, no request lost.

Owns whether one is wanted, and which phase (reload_phases.py) the present one is in.
"""

import time
from collections.abc import Callable
from typing import Protocol

from deploy.reload.actions import ProcessActions
from deploy.reload.phases import Idle, Phase, Preparing, ReloadContext
from deploy.supervisor.epochs import EpochCounter
from deploy.supervisor.processes import Child
from deploy.supervisor.recovery import Recovery
from proto.codec import Message


class News(Protocol):
    """Who hears how a reload goes."""

    def reload_begins(self) -> None: ...

    def reload_waits(self, reason: str) -> None:
        """It was asked for, and cannot begin yet."""
        ...

    def reload_ends(self, problem: str, seconds: float, *, another: bool) -> None:
        """problem: why the old generation goes on, or "". another: one more follows."""
        ...


class Reload:
    """At most one is under way, and at most one more is wanted."""

    def __init__(
        self,
        epochs: EpochCounter,
        recovery: Recovery,
        actions: ProcessActions,
        news: News,
        strategy: str,
        num_front_ends: int,
        num_workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epochs = epochs
        self._recovery = recovery
        self._news = news
        self._clock = clock
        self._wanted = False
        self._allowed = True
        self._begun_at = 0.0
        surface = ReloadContext(
            epochs,
            recovery,
            actions,
            strategy,
            num_front_ends,
            num_workers,
            clock,
            self._conclude,
        )
        self._surface = surface
        self._phase: Phase = Idle(surface)

    def ask(self) -> None:
        """Somebody wants one; it begins as soon as it can."""
        if not self._allowed:
            self._news.reload_waits("the daemon is about to end: there is no reload")
        elif self._wanted:
            self._news.reload_waits("a reload is under way and another one follows it already")
        elif not self._phase.idle:
            self._news.reload_waits("a reload is under way: another one follows it")
        elif self._recovery.has_gaps:
            self._news.reload_waits("a reload follows when all processes are back")
        self._wanted = self._allowed

    def press(self) -> None:
        """Do what has become due."""
        self._phase = self._phase.press()
        if self._wanted and self._phase.idle and not self._recovery.has_gaps:
            self._wanted = False
            self._begun_at = self._clock()
            self._news.reload_begins()
            self._begin()

    def seconds_left(self) -> float | None:
        """How long nothing is to do though nothing happens; None for ever."""
        return self._phase.seconds_left()

    def is_of_now(self, process: Child) -> bool:
        """Neither of a generation that comes nor of one that goes."""
        return self._epochs.is_of_now(process)

    def is_ending(self, process: Child) -> bool:
        """It was asked to end, and will be made to."""
        return self._phase.is_ending(process)

    def note(self, message: Message) -> None:
        """What a process says of itself."""
        self._phase = self._phase.note(message)

    def owns(self, process: Child) -> bool:
        """Whether its death would be our affair, and nobody else's."""
        return self._phase.owns(process)

    def cut_off(self, hung: Child) -> bool:
        """It hangs and will be killed; True when nobody else needs to do anything about it."""
        owned = self.owns(hung)
        self._phase = self._phase.cut_off(hung)
        return owned

    def note_death(self, dead: Child) -> bool:
        """Of any process; True when nobody else needs to do anything about it."""
        owned = self.owns(dead)
        self._phase = self._phase.note_death(dead)
        return owned

    def give_up(self, why: str) -> None:
        """The daemon is about to end: nothing more is begun."""
        self._allowed = self._wanted = False
        self._phase = self._phase.give_up(why)

    def _begin(self) -> None:
        try:
            self._phase = Preparing(self._surface)
        except OSError as error:
            self._conclude(f"no process could be started: {error.strerror}", False)

    def _conclude(self, problem: str, again: bool) -> None:
        self._wanted = self._wanted or (again and self._allowed)
        seconds = self._clock() - self._begun_at
        self._news.reload_ends(problem, seconds, another=self._wanted)


class NoReload:
    """Before there is anything to load again."""

    def ask(self) -> None:
        """Nothing."""

    def press(self) -> None:
        """Nothing."""

    def seconds_left(self) -> float | None:
        """For ever."""
        return None

    def is_of_now(self, process: Child) -> bool:
        """There is one generation."""
        return True

    def is_ending(self, process: Child) -> bool:
        """Nobody is replaced."""
        return False

    def note(self, message: Message) -> None:
        """Nothing."""

    def owns(self, process: Child) -> bool:
        """Nobody's."""
        return False

    def cut_off(self, hung: Child) -> bool:
        """Not our affair."""
        return False

    def note_death(self, dead: Child) -> bool:
        """Not our affair."""
        return False

    def give_up(self, why: str) -> None:
        """Nothing."""
