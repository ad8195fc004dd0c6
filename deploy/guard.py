"""Sees to it that nothing hangs for long, and that the front ends know what is amiss.

Asks the processes whether they move, has those that do not cut off and taken away, and
tells the front ends whenever requests have a reason not to come here. When whoever was
taken away is gone, all goes on as after any other death (recovery.py).
"""

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from deploy.births import Births
from deploy.child import Child
from deploy.hangs import Hang, HangDetector, Process
from deploy.recovery import Recovery
from deploy.removal import Removal
from deploy.reporting import Reporter
from proto.lifecycle import (
    Alive,
    Condition,
    EngineAlive,
    EngineReady,
    FrontEndReady,
    NotReady,
    Ping,
)

Source = Callable[[], Sequence[NotReady]]
"""Somebody who knows reasons for requests not to come here."""


class Guard:
    """Of a daemon that is not ending.

    sources: of reasons beside those that are found here.
    """

    def __init__(
        self,
        detector: HangDetector,
        births: Births,
        recovery: Recovery,
        reporter: Reporter,
        sources: Sequence[Source] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._detector = detector
        self._births = births
        self._recovery = recovery
        self._reporter = reporter
        self._sources = (detector.not_ready, recovery.not_ready, self._not_ready, *sources)
        self._clock = clock
        self._watched: dict[Process, Child] = {}
        self._removals: list[Removal] = []
        self._told: dict[Child, Condition] = {}

    @property
    def copes(self) -> bool:
        """False where a process cannot be ended: only a restart of everything is left."""
        return not any(each.overdue for each in self._removals)

    def hear(self, child: Child, message: Any) -> None:
        """A process said something."""
        if self._watched.get(_process(child)) is not child:
            return
        if isinstance(message, Alive | EngineAlive):
            self._detector.note_answer(_process(child))
        elif isinstance(message, EngineReady | FrontEndReady):
            self._detector.note_ready(_process(child))
        else:
            self._detector.note_sign(_process(child))
        if isinstance(message, EngineAlive):
            self._detector.note_engine(message, self._births.worker_epoch)

    def turn(self, running: Sequence[Child], recovers: Callable[[Child], bool]) -> None:
        """Do what is due.

        running: all processes, one of each kind. recovers: whether who dies is followed by
        another one, by `Recovery`.
        """
        self._meet(running)
        for process in self._detector.take_questions():
            self._watched[process].tell(Ping())
        for hang in self._detector.hangs():
            self._remove(hang, running, recovers)
        self._removals = [each for each in self._removals if not each.done]
        for removal in self._removals:
            removal.press()
        self._tell_front_ends(running)

    def seconds_to_next(self) -> float:
        """How long nothing is due."""
        steps = [each.seconds_to_next_step() for each in self._removals]
        return min(each for each in (self._detector.interval, *steps) if each is not None)

    def _meet(self, running: Sequence[Child]) -> None:
        """Whoever is new is watched, whoever is gone no longer."""
        now = {_process(child): child for child in running}
        for process, child in list(self._watched.items()):
            if now.get(process) is not child:
                self._detector.end(process)
                self._told.pop(child, None)
                del self._watched[process]
        for process, child in now.items():
            if process not in self._watched:
                self._detector.begin(process)
                self._watched[process] = child

    def _remove(
        self, hang: Hang, running: Sequence[Child], recovers: Callable[[Child], bool]
    ) -> None:
        child = self._watched[hang.process]
        self._detector.condemn(hang.process)
        self._reporter.notice(
            f"(pid {child.pid}) hangs, {hang.what} for {hang.seconds:.1f} s: "
            "it shows its stacks and is killed",
            child.name,
        )
        if recovers(child):
            for role, message in self._recovery.cut_off(child):
                for other in running:
                    if other.role == role:
                        other.tell(message)
        self._removals.append(Removal(child, self._clock))

    def _not_ready(self) -> list[NotReady]:
        return [NotReady(f"{each.name} hangs and is killed", each.since) for each in self._removals]

    def _tell_front_ends(self, running: Sequence[Child]) -> None:
        condition = Condition(tuple(chain.from_iterable(source() for source in self._sources)))
        for child in running:
            if child.role == "api_server" and self._told.get(child, Condition()) != condition:
                self._told[child] = condition
                child.tell(condition)


def _process(child: Child) -> Process:
    return child.role, child.index
