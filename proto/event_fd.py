"""An eventfd with which a thread interrupts the poll of another thread's loop."""

import os
from threading import Lock
from typing import Final

NO_DESCRIPTOR: Final = -1
"""Instead of a descriptor, for a component that never signals."""


class EventFd:
    """A descriptor that is readable between a call of `notify` and the next of `clear`.

    After `close`, `notify` does nothing: the number of the descriptor may belong to another file.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = Lock()
        self._closed = False

    def notify(self) -> None:
        """Make the descriptor readable; may be called from any thread, at any time."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable; call it before reading what was signalled."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.descriptor)
