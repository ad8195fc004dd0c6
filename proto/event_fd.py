"""Wakes a loop that waits for descriptors, from another thread."""

import os
from threading import Lock
from typing import Final

NO_DESCRIPTOR: Final = -1
"""Of who never rings."""


class Bell:
    """A descriptor that is readable once it was rung, until it is silenced.

    Threads that are late may ring it after it is closed: its number may be another file's by then.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = Lock()
        self._closed = False

    def ring(self) -> None:
        """From any thread, at any time."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.descriptor, 1)

    def silence(self) -> None:
        """Before looking at what it was rung for; nothing happens where it was not."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.descriptor)
