"""HTTP/1.1 on one connection: uvicorn's protocol with limits in bytes and in time.

A subclass, because uvicorn has no option for the size of the headers, for timeouts while a request
is received or a response is not read, for writing a chunk without waking the request's task (see
docs/benchmarks/frontend.md), or for closing a connection after a response that has begun.

    connection ─▶ headers ─▶ body ─▶ answer ─▶ headers …
    |HEADER_SECONDS|  (routes)  |STALL_SECONDS without a byte taken|
"""

import asyncio
import select
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api_server.errors import HeadersTooLargeError, SlowUploadError, error_response
from proto.errors import RequestError

MAX_HEADER_BYTES: Final = 64 << 10
"""Most bytes of the URL and all header lines of a request together."""

MAX_HEADERS: Final = 128
"""Most header lines of a request."""

HEADER_SECONDS: Final = 60.0
"""From the connection, or the first byte of a further request on it, to the end of the headers."""

LEFTOVER_SECONDS: Final = 60.0
"""For the rest of a body that was answered before it had arrived."""

STALL_SECONDS: Final = 60.0
"""A client that does not take one byte of what waits for it in such a time is cut off."""
_LAST: Final = "tokend.last_response"
_LEFT: Final = "tokend.client_left"
"""Names of ASGI extensions: functions without arguments."""

_WRITER: Final = "tokend.body_writer"
"""Name of an ASGI extension: a ChunkWriter."""

LINGER_SECONDS: Final = 1.0
"""A refused client may still be sending; closing at once would reset what it should read."""

_STALLED: Final = "tokend.stalled"


def has_left(scope: Scope) -> bool:
    """Whether the client has closed the connection, or its half of it.

    Looks at the socket itself: the loop may not have read the end yet, and its disconnect
    comes a moment later.
    """
    return bool(scope.get("extensions", {}).get(_LEFT, _nothing)())


class ChunkWriter:
    """Write chunks of a response body (RFC 9112, 7.1) past the coroutines of the server.

    cycle: of a request whose response has begun and has no content-length.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """The connection accepts more of the body now, without suspending."""
        cycle = self._cycle
        return (
            cycle.chunked_encoding is True
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, body: bytes) -> None:
        """Write more of the body, but not the end of it; only while `ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """Return the writer of the response to this request, None under another HTTP server."""
    writer: ChunkWriter | None = scope.get("extensions", {}).get(_WRITER)
    return writer


def is_stalled(scope: Scope) -> bool:
    """Whether the connection of a request was cut off because its client did not read."""
    return bool(scope.get(_STALLED))


class Alarm:
    """One call at a time that is to come if nothing prevents it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float, call: Callable[[], None]) -> None:
        """In place of what was to come."""
        self.cancel()
        self._handle = self._loop.call_later(seconds, call)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    @property
    def is_set(self) -> bool:
        return self._handle is not None


def close_after_response(scope: Scope) -> None:
    """Close the connection of this request when its response is complete.

    For a stream that fails after its headers, which could not say so. Nothing where the
    server has no such extension.
    """
    scope.get("extensions", {}).get(_LAST, _nothing)()


class LimitedHttpProtocol(HttpToolsProtocol):
    """Answers 431 when a request's headers are too large, 408 when they do not come, and closes.

    Two counts of bytes: `_parsed` is exact, over what the parser has handed out; `_raw` is over
    what came while one endless header keeps the parser silent.
    """

    presence: AbstractContextManager[None] = nullcontext()
    """Entered while there is a connection."""

    _refused = False
    _in_headers = False
    _in_body = False
    _begun = 0
    _parsed = 0
    _num_headers = 0
    _raw = 0
    _unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.presence.__enter__()
        self._arrival, self._reading = Alarm(self.loop), Alarm(self.loop)
        self._arrival.set(HEADER_SECONDS, self._headers_overdue)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrival.cancel()
        self._reading.cancel()
        self.presence.__exit__(None, None, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._parse(data)
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and not self._in_body and not self._arrival.is_set:
            self._arrival.set(HEADER_SECONDS, self._headers_overdue)

    def on_message_begin(self) -> None:
        self._in_headers, self._parsed, self._raw, self._num_headers = True, 0, 0, 0
        self._begun += 1
        if not self._arrival.is_set:
            self._arrival.set(HEADER_SECONDS, self._headers_overdue)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + len(b": \r\n"))
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise ValueError("there are too many headers")

    def on_headers_complete(self) -> None:
        self._in_headers, self._in_body = False, True
        self._arrival.cancel()
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {
            _LAST: partial(setattr, self.cycle, "keep_alive", False),
            _LEFT: partial(_is_closed, self.transport),
            _WRITER: ChunkWriter(self.cycle),
        }

    def on_message_complete(self) -> None:
        self._in_body = False
        self._arrival.cancel()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()
        elif self._in_body and self.cycle.response_complete:
            self._arrival.set(LEFTOVER_SECONDS, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """The connection is idle; what its client has not read by now it never will."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._reading.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser stops, also when `_count` stopped it."""
        if self._parsed > MAX_HEADER_BYTES or self._num_headers > MAX_HEADERS:
            self._refuse_headers()
        else:
            super().send_400_response(msg)

    def _parse(self, data: bytes) -> None:
        all_of_one = 0 if self._in_headers else 1
        in_body, self._begun = self._in_body, 0
        super().data_received(data)
        if in_body or self._begun != all_of_one:
            return  # the data began with the end of an earlier request
        if self._in_headers and not self._refused:
            self._raw += len(data)
            if self._raw > MAX_HEADER_BYTES:
                self._refuse_headers()

    def _count(self, number: int) -> None:
        self._parsed += number
        if self._parsed > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")

    def _refuse_headers(self) -> None:
        self._refuse(
            HeadersTooLargeError(
                f"URL and headers are larger than {MAX_HEADER_BYTES} bytes together, or there are "
                f"more than {MAX_HEADERS} headers"
            )
        )

    def _headers_overdue(self) -> None:
        """Close a connection without an answer if no request has begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._arrival.set(HEADER_SECONDS, self._headers_overdue)  # an answer is under way
        elif self._in_headers:
            self._refuse(SlowUploadError(f"the headers did not come in {HEADER_SECONDS:g} s"))
        else:
            self.transport.close()

    def _watch_reader(self) -> None:
        """Nothing more is written until what waits has been taken, so it can only get less."""
        self._unread = self.transport.get_write_buffer_size()
        self._reading.set(STALL_SECONDS, self._check_reader)

    def _check_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            self._watch_reader()
        else:
            self.cycle.scope[_STALLED] = True  # type: ignore[typeddict-unknown-key]
            self.transport.abort()

    def _refuse(self, error: RequestError) -> None:
        response = error_response(error)
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        if self.transport.can_write_eof():  # TLS has no half of a connection to close
            self.transport.write_eof()
        self._refused = True
        self._arrival.set(LINGER_SECONDS, self.transport.close)


def _is_closed(transport: asyncio.Transport) -> bool:
    """By this end or, as the kernel knows, by the other one."""
    if transport.is_closing():
        return True
    closings = select.poll()
    closings.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(closings.poll(0))


def _nothing() -> None:
    """There is no connection of ours."""
