"""The connection to the engine of one epoch, on the event loop.

Nothing here blocks: the link queues what is sent, and its descriptor wakes the event loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

from proto import PROTOCOL_VERSION
from proto.codec import Message
from proto.engine_io import AdminReply, EngineCoreOutputs
from proto.errors import ProtocolError
from proto.lifecycle import EngineReady
from proto.sockets import Link, PeerStalledError
from proto.view import EngineView

logger = logging.getLogger("tokend.api")

FromEngine = EngineReady | EngineCoreOutputs | AdminReply | EngineView
FLUSH_SECONDS: Final = 0.01
"""How soon to try again when the engine does not take what is sent."""


class EngineConnection:
    """Send to one engine, and pass on what it sends, until the connection is closed.

    link: receives `FromEngine`. on_message: is given what the engine of this epoch says;
    EngineReady comes to it once the version has been looked at. on_invalid_message: is given the
    epoch of an engine that sends an undecodable message. Its content is lost, so the
    link is no longer read.
    """

    def __init__(
        self,
        link: Link,
        epoch: int,
        on_message: Callable[[Any], None],
        on_invalid_message: Callable[[int], None],
    ) -> None:
        self._link = link
        self.epoch = epoch
        self._on_message = on_message
        self._on_invalid_message = on_invalid_message
        self._engine: EngineReady | None = None
        self._refusal: ProtocolError | None = None
        self._settled = asyncio.Event()
        self._closed = self._deaf = False
        self._drain_planned = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link.fileno(), self.drain)
        self._plan_drain()

    @property
    def engine(self) -> EngineReady | None:
        """Its properties; None before it is ready."""
        return self._engine

    @property
    def ready(self) -> bool:
        """The engine takes requests."""
        return self._engine is not None and not self._deaf

    async def settled(self) -> None:
        """Return when the engine takes requests, or when this is closed.

        Raises ProtocolError for an engine of another version.
        """
        await self._settled.wait()
        if self._refusal is not None:
            raise self._refusal

    @property
    def stalled(self) -> bool:
        """The engine does not keep up: send it nothing that can be refused or put off."""
        return self._link.is_stalled

    def send(self, message: Message) -> None:
        """Queue a message, also when the engine is stalled."""
        with contextlib.suppress(PeerStalledError):
            self._link.send(message)
        self._plan_drain()

    def drain(self) -> None:
        """Take in what has arrived, and hand on what waits."""
        if self._closed or self._deaf:
            return
        if not self._link.flush() and not self._drain_planned:
            self._drain_planned = True
            self._loop.call_later(FLUSH_SECONDS, self._planned_drain)
        messages = self._link.receive()
        if self._link.num_undecodable and self.ready:
            logger.error("the engine sent an undecodable message: waiting for the next engine")
            self._deaf = True
            self._settled.clear()
            self._on_invalid_message(self.epoch)
            return  # what came with it may have a hole in it
        for message in messages:
            self._take(message)

    def close(self) -> None:
        """Stop listening; what is sent from now on goes nowhere."""
        if not self._closed:
            self._closed = True
            self._settled.set()
            self._loop.remove_reader(self._link.fileno())
            self._link.close()

    def _plan_drain(self) -> None:
        """The link's descriptor is edge-triggered and a send may swallow its edge."""
        if not self._drain_planned:
            self._drain_planned = True
            self._loop.call_soon(self._planned_drain)

    def _planned_drain(self) -> None:
        self._drain_planned = False
        self.drain()

    def _take(self, message: Any) -> None:
        if message.epoch != self.epoch:
            logger.warning("dropped a message of epoch %d", message.epoch)
            return
        if isinstance(message, EngineReady):
            self._settled.set()
            if message.protocol_version != PROTOCOL_VERSION:
                self._refusal = ProtocolError(
                    f"the engine speaks protocol {message.protocol_version}, not {PROTOCOL_VERSION}"
                )
                return
            self._engine = message
        self._on_message(message)
