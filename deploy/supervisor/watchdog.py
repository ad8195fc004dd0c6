"""Pings processes, kills those that hang, and tells the API servers why the daemon is not ready.

After a hanging process was killed, recovery.py and reload.py handle its exit as any other.

    API servers                                     one detector
    engine, workers of the current generation       one
    engine, workers of another one (in a reload)    one, without effect on readiness
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
    EngineAlive,
    EngineReady,
    FrontEndReady,
    HealthStatus,
    NotReady,
    Ping,
    WaitingForRanks,
)

# A process that hangs prints its stacks and is killed:
#
#     disconnected ── 0.1 s ──▶ SIGUSR1, SIGCONT ── 0.5 s ──▶ SIGKILL
#
# The others disconnect from it first, because a process that was only stopped continues to run
# while it prints its stacks.


CUT_OFF_SECONDS: Final = 0.1
"""Time for the other processes to disconnect from it."""
STACKS_SECONDS: Final = 0.5
"""Time for the signal handler, in a process that may rarely be scheduled."""
_PATIENCE_SECONDS: Final = 10.0


class Removal:
    """Removal of one hanging process. since: time at which the others were told to disconnect."""

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
        """Whether the process has ended."""
        return self._process.has_ended()

    @property
    def overdue(self) -> bool:
        """Whether the process still exists long after SIGKILL, stuck in the kernel."""
        return self._clock() - self.since > _PATIENCE_SECONDS and not self.done

    def seconds_to_next_step(self) -> float | None:
        """Seconds until the next signal; None after the last one."""
        return max(0.0, self._steps[0][0] - self._clock()) if self._steps else None

    def press(self) -> None:
        """Send the signals that are due."""
        while self._steps and self._steps[0][0] <= self._clock():
            self._steps.pop(0)[1]()


Source = Callable[[], Iterable[NotReady]]
"""Returns reasons why the daemon is not ready."""

_FRONT_ENDS: Final = 0
"""Used as the generation of API servers, which belong to none."""


class Watchdog:
    """Watches all processes of a daemon until its shutdown.

    sources: further reasons why the daemon is not ready.
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
        self._told: dict[Child, HealthStatus] = {}

    @property
    def copes(self) -> bool:
        """Whether all hanging processes could be killed; if not, restart the whole daemon."""
        return not any(each.overdue for each in self._removals.values())

    def hear(self, child: Child, message: Any) -> None:
        """Take a message of a process into account."""
        place = _place(child)
        if self._watched.get(place) is not child:
            return
        generation, process = place
        detector = self._detectors[generation]
        if isinstance(message, Alive | EngineAlive):
            detector.note_answer(process)
        elif isinstance(message, EngineReady | FrontEndReady):
            detector.note_ready(process)
        elif isinstance(message, WaitingForRanks):
            detector.note_awaits_ranks(process)
        else:
            detector.note_sign(process)
        if isinstance(message, EngineAlive):
            # workers are replaced only in the current generation
            is_of_now = self._epochs.is_of_now(child)
            epoch = self._epochs.worker_epoch if is_of_now else message.worker_epoch
            detector.note_engine(message, epoch)

    def turn(self, watched: Sequence[Child], cut_off: Callable[[Child], None]) -> None:
        """Send pings, start and continue removals, and report readiness; call it in every loop.

        watched: all processes that were not asked to exit.
        cut_off: makes the other processes disconnect from one that will be killed.
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
        """Seconds until the next call is needed."""
        steps = [each.seconds_to_next_step() for each in self._removals.values()]
        return min(each for each in (self._limits.interval, *steps) if each is not None)

    def _meet(self, watched: Sequence[Child]) -> None:
        """Begin to watch new processes, and stop watching ended ones."""
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
        condition = HealthStatus(tuple(chain.from_iterable(source() for source in self._sources)))
        for child in watched:
            if child.role == "api_server" and self._told.get(child, HealthStatus()) != condition:
                self._told[child] = condition
                child.tell(condition)


def _place(child: Child) -> tuple[int, Process]:
    generation = _FRONT_ENDS if child.role == "api_server" else child.generation
    return generation, (child.role, child.index)
