"""What connections of HTTP and of WebSockets share: the data received, in turns and counted.

    client ─▶ data received ──▶ unparsed ── a slice, when it is the connection's turn ──▶ parser
                             |READ_AHEAD_BYTES|  all turns: PASS_SECONDS a pass of the loop

One byte can cost a call of Python (a chunk, a fragment, a ping). So what a connection has received
is parsed in slices, and the event loop does other work in between, however many connections send as
fast as they can. A connection is not parsed while it waits for its response or its application.

What arrives or waits is counted by `Uploads`, over all connections of a front end.
"""

import asyncio
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope

from api_server.http.addresses import network_of
from api_server.http.request_log import RequestLog
from api_server.metrics.metric_sheet import Gauge
from proto.errors import OverloadedError, RequestError
from proto.settings.config import FrontEndConfig

logger = logging.getLogger("tokend.api")

SLICE_BYTES: Final = 1 << 10
"""Most bytes that are parsed at once, unless they are known to be one piece of a body."""

PASS_SECONDS: Final = 0.002
"""Time for parsing in one pass of the event loop; the rest waits for the next pass."""

RANKED_TURNS: Final = 4
"""Connections with this many turns or more have one rank; an ordinary request takes one or two.
"""

READ_AHEAD_BYTES: Final = 64 << 10
"""A connection with more unparsed bytes is not read. One read adds up to 256 KiB."""

MAX_BODY_BYTES: Final = 20 << 20
"""Most bytes of a body, or of a message on a WebSocket; decoding it takes up to 7 times as much."""

COUNTED_BYTES: Final = 16 << 10
"""Uploads below this size are not counted."""

MAX_UPLOAD_BYTES: Final = 96 << 20
"""Most bytes of all uploads, divided by the number of front ends."""

MAX_CLIENT_UPLOAD_BYTES: Final = 48 << 20
"""Most bytes of uploads of one address or tenant, divided likewise."""

DISCARD_SECONDS: Final = 0.05
"""Time between reads whose data is dropped."""

UPLOAD_SECONDS: Final = 30.0
UPLOAD_BYTES: Final = 240 << 10
"""Bytes of an upload that must arrive in each period of UPLOAD_SECONDS, unless it ends."""


TRANSPORT: Final = "tokend.transport"
"""Name of an ASGI extension: the transport of the connection."""

_BEGIN_UPLOAD: Final = "tokend.begin_upload"
"""Name of an ASGI extension: the method of the connection."""

LINGER_SECONDS: Final = 1.0
"""Time before a refused connection is closed; a client that still sends would get a reset instead
of the response."""


def client_disconnected(scope: Scope) -> bool:
    """Return whether the client has closed the connection, or its half of it.

    Asks the kernel, because the event loop may not have read the end of the connection yet.
    """
    transport = scope.get("extensions", {}).get(TRANSPORT)
    if transport is None:  # another HTTP server
        return False
    if transport.is_closing():
        return True
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


async def wait_disconnect(receive: Receive) -> None:
    """Return when the server has seen the end of the connection; drop what the client sends."""
    while (await receive())["type"] != "http.disconnect":
        pass


def begin_upload(scope: Scope, tenant: int, end: Callable[[RequestError], None]) -> "Upload":
    """Return an upload for the body of a request, or for a message; it must be closed with 0.

    end: is called with the reason if it is too large. Under another HTTP server it is counted
    alone.
    """
    begin = scope.get("extensions", {}).get(_BEGIN_UPLOAD)
    if begin is None:
        return Uploads().begin("", end, tenant=tenant)
    upload: Upload = begin(tenant, end)
    return upload


STALL_SECONDS: Final = 60.0
"""A connection whose client reads no byte of the waiting data for this time is aborted."""


class Timeout:
    """At most one scheduled call; scheduling another replaces it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def schedule(self, seconds: float, callback: Callable[[], None]) -> None:
        self.cancel()
        self._handle = self._loop.call_later(seconds, callback)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    @property
    def is_scheduled(self) -> bool:
        return self._handle is not None


class Upload:
    """Bytes of one client that arrive or wait, as `Uploads` counts them.

    owners: whose totals they belong to. end: is called with the reason if they are too many.
    """

    def __init__(
        self, uploads: "Uploads", owners: Sequence[str], end: Callable[[RequestError], None]
    ) -> None:
        self._uploads = uploads
        self.owners = owners
        self.end = end
        self.size = 0

    def resize(self, size: int) -> None:
        """Set the size, which may end this upload or a larger one."""
        size = size if size > COUNTED_BYTES else 0
        if size != self.size:
            self._uploads.resize(self, size)


class Uploads:
    """Limits on all uploads of a front end together, and on those of each client.

    An upload is unparsed data, an unfinished message, or a body from its first byte until it is
    decoded (of one up to 1 MiB: until the engine has its requests, four times if it has an emoji;
    `api_server/turns.py`).
    The largest upload of the client with the most bytes is ended, so small ones never are while a
    large one is open. A limit is never below one body of the largest size.
    """

    def __init__(self, num_front_ends: int = 1) -> None:
        least = MAX_BODY_BYTES + (1 << 20)
        self._max_bytes = max(MAX_UPLOAD_BYTES // num_front_ends, least)
        self._max_client_bytes = max(MAX_CLIENT_UPLOAD_BYTES // num_front_ends, least)
        self._open: set[Upload] = set()
        self._totals: dict[str, int] = {}
        self.num_bytes = 0

    def begin(
        self, address: str, end: Callable[[RequestError], None], *, tenant: int = 0
    ) -> Upload:
        """Return an upload of no bytes. tenant: 0 if the client has none."""
        owners = [f"address {network_of(address)}"]
        if tenant:
            owners.append(f"tenant {tenant}")
        return Upload(self, owners, end)

    def resize(self, upload: Upload, size: int) -> None:
        growth, upload.size = size - upload.size, size
        self.num_bytes += growth
        for owner in upload.owners:
            total = self._totals.get(owner, 0) + growth
            if total:
                self._totals[owner] = total
            else:
                del self._totals[owner]
        if size:
            self._open.add(upload)
        else:
            self._open.discard(upload)
        if growth > 0:
            self._end_largest(upload)

    def _end_largest(self, grown: Upload) -> None:
        """End uploads until all limits hold. grown: the one that has become larger."""
        for owner in grown.owners:
            while self._totals.get(owner, 0) > self._max_client_bytes:
                self._end(max((each for each in self._open if owner in each.owners), key=_size))
        while self.num_bytes > self._max_bytes:
            self._end(max(self._open, key=lambda each: (self._heaviest(each), each.size)))

    def _heaviest(self, upload: Upload) -> int:
        return max(self._totals[owner] for owner in upload.owners)

    def _end(self, upload: Upload) -> None:
        self.resize(upload, 0)
        upload.end(OverloadedError("too many large requests are waiting: retry later"))


def _size(upload: Upload) -> int:
    return upload.size


class ParsingTurns:
    """Connections with received data, each of which is parsed by a slice in its turn.

    Those with the fewest turns since all their data was parsed come first, so an ordinary request
    does not wait for floods on hundreds of connections. In each pass at least one of those with the
    most has a turn.
    """

    def __init__(self) -> None:
        self._queues: list[deque[ReceivingProtocol]] = [deque() for _ in range(RANKED_TURNS)]
        self._spent_seconds = 0.0
        self._is_pass_begun = False

    def add(self, connection: "ReceivingProtocol") -> None:
        """Parse the data of a connection: at once, if no other waits and there is time."""
        if not self._is_pass_begun:
            self._schedule_pass(connection.loop)
        no_other_waits = not any(self._queues)
        self._enqueue(connection)
        if no_other_waits:
            self._run()

    def _schedule_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_pass_begun = True
        loop.call_soon(self._begin_pass, loop)

    def _begin_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_pass_begun, self._spent_seconds = False, 0.0
        if self._queues[-1]:
            self._parse_slice_of(self._queues[-1].popleft())
        self._run()
        if any(self._queues):
            self._schedule_pass(loop)

    def _run(self) -> None:
        while self._spent_seconds < PASS_SECONDS:
            queue = next(filter(None, self._queues), None)
            if queue is None:
                return
            self._parse_slice_of(queue.popleft())

    def _enqueue(self, connection: "ReceivingProtocol") -> None:
        self._queues[min(connection.num_turns, RANKED_TURNS - 1)].append(connection)

    def _parse_slice_of(self, connection: "ReceivingProtocol") -> None:
        started = time.monotonic()
        try:
            if connection.parse_slice():
                self._enqueue(connection)
        except Exception:
            logger.exception("the data of a connection could not be parsed")
            connection.transport.abort()
        self._spent_seconds += time.monotonic() - started


class Reception:
    """What all connections of a front end share."""

    def __init__(self, num_front_ends: int = 1, request_log: RequestLog | None = None) -> None:
        self.turns = ParsingTurns()
        self.uploads = Uploads(num_front_ends)
        self.request_log = request_log or RequestLog(FrontEndConfig())


class ReceivingProtocol(asyncio.Protocol):
    """A protocol whose data is parsed in turns: a base class beside one of uvicorn's.

    Only this class pauses and resumes the reading of the transport. num_turns: since all data was
    parsed.
    """

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    client: tuple[str, int] | None

    connection_gauge: Gauge | None = None
    """Counts open connections."""

    def __init__(self, *args: Any, reception: Reception | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reception = reception or Reception()
        self.num_turns = 0
        self._unparsed = bytearray()
        self._is_in_turns = False
        self._is_reading = True
        self._upload: Upload | None = None
        self._num_unread_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._stall_timeout = Timeout(self.loop)
        if self.connection_gauge is not None:
            self.connection_gauge.__enter__()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stall_timeout.cancel()
        self._forget_data()
        if self.connection_gauge is not None:
            self.connection_gauge.__exit__(None, None, None)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_stall_timeout()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._stall_timeout.cancel()
        super().resume_writing()

    def parse_slice(self) -> bool:
        """Parse some of the data; return whether there is more to parse now."""
        if self._unparsed and self._may_parse():
            end = self._slice_end()
            data = bytes(self._unparsed[:end])
            del self._unparsed[:end]
            self._parse(data)
        self.num_turns = self.num_turns + 1 if self._unparsed else 0
        if len(self._unparsed) <= READ_AHEAD_BYTES:
            self._resume_reading()
        self._count_upload()
        self._is_in_turns = bool(self._unparsed) and self._may_parse()
        return self._is_in_turns

    def begin_upload(self, tenant: int, end: Callable[[RequestError], None]) -> Upload:
        """Return an upload for the body or message that the application reads now."""
        address = self.client[0] if self.client else ""
        return self.reception.uploads.begin(address, end, tenant=tenant)

    def _extensions(self) -> dict[str, Any]:
        """Return ASGI extensions for requests on this connection."""
        return {TRANSPORT: self.transport, _BEGIN_UPLOAD: self.begin_upload}

    def _receive(self, data: bytes) -> None:
        self._unparsed += data
        if len(self._unparsed) > READ_AHEAD_BYTES and self._is_reading:
            self._is_reading = False
            self.transport.pause_reading()
        self._count_upload()
        self._continue_parsing()

    def _continue_parsing(self) -> None:
        """Take part in the turns, if there is data and it may be parsed."""
        if self._unparsed and not self._is_in_turns and self._may_parse():
            self._is_in_turns = True
            self.reception.turns.add(self)

    def _read_slowly(self) -> None:
        """Read on after a pause: only to notice the end of a connection whose data is dropped."""
        if self._is_reading:
            self._is_reading = False
            self.transport.pause_reading()
            self.loop.call_later(DISCARD_SECONDS, self._resume_reading)

    def _resume_reading(self) -> None:
        if not self._is_reading and not self.transport.is_closing():
            self._is_reading = True
            self.transport.resume_reading()

    def _may_parse(self) -> bool:
        """Return whether the connection can take more of the data now."""
        raise NotImplementedError

    def _slice_end(self) -> int:
        """Return how many of the unparsed bytes to parse at once."""
        return SLICE_BYTES

    def _parse(self, data: bytes) -> None:
        raise NotImplementedError

    def _num_received(self) -> int:
        """Return how many bytes the connection holds that count as an upload."""
        return len(self._unparsed)

    def _end_upload(self, error: RequestError) -> None:
        """The uploads of all connections are too many, and this one is ended."""
        raise NotImplementedError

    def _count_upload(self) -> None:
        number = self._num_received()
        if self._upload is None:
            if number <= COUNTED_BYTES:
                return
            address = self.client[0] if self.client else ""
            self._upload = self.reception.uploads.begin(address, self._end_upload)
        self._upload.resize(number)

    def _log_refusal(
        self, error: RequestError, url: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Write the line of a request that does not reach the application.

        url, headers: as far as they are known.
        """
        path = url.partition(b"?")[0].decode("latin-1") or None
        scope = {"type": "http", "client": self.client, "path": path, "headers": headers}
        self.reception.request_log.log_refusal(error, scope)

    def _start_stall_timeout(self) -> None:
        """Check after STALL_SECONDS whether the client has read some of the waiting data.

        Nothing more is written until the client has read it, so its size can only shrink.
        """
        self._num_unread_bytes = self.transport.get_write_buffer_size()
        self._stall_timeout.schedule(STALL_SECONDS, self._check_stall)

    def _check_stall(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_unread_bytes:
            self._start_stall_timeout()
        else:
            self._abort_stalled()

    def _abort_stalled(self) -> None:
        self.transport.abort()

    def _write_refusal(self, response: Response) -> None:
        """Write a response to what is no valid request, and close the connection."""
        phrase = HTTPStatus(response.status_code).phrase
        lines = [f"HTTP/1.1 {response.status_code} {phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self._close_later()

    def _close_later(self) -> None:
        """Close the connection when its client has had time to read what was written."""
        if self.transport.can_write_eof():  # TLS cannot close one direction alone
            self.transport.write_eof()
        self._forget_data()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _forget_data(self) -> None:
        """Drop what was received, for a connection that is closed, refused or handed on."""
        self._unparsed.clear()
        self._resume_reading()
        if self._upload is not None:
            self._upload.resize(0)
