"""A sign of life for a stream that has nothing to say: proxies end what is silent for long.

Owns when one is due: a comment, unless the API has an event for it. When it can be written
without cutting an event in two is for whoever writes the events.
"""

import asyncio
from collections.abc import Callable
from typing import Final

COMMENT: Final = ": keep-alive\n\n"
"""Clients skip lines that begin with a colon (HTML standard, server-sent events)."""


class KeepAlive:
    """From the first byte of a stream to its end (`close`).

    seconds: of silence, after which a comment is due; 0 for never. wake: called at that moment,
    to have somebody `take` it. sign: what is written then.
    """

    def __init__(self, seconds: float, wake: Callable[[], None], sign: str = COMMENT) -> None:
        self._seconds = seconds
        self._wake = wake
        self._sign = sign
        self._loop = asyncio.get_running_loop()
        self._due = False
        self._spoke_at = self._loop.time()
        self._look_again = self._loop.call_later(seconds, self._look) if seconds else None

    def spoke(self) -> None:
        """Something was written just now."""
        self._due = False
        self._spoke_at = self._loop.time()

    def take(self) -> str:
        """The sign if it is due, nothing otherwise."""
        return self._sign if self._due else ""

    def close(self) -> None:
        if self._look_again is not None:
            self._look_again.cancel()

    def _look(self) -> None:
        """One timer for the whole stream: most of the time it finds that something was written."""
        left = self._spoke_at + self._seconds - self._loop.time()
        if left <= 0.0:
            self._due = True
            self._wake()
            left = self._seconds
        self._look_again = self._loop.call_later(left, self._look)
