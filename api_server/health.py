"""Why requests should not come here just now.

Owns what the supervisor said last; it sees all processes. The rest is what this front
end knows by itself.
"""

import asyncio
import time
from collections.abc import Callable

from api_server.engine_client import EngineClient
from api_server.errors import DrainingError, NotAvailableError
from proto.lifecycle import Condition

# The door of a front end: whether requests still come in, and how many are inside.
#
#     open ─ drain ─▶ closed: who comes gets 503 and loses the connection,
#                     who is inside goes on ─ the last one leaves ─▶ the supervisor is told


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


class Health:
    """Of the whole daemon, as far as one front end is told."""

    def __init__(
        self, client: EngineClient, door: Door, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._door = door
        self._clock = clock
        self._told = Condition()

    def hear(self, condition: Condition) -> None:
        """The word of the supervisor, in place of its last one."""
        self._told = condition

    def reasons(self) -> list[str]:
        """One line each; none when all is well."""
        now = self._clock()
        told = [f"{each.what} for {now - each.since:.0f} s" for each in self._told.reasons]
        return [*self._own(), *told]

    def _own(self) -> list[str]:
        try:
            _ = self._client.engine
        except NotAvailableError as error:
            return [error.message]
        draining = ["draining"] if self._door.closed else []
        return draining if self._client.connected else [*draining, "no engine is connected"]
