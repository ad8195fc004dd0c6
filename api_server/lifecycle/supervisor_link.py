"""The channel between an API server and the supervisor."""

import asyncio
from typing import Any

from proto.codec import Message
from proto.sockets import Link


class SupervisorLink:
    """Send to the supervisor and receive its commands, on the event loop.

    index: of this API server.
    """

    def __init__(self, link: Link, index: int) -> None:
        self._link = link
        self.index = index
        self._readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(link.fileno(), self._readable.set)

    def send(self, message: Message) -> None:
        self._link.send(message)
        # the link's descriptor is edge-triggered, and sending may consume the edge
        self._readable.set()

    async def receive(self) -> list[Any]:
        """Return the next commands, at least one."""
        while True:
            self._readable.clear()
            messages = self._link.receive()
            if messages:
                return messages
            await self._readable.wait()
