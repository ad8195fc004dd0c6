"""Whether requests should be sent to this server: drain state, requests in flight, readiness."""

import asyncio
import time
from collections.abc import Callable

from api_server.engine.engine_client import EngineClient
from api_server.errors import DrainingError, NotAvailableError, SwitchingModelError
from proto.messages.lifecycle import HealthStatus, NotReady


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
        await self._idle.wait()


class Health:
    """Drain state of the daemon, and reasons why it is not ready, as one front end knows them.

    The supervisor reports on the other processes; the connection to the engine and the drain state
    are known here.

    supervisor_status: the last report of the supervisor. is_switching_model: see
    SwitchingModelError.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._drain_started = asyncio.Event()
        self.supervisor_status = HealthStatus()
        self.is_switching_model = False

    @property
    def draining(self) -> bool:
        """Running requests continue, new ones get 503."""
        return self._drain_started.is_set()

    def start_drain(self) -> None:
        self._drain_started.set()

    async def wait_drain(self) -> None:
        await self._drain_started.wait()

    def check_takes_requests(self) -> None:
        """Raise DrainingError or SwitchingModelError if new requests are refused."""
        if self.draining:
            raise DrainingError()
        if self.is_switching_model:
            raise SwitchingModelError()

    def not_ready_reasons(self) -> list[str]:
        """Return one line per reason; none when the daemon is ready: one engine suffices."""
        missing = self._client.missing_engines
        are_all_missing = len(missing) == self._client.num_engines
        reported_reasons = [
            self._line(reason)
            for reason in self.supervisor_status.reasons
            if reason.engine is None or are_all_missing
        ]
        return [*self._local_reasons(), *reported_reasons]

    def missing_engines(self) -> dict[int, list[str]]:
        """Return the engines that take no requests, with the reasons that are known."""
        return {
            engine: [
                self._line(reason)
                for reason in self.supervisor_status.reasons
                if reason.engine == engine
            ]
            for engine in self._client.missing_engines
        }

    def _line(self, reason: NotReady) -> str:
        return f"{reason.what} for {self._clock() - reason.since:.0f} s"

    def _local_reasons(self) -> list[str]:
        try:
            _ = self._client.engine
        except NotAvailableError as error:
            return [error.message]
        draining = ["draining"] if self.draining else []
        draining += ["another model is being loaded"] if self.is_switching_model else []
        return draining if self._client.connected else [*draining, "no engine is connected"]
