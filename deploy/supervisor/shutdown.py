"""The time between the word that the daemon is to end and its end: requests finish.

Owns the deadline, and what front ends have said of requests under way. Ends nothing itself.
"""

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from deploy.display import Reporter
from deploy.supervisor.processes import Child
from proto.lifecycle import DrainProgress


class NotDraining:
    """Requests are taken."""

    begun = over = False

    def note(self, message: DrainProgress) -> None:
        """A late word of nothing."""

    def seconds_left(self) -> float | None:
        """There is nothing to wait for."""
        return None

    def report_left(self) -> None:
        """Nothing is known of requests."""


class Draining:
    """One drain: over when no front end answers a request any more, or when the time is.

    front_ends: their indices. seconds: that requests have.
    """

    begun = True

    def __init__(
        self,
        front_ends: Iterable[int],
        seconds: float,
        reporter: Reporter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._under_way: dict[int, int | None] = dict.fromkeys(front_ends)
        self._seconds = seconds
        self._reporter = reporter
        self._clock = clock
        self._deadline = clock() + seconds
        self._told = False

    @property
    def over(self) -> bool:
        """Nobody is served any more, or nobody is waited for."""
        return not any(each != 0 for each in self._under_way.values()) or self._timed_out

    def note(self, message: DrainProgress) -> None:
        """A front end says how many requests it still answers; one that is new has none."""
        self._under_way[message.index] = message.num_requests
        numbers = [each for each in self._under_way.values() if each is not None]
        if not self._told and sum(numbers) and len(numbers) == len(self._under_way):
            self._told = True
            self._reporter.notice(
                f"{_requests(sum(numbers))} under way may finish within {self._seconds:g} s, "
                "new ones are refused; a second signal aborts them"
            )

    def seconds_left(self) -> float | None:
        return max(0.0, self._deadline - self._clock())

    def report_left(self) -> None:
        """At the end: say what is aborted, if anything is."""
        left = sum(each or 0 for each in self._under_way.values())
        if left:
            self._reporter.notice(f"{_requests(left)} not finished: aborted")

    @property
    def _timed_out(self) -> bool:
        return self._clock() >= self._deadline


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"


# How the daemon ends: ask, then insist, then force, each at its time.


@dataclass(frozen=True)
class ShutdownLimits:
    """Seconds from asking until SIGTERM and until SIGKILL."""

    until_terminate: float
    until_kill: float


ON_REQUEST: Final = ShutdownLimits(2.0, 4.0)
AFTER_A_DEATH: Final = ShutdownLimits(0.5, 1.5)


class NotEnding:
    """The daemon goes on."""

    begun = False

    def seconds_to_next_step(self) -> float | None:
        """There is no step to wait for."""
        return None

    def press(self) -> None:
        """Nothing."""

    def force(self) -> None:
        """Nothing."""

    def caused(self, exit_status: int | None) -> bool:
        """No end is ours."""
        return False


class Ending:
    """One ending of all processes; making it asks them to end."""

    begun = True

    def __init__(
        self,
        processes: Iterable[Child],
        limits: ShutdownLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = tuple(processes)
        self._clock = clock
        begin = clock()
        self._steps = [
            (begin + limits.until_terminate, signal.SIGTERM),
            (begin + limits.until_kill, signal.SIGKILL),
        ]
        self._sent: set[signal.Signals] = set()
        for process in self._processes:
            process.ask_to_end()

    def seconds_to_next_step(self) -> float | None:
        """How long nothing but waiting is left to do; None when no step is left."""
        return max(0.0, self._steps[0][0] - self._clock()) if self._steps else None

    def press(self) -> None:
        """Take the steps whose time has come."""
        while self._steps and self._steps[0][0] <= self._clock():
            self._send(self._steps.pop(0)[1])

    def force(self) -> None:
        """End everything now."""
        self._steps.clear()
        self._send(signal.SIGKILL)

    def caused(self, exit_status: int | None) -> bool:
        """Whether an end with this status is what was asked or forced here."""
        return exit_status == 0 or any(exit_status == -number for number in self._sent)

    def _send(self, number: signal.Signals) -> None:
        self._sent.add(number)
        for process in self._processes:
            process.signal(number)
