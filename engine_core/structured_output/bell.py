"""Wakes the loop of the engine from another thread."""

import os
from typing import Final

NO_DESCRIPTOR: Final = -1


class Bell:
    """A descriptor that is readable once it was rung, until it is silenced."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        """From any thread."""
        os.eventfd_write(self.descriptor, 1)

    def silence(self) -> None:
        """Before looking at what it was rung for; nothing happens where it was not."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.descriptor)
