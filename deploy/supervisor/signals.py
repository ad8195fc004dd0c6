"""Signals as something to wait for beside links and descriptors."""

import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Literal


class SignalInbox:
    """Catches signals while it is open; readable when one has come."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = tuple(numbers)
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)

    def __enter__(self) -> "SignalInbox":
        self._old_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, _leave_it) for number in self._numbers}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_writer)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        return self._reader

    def take(self) -> list[signal.Signals]:
        """The signals that came since the last call."""
        try:
            return [signal.Signals(number) for number in os.read(self._reader, 4096)]
        except BlockingIOError:
            return []


def _leave_it(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has the number already."""


# What SIGHUP means: that somebody wants a reload, or that the terminal is gone.
#
# A daemon that was started on a terminal gets SIGHUP when that closes, and would go on without
# anybody seeing it. Owns the knowledge of whether there was a terminal.


Meaning = Literal["reload", "end", "nothing"]


def has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


class HangUp:
    """To be made before SIGHUP has a handler: under nohup it is ignored up to then."""

    def __init__(self, terminal: Callable[[], bool] = has_terminal) -> None:
        self._terminal = terminal
        self._had_terminal = terminal()
        self._ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    def meaning(self) -> Meaning:
        """Of a SIGHUP that has just come."""
        if not self._had_terminal or self._terminal():
            return "reload"
        return "nothing" if self._ignored else "end"
