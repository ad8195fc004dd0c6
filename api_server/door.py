"""The door of a front end: whether requests still come in, and how many are inside.

    open ─ drain ─▶ closed: who comes gets 503 and loses the connection,
                    who is inside goes on ─ the last one leaves ─▶ the supervisor is told

Owns that state and that count, and knows neither HTTP nor the engine.
"""

import asyncio
from collections.abc import Callable

from api_server.errors import DrainingError


class Door:
    """Open until the daemon drains. ask_drain: tells the supervisor that an operator wants that."""

    def __init__(self, ask_drain: Callable[[], None]) -> None:
        self._ask_drain = ask_drain
        self.closed = False

    def close(self) -> None:
        """Let nobody in any more."""
        self.closed = True

    def check(self) -> None:
        """Raise DrainingError when it is closed."""
        if self.closed:
            raise DrainingError()

    def ask_drain(self) -> None:
        """Close, here at once, and ask the supervisor for the end of the daemon."""
        self.close()
        self._ask_drain()


class Visitors:
    """Counts HTTP requests under way, each from its headers to its last byte."""

    def __init__(self) -> None:
        self.number = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self.number += 1
        self._none.clear()

    def __exit__(self, *how: object) -> None:
        self.number -= 1
        if not self.number:
            self._none.set()

    async def gone(self) -> None:
        """Return when nobody is inside."""
        await self._none.wait()
