"""Whether requests should be sent to this server: drain state and readiness."""

import asyncio
import time
from collections.abc import Callable

from api_server.engine.engine_client import EngineClient
from api_server.errors import DrainingError, NotAvailableError
from proto.lifecycle import HealthStatus


class DrainState:
    """Whether the daemon drains: running requests continue, new ones get 503.

    ask_supervisor: asks the supervisor to drain the daemon, on behalf of an operator.
    """

    def __init__(self, ask_supervisor: Callable[[], None]) -> None:
        self._ask_supervisor = ask_supervisor
        self.closed = False

    def close(self) -> None:
        """Refuse new requests from now on."""
        self.closed = True

    def check(self) -> None:
        """Raise DrainingError while draining."""
        if self.closed:
            raise DrainingError()

    def ask_drain(self) -> None:
        """Refuse new requests here at once, and ask the supervisor to drain the daemon."""
        self.close()
        self._ask_supervisor()


class InFlightCounter:
    """Context manager that counts HTTP requests, from the headers to the last byte."""

    def __init__(self) -> None:
        self.number = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self.number += 1
        self._idle.clear()

    def __exit__(self, *how: object) -> None:
        self.number -= 1
        if not self.number:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        """Return when no request is in flight."""
        await self._idle.wait()


class Health:
    """Reasons why the daemon is not ready, as far as one API server knows them.

    The supervisor reports on the other processes; the connection to the engine and the drain state
    are known here.
    """

    def __init__(
        self,
        client: EngineClient,
        drain_state: DrainState,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._drain_state = drain_state
        self._clock = clock
        self._reported = HealthStatus()

    def update(self, condition: HealthStatus) -> None:
        """Replace the last report of the supervisor."""
        self._reported = condition

    def reasons(self) -> list[str]:
        """Return one line per reason; none when the daemon is ready."""
        now = self._clock()
        reported = [f"{each.what} for {now - each.since:.0f} s" for each in self._reported.reasons]
        return [*self._local_reasons(), *reported]

    def _local_reasons(self) -> list[str]:
        try:
            _ = self._client.engine
        except NotAvailableError as error:
            return [error.message]
        draining = ["draining"] if self._drain_state.closed else []
        return draining if self._client.connected else [*draining, "no engine is connected"]
