"""One who watches: the events that wait to be written.

Owns that queue. It is short: who is so far behind does not read, and loses the stream.
"""

import asyncio
from collections import deque
from typing import Final

from api_server.view.events import Watching

MAX_UNREAD: Final = 16
"""Events, of a quarter of a second each."""


class Watcher:
    """watching: as whom. over: the stream is to end when what waits is written."""

    def __init__(self, watching: Watching) -> None:
        self.watching = watching
        self.over = False
        self._events: deque[bytes] = deque()
        self._bell = asyncio.Event()

    def put(self, event: bytes) -> None:
        """An event to be written. One too many ends the stream, and what waits is forgotten."""
        if self.over:
            return
        if len(self._events) == MAX_UNREAD:
            self._events.clear()
            self.end()
            return
        self._events.append(event)
        self._bell.set()

    def end(self) -> None:
        """Nothing follows."""
        self.over = True
        self._bell.set()

    async def take(self, seconds: float | None) -> bytes:
        """All that waits, as soon as there is something; empty when that time is over."""
        if not self._events and not self.over:
            self._bell.clear()
            try:
                await asyncio.wait_for(self._bell.wait(), seconds)
            except TimeoutError:
                return b""
        events = b"".join(self._events)
        self._events.clear()
        return events
