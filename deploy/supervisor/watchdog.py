"""Sees to it that nothing hangs for long, and that the front ends know what is amiss.

Asks the processes whether they move, has those that do not cut off and taken away, and
tells the front ends whenever requests have a reason not to come here. When whoever was
taken away is gone, all goes on as after any other death (recovery.py, reload.py).

    front ends                        one detector
    engine, workers of now            one
    engine, workers that come or go   one, and nothing of theirs is a reason not to come
"""

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from deploy.display import Reporter
from deploy.supervisor.epochs import EpochCounter
from deploy.supervisor.hang_detector import Hang, HangDetector, Limits, Process
from deploy.supervisor.processes import Child
from deploy.supervisor.recovery import Recovery
from proto.lifecycle import (
    Alive,
    AwaitsRanks,
    Condition,
    EngineAlive,
    EngineReady,
    FrontEndReady,
    NotReady,
    Ping,
)

# How a process that hangs is taken away: it shows where it is, and then it is killed.
#
#     cut off ── 0.1 s ──▶ SIGUSR1, SIGCONT ── 0.5 s ──▶ SIGKILL
#
# It is cut off from the others before anything is done to it, because one that was only
# stopped goes on where it was for the moment in which it shows its stacks.


CUT_OFF_SECONDS: Final = 0.1
"""For the others to hear that they have nothing to do with it any more."""
STACKS_SECONDS: Final = 0.5
"""For a handler to run in a process that may not be scheduled often."""
_PATIENCE_SECONDS: Final = 10.0


class Removal:
    """Of one process, from the moment at which the others have been told. since: that moment."""

    def __init__(self, process: Child, clock: Callable[[], float] = time.monotonic) -> None:
        self._process = process
        self._clock = clock
        self.since = clock()
        until_stacks = self.since + CUT_OFF_SECONDS
        self._steps = [
            (until_stacks, process.show_stacks),
            (until_stacks + STACKS_SECONDS, lambda: process.signal(signal.SIGKILL)),
        ]

    @property
    def done(self) -> bool:
        """It is gone."""
        return self._process.has_ended()

    @property
    def overdue(self) -> bool:
        """Killed long ago and still there: it is stuck in the kernel, and nothing here helps."""
        return self._clock() - self.since > _PATIENCE_SECONDS and not self.done

    def seconds_to_next_step(self) -> float | None:
        """None when nothing is left but waiting."""
        return max(0.0, self._steps[0][0] - self._clock()) if self._steps else None

    def press(self) -> None:
        """Take the steps whose time has come."""
        while self._steps and self._steps[0][0] <= self._clock():
            self._steps.pop(0)[1]()


Source = Callable[[], Iterable[NotReady]]
"""Somebody who knows reasons for requests not to come here."""

_FRONT_ENDS: Final = 0
"""In the place of a generation: they outlive each."""


class Watchdog:
    """Of a daemon that is not ending.

    sources: of reasons beside those that are found here.
    """

    def __init__(
        self,
        limits: Limits,
        epochs: EpochCounter,
        recovery: Recovery,
        reporter: Reporter,
        sources: Sequence[Source] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._epochs = epochs
        self._reporter = reporter
        self._sources = (self._not_ready, recovery.not_ready, *sources)
        self._clock = clock
        self._detectors: dict[int, HangDetector] = {}
        self._watched: dict[tuple[int, Process], Child] = {}
        self._removals: dict[Child, Removal] = {}
        self._told: dict[Child, Condition] = {}

    @property
    def copes(self) -> bool:
        """False where a process cannot be ended: only a restart of everything is left."""
        return not any(each.overdue for each in self._removals.values())

    def hear(self, child: Child, message: Any) -> None:
        """A process said something."""
        place = _place(child)
        if self._watched.get(place) is not child:
            return
        generation, process = place
        detector = self._detectors[generation]
        if isinstance(message, Alive | EngineAlive):
            detector.note_answer(process)
        elif isinstance(message, EngineReady | FrontEndReady):
            detector.note_ready(process)
        elif isinstance(message, AwaitsRanks):
            detector.note_awaits_ranks(process)
        else:
            detector.note_sign(process)
        if isinstance(message, EngineAlive):
            # nobody is replaced in another generation than that of now
            is_of_now = self._epochs.is_of_now(child)
            epoch = self._epochs.worker_epoch if is_of_now else message.worker_epoch
            detector.note_engine(message, epoch)

    def turn(self, watched: Sequence[Child], cut_off: Callable[[Child], None]) -> None:
        """Do what is due.

        watched: all processes but those that were asked to end; one of each kind in a generation.
        cut_off: has the others let go of one that will be killed.
        """
        self._meet(watched)
        for generation, detector in self._detectors.items():
            for process in detector.take_questions():
                self._watched[generation, process].tell(Ping())
            for hang in detector.hangs():
                detector.condemn(hang.process)
                self._remove(self._watched[generation, hang.process], hang, cut_off)
        self._removals = {of: each for of, each in self._removals.items() if not each.done}
        for removal in self._removals.values():
            removal.press()
        self._tell_front_ends(watched)

    def seconds_to_next(self) -> float:
        """How long nothing is due."""
        steps = [each.seconds_to_next_step() for each in self._removals.values()]
        return min(each for each in (self._limits.interval, *steps) if each is not None)

    def _meet(self, watched: Sequence[Child]) -> None:
        """Whoever is new is watched, whoever is gone no longer."""
        now = {_place(child): child for child in watched}
        for place, child in list(self._watched.items()):
            if now.get(place) is not child:
                generation, process = place
                self._detectors[generation].end(process)
                self._told.pop(child, None)
                del self._watched[place]
        self._detectors = {
            generation: self._detectors.get(generation) or HangDetector(self._limits, self._clock)
            for generation, _ in now
        }
        for place, child in now.items():
            if place not in self._watched:
                generation, process = place
                self._detectors[generation].begin(process)
                self._watched[place] = child

    def _remove(self, child: Child, hang: Hang, cut_off: Callable[[Child], None]) -> None:
        self._reporter.notice(
            f"(pid {child.pid}) hangs, {hang.what} for {hang.seconds:.1f} s: "
            "it shows its stacks and is killed",
            child.name,
        )
        cut_off(child)
        self._removals[child] = Removal(child, self._clock)

    def _not_ready(self) -> Iterator[NotReady]:
        detector = self._detectors.get(self._epochs.generation)
        if detector is not None:
            yield from detector.not_ready()
        for child, removal in self._removals.items():
            if self._epochs.is_of_now(child):
                yield NotReady(f"{child.name} hangs and is killed", removal.since)

    def _tell_front_ends(self, watched: Sequence[Child]) -> None:
        condition = Condition(tuple(chain.from_iterable(source() for source in self._sources)))
        for child in watched:
            if child.role == "api_server" and self._told.get(child, Condition()) != condition:
                self._told[child] = condition
                child.tell(condition)


def _place(child: Child) -> tuple[int, Process]:
    generation = _FRONT_ENDS if child.role == "api_server" else child.generation
    return generation, (child.role, child.index)
