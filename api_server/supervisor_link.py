"""What the supervisor asks of a front end, and what it is told.

Owns this process's end of that link, on the event loop.
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from api_server.engine_switch import Changeover
from proto.codec import Message
from proto.lifecycle import (
    AbortRequests,
    Alive,
    Condition,
    Distrust,
    Drain,
    DropEngine,
    NewEngine,
    NextEngine,
    Ping,
    Restarted,
    Shutdown,
    SwitchEngine,
    UnderWay,
)
from proto.sockets import Link


class Orders:
    """The word of the supervisor.

    index: of this front end. stopped: set when it asks for the end, or at SIGTERM.
    """

    def __init__(self, link: Link, index: int) -> None:
        self._link = link
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopped = asyncio.Event()

    def tell(self, message: Message) -> None:
        """Send something; a send may swallow the wake-up for what comes in."""
        self._link.send(message)
        self._loop.call_soon(self._receive)

    def obey(self, changeover: Changeover) -> None:
        """Do what is asked from now on."""
        self._changeover = changeover
        changeover.services.client.when_nonsense(self._distrust)
        self._loop.add_signal_handler(signal.SIGTERM, self.stopped.set)
        self._loop.add_reader(self._link.fileno(), self._receive)
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        for message in self._link.receive():
            self._handle(message)

    def _handle(self, message: Any) -> None:
        changeover = self._changeover
        if isinstance(message, Shutdown):
            self.stopped.set()
        elif isinstance(message, Drain):
            changeover.services.door.close()
            changeover.services.feed.notice("drain", "no more requests are taken: the daemon ends")
            self._begin(self._report_under_way())
        elif isinstance(message, AbortRequests):
            changeover.services.open_streams.abort(message.request_ids, message.owner)
        elif isinstance(message, NewEngine):
            changeover.replace_engine(message)
        elif isinstance(message, Restarted):
            changeover.services.metrics.restarted(message.role, message.hung)
            changeover.services.feed.restarted(message.role, hung=message.hung)
        elif isinstance(message, Condition):
            changeover.services.health.hear(message)
        elif isinstance(message, Ping):
            self.tell(Alive())
        elif isinstance(message, NextEngine):
            changeover.prepare(message)
        elif isinstance(message, SwitchEngine):
            changeover.switch(message.epoch)
        elif isinstance(message, DropEngine):
            changeover.drop(message.epoch)

    def _distrust(self, epoch: int) -> None:
        self.tell(Distrust("engine_core", 0, epoch, "it sent what is no message"))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that takes time; the loop itself keeps no hold of a task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_under_way(self) -> None:
        number = self._changeover.num_inside
        if number:
            self.tell(UnderWay(self._index, number))
            await self._changeover.all_gone()
        self.tell(UnderWay(self._index, 0))
