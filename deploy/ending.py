"""How the daemon ends: ask, then insist, then force, each at its time."""

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol


class Endable(Protocol):
    """A process that can be ended."""

    def ask_to_end(self) -> None: ...

    def signal(self, number: signal.Signals) -> None: ...


@dataclass(frozen=True)
class Patience:
    """Seconds from asking until SIGTERM and until SIGKILL."""

    until_terminate: float
    until_kill: float


ON_REQUEST: Final = Patience(2.0, 4.0)
AFTER_A_DEATH: Final = Patience(0.5, 1.5)


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
        processes: Iterable[Endable],
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = tuple(processes)
        self._clock = clock
        begin = clock()
        self._steps = [
            (begin + patience.until_terminate, signal.SIGTERM),
            (begin + patience.until_kill, signal.SIGKILL),
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
