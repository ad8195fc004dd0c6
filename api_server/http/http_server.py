"""Servers of a socket that processes accept from: each gets its share of the connections.

    a connection ──▶ fewer here than elsewhere, or as many ──▶ accept one
                └──▶ more ── HEAD_START_SECONDS ──▶ accept it, if no other process did

An event loop accepts all waiting connections at once, so the process that wakes first would get a
whole burst and, with connections that stay open, all the work.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Final

import uvicorn

from api_server.http.access import PUBLIC, Listener
from api_server.http.http_protocol import LimitedHttpProtocol
from api_server.metrics.metric_sheet import Gauge

logger = logging.getLogger("tokend.api")

HEAD_START_SECONDS: Final = 0.002
"""Time for processes with fewer connections to accept one that waits."""
ACCEPTS: Final = 64
"""Connections that a process which shares no socket accepts at once; uvloop's server accepts one in
a pass of the event loop, so that a new connection would wait for hundreds of passes in a flood."""
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_EXHAUSTED_SECONDS: Final = 1.0
"""Pause after a connection for which there was no file descriptor or memory."""


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers; the supervisor handles Ctrl-C.

    connections: open connections by process. shares_sockets: other processes accept from the same
    sockets. admin_sockets: listening sockets for operators, without TLS.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        connections: Gauge,
        *,
        shares_sockets: bool,
        admin_sockets: Sequence[socket.socket] = (),
    ) -> None:
        super().__init__(config)
        self._admin_sockets = admin_sockets
        self._connections = connections
        self._shares_sockets = shares_sockets

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        at_once = 1 if self._shares_sockets else ACCEPTS
        admin = [
            (listening, Listener.of(listening, admin=True)) for listening in self._admin_sockets
        ]
        public = [(listening, Listener.of(listening)) for listening in sockets or []]
        listeners: Any = [
            FairListener(listening, self, self._connections, at_once, kind)
            for listening, kind in public + admin
        ]
        self.servers = listeners
        self.started = True

    def create_protocol(self, listener: Listener) -> asyncio.Protocol:
        """Return the protocol of a new connection, which `connections` counts."""
        make: Any = self.config.http_protocol_class
        protocol: LimitedHttpProtocol = make(self.config, self.server_state, self.lifespan.state)
        protocol.connection_gauge, protocol.listener = self._connections, listener
        return protocol


class FairListener:
    """The methods of asyncio.Server that uvicorn uses; accepts connections until it is closed.

    listener: a listening socket. at_once: connections to accept in a pass of the event loop.
    kind: of the listener, for the rules of access.
    """

    def __init__(
        self,
        listener: socket.socket,
        server: HttpServer,
        connections: Gauge,
        at_once: int = 1,
        kind: Listener = PUBLIC,
    ) -> None:
        listener.setblocking(False)
        self._at_once = at_once
        self._kind = kind
        self._listener = listener
        self._server = server
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._setups: set[asyncio.Task[None]] = set()
        self._loop.add_reader(listener, self._on_connection_waiting)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """End the connections that are being set up."""
        setups = list(self._setups)
        for setup in setups:
            setup.cancel()
        await asyncio.gather(*setups, return_exceptions=True)

    def _on_connection_waiting(self) -> None:
        counts = self._connections.values
        if self._connections.own_value > sum(counts) / len(counts):
            self._pause_accepting(HEAD_START_SECONDS)
        else:
            for _ in range(self._at_once):
                if not self._accept():
                    break

    def _pause_accepting(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._on_connection_waiting)
        self._accept()

    def _accept(self) -> bool:
        """Accept a connection; return False if there was none."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            logger.error("no connection can be accepted: %s", error.strerror)
            self._pause_accepting(_EXHAUSTED_SECONDS)
            return False
        connection.setblocking(False)
        setup = self._loop.create_task(self._set_up(connection))
        self._setups.add(setup)
        setup.add_done_callback(self._setups.discard)
        return True

    async def _set_up(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._server.create_protocol(self._kind),
                connection,
                ssl=self._server.config.ssl if self._kind.kind == "public" else None,
            )
        except OSError as error:  # also of TLS
            logger.debug("a connection was not set up: %s", error)
            connection.close()
