"""What SIGHUP means: that somebody wants a reload, or that the terminal is gone.

A daemon that was started on a terminal gets SIGHUP when that closes, and would go on without
anybody seeing it. Owns the knowledge of whether there was a terminal.
"""

import os
import signal
from collections.abc import Callable
from typing import Literal

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
