"""What the supervisor asks of a front end, and what it is told.

Owns this process's end of that link, on the event loop.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from api_server.services import Services
from proto.codec import Message
from proto.lifecycle import Drain, NewEngine, Restarted, Shutdown, UnderWay
from proto.sockets import Link

logger = logging.getLogger("tokend.api")


class Orders:
    """The word of the supervisor.

    index: of this front end. meet: makes the link to the engine of an epoch.
    stopped: set when it asks for the end, or at SIGTERM.
    """

    def __init__(self, link: Link, index: int, meet: Callable[[int], Link]) -> None:
        self._link = link
        self._index = index
        self._meet = meet
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopped = asyncio.Event()

    def tell(self, message: Message) -> None:
        """Send something; a send may swallow the wake-up for what comes in."""
        self._link.send(message)
        self._loop.call_soon(self._receive)

    def obey(self, services: Services) -> None:
        """Do what is asked from now on."""
        self._services = services
        self._loop.add_signal_handler(signal.SIGTERM, self.stopped.set)
        self._loop.add_reader(self._link.fileno(), self._receive)
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        for message in self._link.receive():
            self._handle(message)

    def _handle(self, message: Any) -> None:
        services = self._services
        if isinstance(message, Shutdown):
            self.stopped.set()
        elif isinstance(message, Drain):
            services.door.close()
            self._begin(self._report_under_way())
        elif isinstance(message, NewEngine):
            logger.warning("the engine died: %d requests wait", services.client.num_open)
            services.client.reconnect(self._meet(message.epoch), message.epoch)
        elif isinstance(message, Restarted):
            services.metrics.restarted(message.role)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that takes time; the loop itself keeps no hold of a task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_under_way(self) -> None:
        visitors = self._services.visitors
        if visitors.number:
            self.tell(UnderWay(self._index, visitors.number))
            await visitors.gone()
        self.tell(UnderWay(self._index, 0))
