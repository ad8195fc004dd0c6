"""Signals as a readable descriptor, and the meaning of SIGHUP."""

import os
import signal
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Literal


class SignalInbox:
    """Catches signals inside a `with` block; its descriptor is readable when one has arrived."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = tuple(numbers)
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)

    def __enter__(self) -> "SignalInbox":
        self._old_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, _ignore) for number in self._numbers}
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

    def receive(self) -> list[signal.Signals]:
        """Return the signals that arrived since the last call."""
        try:
            return [signal.Signals(number) for number in os.read(self._reader, 4096)]
        except BlockingIOError:
            return []


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the number to the wake-up descriptor."""


def hangup_action(had_terminal: bool, under_nohup: bool) -> Literal["reload", "stop", "ignore"]:
    """Return what to do about a SIGHUP that has just arrived: reload, or stop.

    It also means that the terminal of the daemon was closed. A daemon that was started on a
    terminal stops then, but under nohup goes on.
    """
    if not had_terminal or has_terminal():
        return "reload"
    return "ignore" if under_nohup else "stop"


def has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
