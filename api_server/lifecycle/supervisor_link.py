"""Commands of the supervisor to an API server, and what the API server reports."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from api_server.lifecycle.engine_switch import EngineSwitch
from proto.codec import Message
from proto.lifecycle import (
    AbortRequests,
    Alive,
    Drain,
    DrainProgress,
    DropEngine,
    HealthStatus,
    NewEngine,
    NextEngine,
    Ping,
    ProtocolViolation,
    Restarted,
    Shutdown,
    SwitchEngine,
)
from proto.sockets import Link


class SupervisorLink:
    """The API server's end of its link to the supervisor, on the event loop.

    index: of this API server. stopped: set by the command to shut down, or by SIGTERM.
    """

    def __init__(self, link: Link, index: int) -> None:
        self._link = link
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopped = asyncio.Event()

    def send(self, message: Message) -> None:
        """Send a message, then receive: sending may consume the descriptor's edge."""
        self._link.send(message)
        self._loop.call_soon(self._receive)

    def start(self, engine_switch: EngineSwitch) -> None:
        """Carry out commands from now on."""
        self._engine_switch = engine_switch
        engine_switch.app_state.client.on_invalid_message(self._report_invalid_message)
        self._loop.add_signal_handler(signal.SIGTERM, self.stopped.set)
        self._loop.add_reader(self._link.fileno(), self._receive)
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        for message in self._link.receive():
            self._run_command(message)

    def _run_command(self, message: Any) -> None:
        engine_switch = self._engine_switch
        if isinstance(message, Shutdown):
            self.stopped.set()
        elif isinstance(message, Drain):
            engine_switch.app_state.drain_state.close()
            engine_switch.app_state.live_view.notice(
                "drain", "no more requests are taken: the daemon ends"
            )
            self._start_task(self._report_in_flight())
        elif isinstance(message, AbortRequests):
            engine_switch.app_state.open_streams.abort(message.request_ids, message.owner)
        elif isinstance(message, NewEngine):
            engine_switch.replace_engine(message)
        elif isinstance(message, Restarted):
            engine_switch.app_state.metrics.restarted(message.role, message.hung)
            engine_switch.app_state.live_view.restarted(message.role, hung=message.hung)
        elif isinstance(message, HealthStatus):
            engine_switch.app_state.health.update(message)
        elif isinstance(message, Ping):
            self.send(Alive())
        elif isinstance(message, NextEngine):
            engine_switch.prepare(message)
        elif isinstance(message, SwitchEngine):
            engine_switch.switch(message.epoch)
        elif isinstance(message, DropEngine):
            engine_switch.drop(message.epoch)

    def _report_invalid_message(self, epoch: int) -> None:
        self.send(ProtocolViolation("engine_core", 0, epoch, "it sent what is no message"))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; the event loop itself holds no reference to a task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_in_flight(self) -> None:
        number = self._engine_switch.num_in_flight
        if number:
            self.send(DrainProgress(self._index, number))
            await self._engine_switch.wait_until_idle()
        self.send(DrainProgress(self._index, 0))
