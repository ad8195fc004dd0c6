"""The time between the word that the daemon is to end and its end: requests finish.

Owns the deadline, and what front ends have said of requests under way. Ends nothing itself.
"""

import time
from collections.abc import Callable, Iterable

from deploy.reporting import Reporter
from proto.lifecycle import UnderWay


class NotDraining:
    """Requests are taken."""

    begun = over = False

    def note(self, message: UnderWay) -> None:
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

    def note(self, message: UnderWay) -> None:
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
