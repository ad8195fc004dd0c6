"""Signals as something to wait for beside links and descriptors."""

import os
import signal
from collections.abc import Iterable
from types import FrameType, TracebackType


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
