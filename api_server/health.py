"""Why requests should not come here just now.

Owns what the supervisor said last; it sees all processes. The rest is what this front
end knows by itself.
"""

import time
from collections.abc import Callable

from api_server.door import Door
from api_server.engine_client import EngineClient
from api_server.errors import NotAvailableError
from proto.lifecycle import Condition


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
