"""Accepts connections from a socket that other processes accept from, too, and leaves them theirs.

    a connection ──▶ fewer here than elsewhere, or as many ──▶ accepted: one, then whatever else
                └──▶ more ── HEAD_START_SECONDS ──▶ accepted, if no other process did

A loop that accepts all that there is, as loops do, lets the process that wakes first have a burst
of connections to itself, and with those that stay open all of the work. Owns when connections are
accepted; what becomes of them is the protocol's.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final, Protocol

logger = logging.getLogger("tokend.api")

HEAD_START_SECONDS: Final = 0.002
"""For processes with fewer connections to take one that waits."""
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_EXHAUSTED_SECONDS: Final = 1.0
"""Without accepting, when there is no descriptor or memory for another connection."""


class ConnectionCounts(Protocol):
    """How many connections there are, here and in other processes."""

    @property
    def own(self) -> float: ...

    @property
    def each(self) -> list[float]:
        """Of every process."""
        ...


class FairListener:
    """An asyncio.Server as far as uvicorn wants one.

    listener: listens, and does not block. tls: None for none. Accepts until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
        connections: ConnectionCounts,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._taking: set[asyncio.Task[None]] = set()
        self._loop.add_reader(listener, self._ready)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Connections that are being set up are ended."""
        taking = list(self._taking)
        for each in taking:
            each.cancel()
        await asyncio.gather(*taking, return_exceptions=True)

    def _ready(self) -> None:
        counts = self._connections.each
        if self._connections.own > sum(counts) / len(counts):
            self._rest(HEAD_START_SECONDS)
        else:
            self._accept()

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._ready)
        self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            logger.error("no connection can be accepted: %s", error.strerror)
            self._rest(_EXHAUSTED_SECONDS)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._take(connection))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def _take(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=self._tls)
        except OSError as error:  # those of TLS are such
            logger.debug("a connection was not set up: %s", error)
            connection.close()
