"""Links of a front end to the supervisor and to other front ends, on the event loop."""

import asyncio
import contextlib
from typing import Any, Final

from proto.codec import Message
from proto.runtime.sockets import Link

FLUSH_SECONDS: Final = 0.05
"""Between two attempts to send what the other process does not accept yet."""


class AsyncLink:
    """Sends and receives the messages of a `Link` on the event loop."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(link.fileno(), self._readable.set)

    def send(self, message: Message) -> None:
        """Queue a message; raises PeerStalledError as `Link.send`."""
        try:
            self._link.send(message)
        finally:
            # the link's descriptor is edge-triggered, and sending may consume the edge
            self._readable.set()

    async def receive(self) -> list[Any]:
        """Return the next messages, at least one; send queued ones meanwhile."""
        while True:
            self._readable.clear()
            is_flushed = self._link.flush()
            messages = self._link.receive()
            if messages:
                return messages
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if is_flushed else FLUSH_SECONDS):
                    await self._readable.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._link.fileno())
        self._link.close()


class SupervisorLink(AsyncLink):
    """The link to the supervisor. index: of this front end."""

    def __init__(self, link: Link, index: int) -> None:
        super().__init__(link)
        self.index = index
