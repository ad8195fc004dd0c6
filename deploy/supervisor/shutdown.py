"""The end of a daemon: `RequestDrain` waits for requests, `ShutdownSequence` ends processes."""

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from deploy.display import Display
from deploy.supervisor.processes import Child
from proto.messages.lifecycle import DrainProgress

_COUNT_SECONDS: Final = 0.2
"""Time for front ends to report their counts; after it the drain's message has no number."""


class RequestDrain:
    """The time in which open requests finish while new ones are refused. Ends no
    process itself.

    front_ends: indices of the front ends. seconds: how long requests may take.
    """

    def __init__(
        self,
        front_ends: Iterable[int],
        seconds: float,
        display: Display,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_open: dict[int, int | None] = dict.fromkeys(front_ends)
        self._display = display
        self._clock = clock
        now = clock()
        self._count_deadline = now + _COUNT_SECONDS
        self._deadline = now + seconds
        self._seconds = seconds
        self._reported = False

    @property
    def done(self) -> bool:
        """Whether all requests have finished, or the time is up."""
        return self._all_finished or self._clock() >= self._deadline

    def note_progress(self, message: DrainProgress) -> None:
        """Note the open requests of a front end; a restarted one has none."""
        self._num_open[message.index] = message.num_requests

    def report_begin(self) -> None:
        """Say once what is waited for, when the front ends have counted it or are late."""
        is_due = None not in self._num_open.values() or self._clock() >= self._count_deadline
        if not self._reported and is_due:
            self._reported = True
            if not self._all_finished:
                self._report(self._seconds)

    def report_again(self) -> None:
        """Say what is waited for now: a signal has come after a drain by an operator's request."""
        self._reported = True
        self._report(self._deadline - self._clock())

    def seconds_to_next_step(self) -> float:
        """Return the seconds until the next call of `report_begin`, or until the time is up."""
        due = self._deadline if self._reported else min(self._deadline, self._count_deadline)
        return max(0.0, due - self._clock())

    def report_unfinished(self) -> None:
        """Print how many requests are aborted, if any."""
        if self._num_known:
            self._display.notice(
                f"{_requests(self._num_known)} not finished: aborted", level="WARNING"
            )

    @property
    def _num_known(self) -> int:
        return sum(number or 0 for number in self._num_open.values())

    @property
    def _all_finished(self) -> bool:
        return all(number == 0 for number in self._num_open.values())

    def _report(self, seconds: float) -> None:
        is_counted = None not in self._num_open.values()
        what = f"{_requests(self._num_known)} in flight" if is_counted else "open requests"
        self._display.notice(
            f"{what} may finish within {max(0.0, seconds):.3g} s, new ones are refused; "
            "a second Ctrl-C or SIGTERM aborts them",
            requests_in_flight=self._num_known,
            seconds=round(seconds, 3),
        )


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"


@dataclass(frozen=True)
class ShutdownLimits:
    """Seconds from the Shutdown message until SIGTERM and until SIGKILL."""

    until_terminate: float
    until_kill: float


ON_REQUEST: Final = ShutdownLimits(2.0, 4.0)
AFTER_FAILURE: Final = ShutdownLimits(0.5, 1.5)


class DueSignals:
    """Signals at fixed times. due: clock time and action of each, in order."""

    def __init__(
        self, due: Iterable[tuple[float, Callable[[], None]]], clock: Callable[[], float]
    ) -> None:
        self._due = list(due)
        self._clock = clock

    def seconds_to_next_signal(self) -> float | None:
        """Return the seconds until the next signal; None after the last one."""
        return max(0.0, self._due[0][0] - self._clock()) if self._due else None

    def send_due_signals(self) -> None:
        while self._due and self._due[0][0] <= self._clock():
            self._due.pop(0)[1]()


class ShutdownSequence(DueSignals):
    """Ends processes: Shutdown at once, SIGTERM and SIGKILL later if they still run."""

    def __init__(
        self,
        processes: Iterable[Child],
        limits: ShutdownLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = tuple(processes)
        begin = clock()
        due = [
            (begin + limits.until_terminate, partial(self._send, signal.SIGTERM)),
            (begin + limits.until_kill, partial(self._send, signal.SIGKILL)),
        ]
        super().__init__(due, clock)
        self._sent: set[signal.Signals] = set()
        for process in self._processes:
            process.request_shutdown()

    def kill_all(self) -> None:
        """Send SIGKILL now."""
        self._due.clear()
        self._send(signal.SIGKILL)

    def has_caused(self, exit_status: int | None) -> bool:
        """Whether an exit status is a consequence of the Shutdown message or a signal sent here."""
        return exit_status == 0 or any(exit_status == -number for number in self._sent)

    def _send(self, number: signal.Signals) -> None:
        self._sent.add(number)
        for process in self._processes:
            process.send_signal(number)
