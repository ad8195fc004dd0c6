"""HTTP/1.1 on one connection: uvicorn's protocol with limits in bytes and in time.

    connection ─▶ headers ─▶ body ─▶ response ─▶ headers …
    |HEADER_SECONDS|  (routes)  |STALL_SECONDS without a byte read|

A subclass, because uvicorn (0.54) has no option for the size of the headers, for timeouts while
headers arrive or a response is not read, for writing a chunk without waking the request's task (see
docs/benchmarks/frontend.md), or for closing a connection after a response that has begun; and
because it loses the body of a request that offers another protocol, reads pipelined requests ahead
without a limit, and sends chunks to clients of HTTP/1.0.

`LimitedHttpProtocol` is created per connection. The functions before it are for routes and
responses, which know only the ASGI scope.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import httptools
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api_server.errors import HeadersTooLargeError, SlowUploadError, error_response
from api_server.http.access import LISTENER, PUBLIC
from api_server.http.connection import (
    READ_AHEAD_BYTES,
    SLICE_BYTES,
    ReceivingProtocol,
    Timeout,
    Upload,
)
from api_server.http.websocket_protocol import LimitedWebSocketProtocol
from proto.errors import InvalidRequestError, RequestError

MAX_HEADER_BYTES: Final = 64 << 10
"""Most bytes of the URL and all header lines of a request together."""

MAX_HEADERS: Final = 128
"""Most header lines of a request."""

BODY_SLICE_BYTES: Final = 64 << 10
"""Most bytes of a body with a content-length that are parsed at once."""

HEADER_SECONDS: Final = 60.0
"""Time limit from the connection, or the first byte of a further request on it, to the end of the
headers."""

LEFTOVER_SECONDS: Final = 60.0
"""Time limit for the rest of a body whose response was complete before it had arrived."""

_OFFER_HEADERS: Final = (b"upgrade", b"http2-settings")
"""Headers that offer another protocol, also as options of the header `connection`."""

_CYCLE: Final = "tokend.cycle"
"""Name of an ASGI extension: uvicorn's RequestResponseCycle."""

_STALLED: Final = "tokend.stalled"


def close_after_response(scope: Scope) -> None:
    """Close the connection of this request when its response is complete.

    For a stream that fails after its headers were sent. Does nothing under another HTTP server.
    """
    cycle = _cycle_of(scope)
    if cycle is not None:
        cycle.keep_alive = False


def is_stalled(scope: Scope) -> bool:
    """Return whether the connection of a request was aborted because its client did not read."""
    return bool(scope.get(_STALLED))


def is_disconnected(scope: Scope) -> bool:
    """Return whether the server has seen the end of the connection: it drops what is sent."""
    cycle = _cycle_of(scope)
    return cycle is not None and cycle.disconnected


def chunk_writer(scope: Scope) -> "ChunkWriter | None":
    """Return the writer of the response to this request; None under another HTTP server."""
    cycle = _cycle_of(scope)
    return None if cycle is None else ChunkWriter(cycle)


def _cycle_of(scope: Scope) -> RequestResponseCycle | None:
    cycle: RequestResponseCycle | None = scope.get("extensions", {}).get(_CYCLE)
    return cycle


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
        """Write more of the body, but not its end; only while `ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class _ParsingControl(FlowControl):
    """uvicorn's flow control of a connection: it pauses the parsing of a body, not the reading."""

    def __init__(self, transport: asyncio.Transport, on_resumed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._on_resumed = on_resumed

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._on_resumed()


class _UnchunkedResponse:
    """A response to a client of HTTP/1.0, whose end is the end of the connection.

    uvicorn (0.54) sends chunks, which HTTP/1.0 does not have.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = False

    async def send(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._has_length = b"content-length" in names
            if not self._has_length:
                cycle.chunked_encoding = False
        elif not self._has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class LimitedHttpProtocol(ReceivingProtocol, HttpToolsProtocol):
    """uvicorn's protocol; sends 431 if the headers are too large, 408 if they are late, and closes.

    Two counts of header bytes: `_num_parsed_bytes` is exact, over what the parser has emitted;
    `_num_raw_bytes` counts received data while one endless header keeps the parser from emitting.
    `_num_body_bytes_left` is of a body with a content-length; `_last_bytes` are the last three that
    were parsed, for an end of headers that was cut. uvicorn's own pipeline stays empty.
    """

    listener = PUBLIC
    """The listener that has accepted the connection."""

    _refused = False
    _upgraded = False
    _in_headers = False
    _in_body = False
    _num_parsed_bytes = 0
    _num_headers = 0
    _num_raw_bytes = 0
    _num_body_bytes_left = 0
    _last_bytes = b""
    _body_upload: Upload | None = None
    _body_error: RequestError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.flow = _ParsingControl(self.transport, self._continue_parsing)
        self._receive_timeout = Timeout(self.loop)
        self._receive_timeout.schedule(HEADER_SECONDS, self._on_headers_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._receive_timeout.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._read_slowly()
            return
        self._unset_keepalive_if_required()
        self._receive(data)
        if len(self._unparsed) > READ_AHEAD_BYTES:
            self._drop_requests_ahead()

    def on_message_begin(self) -> None:
        self._in_headers, self._num_headers = True, 0
        self._body_upload = None
        self._num_parsed_bytes = self._num_raw_bytes = 0
        self._num_body_bytes_left = 0
        if not self._receive_timeout.is_scheduled:
            self._receive_timeout.schedule(HEADER_SECONDS, self._on_headers_late)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if self.headers[-1][0] == b"content-length" and value.isdigit():
            self._num_body_bytes_left = int(value)
        self._count_header_bytes(len(name) + len(value) + len(b": \r\n"))
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise ValueError("there are too many headers")

    def on_headers_complete(self) -> None:
        if self._ignores_offer:
            return
        self._in_headers, self._in_body = False, True
        self._receive_timeout.cancel()
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = self._extensions() | {_CYCLE: self.cycle, LISTENER: self.listener}
        if scope["http_version"] == "1.0":
            self.cycle.send = _UnchunkedResponse(self.cycle).send  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        """Add to the body as uvicorn does, but faster: a body may come in chunks of one byte."""
        self._num_body_bytes_left = max(0, self._num_body_bytes_left - len(body))
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to a `LimitedWebSocketProtocol`."""
        self._upgraded = True
        self._receive_timeout.cancel()
        early_frames = bytes(self._unparsed)
        self._forget_data()
        super().handle_websocket_upgrade()
        protocol = self.transport.get_protocol()
        if isinstance(protocol, LimitedWebSocketProtocol):
            protocol.connection_gauge = self.connection_gauge
            if (scope := getattr(protocol, "scope", None)) is not None:  # the handshake is valid
                scope["extensions"][LISTENER] = self.listener
            if early_frames:
                protocol.data_received(early_frames)

    def on_message_complete(self) -> None:
        if self._ignores_offer:
            return
        self._in_body = False
        self._receive_timeout.cancel()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._forget_data()
            self._start_stall_timeout()
        elif self._in_body and self.cycle.response_complete:
            self._receive_timeout.schedule(LEFTOVER_SECONDS, self.transport.abort)
        self._continue_parsing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; abort it if the client has not read the last response."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser rejects, or whose headers exceed a limit."""
        if self._num_parsed_bytes > MAX_HEADER_BYTES or self._num_headers > MAX_HEADERS:
            self._refuse_headers()
        else:
            self._log_refusal(InvalidRequestError.fixed(msg), self.url or b"", self.headers or ())
            super().send_400_response(msg)

    def _may_parse(self) -> bool:
        """Parse a request only after the response to the one before is complete."""
        if self._refused or self._upgraded or self.parser is None or self.transport.is_closing():
            return False
        if self._in_body:
            return not self.flow.read_paused
        return not self._is_responding

    @property
    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _slice_end(self) -> int:
        """Return a length that reaches at most to the end of a request."""
        if self._num_body_bytes_left:
            return min(self._num_body_bytes_left, BODY_SLICE_BYTES)
        # the end of the headers, of a chunked body, or within a body
        found = (self._last_bytes + self._unparsed[:SLICE_BYTES]).find(b"\r\n\r\n")
        return SLICE_BYTES if found < 0 else found + 4 - len(self._last_bytes)

    def _parse(self, data: bytes) -> None:
        self._feed_parser(data)
        last = self._last_bytes + data[-4:]
        self._last_bytes = b"" if last.endswith(b"\r\n\r\n") else last[-3:]
        if self._in_headers and not self._refused:
            self._num_raw_bytes += len(data)
            if self._num_raw_bytes > MAX_HEADER_BYTES:
                self._refuse_headers()
        if len(self._unparsed) > READ_AHEAD_BYTES:
            self._drop_requests_ahead()
        is_idle = not (self._upgraded or self._is_responding or self._in_body)
        if is_idle and not self._receive_timeout.is_scheduled:
            self._receive_timeout.schedule(HEADER_SECONDS, self._on_headers_late)

    def _feed_parser(self, data: bytes) -> None:
        """Parse data as uvicorn does. A request whose offer is ignored is parsed again without it.

        The parser skips the body of a request that offers another protocol.
        """
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._should_upgrade():
                    self.handle_websocket_upgrade()
                    return
                if not self._ignores_offer:
                    self._drop_pipeline()  # CONNECT: what follows is not HTTP
                    return
                data = self._head_without_offer() + data[upgrade.args[0] :]
                # this one takes no data after a request that closes the connection
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def begin_upload(self, tenant: int, end: Callable[[RequestError], None]) -> Upload:
        self._body_upload = super().begin_upload(tenant, end)
        if self._body_error is not None:
            end(self._body_error)
        return self._body_upload

    def _end_upload(self, error: RequestError) -> None:
        """Refuse what has not been parsed; the connection ends with the response in progress.

        The application refuses a body that it is reading, and the rest is dropped as it comes.
        """
        if self._in_body and self._body_upload is not None:
            self._body_upload.end(error)
        elif self._is_responding:
            self._body_error = error
            self._drop_pipeline()
        else:
            self._refuse(error)

    def _drop_requests_ahead(self) -> None:
        """Drop requests that wait for a response, after which the connection ends.

        The connection is read on, because otherwise its end would not be noticed.
        """
        if self._is_responding and not self._in_body:
            self._drop_pipeline()

    def _drop_pipeline(self) -> None:
        """Drop what was and will be received; the connection ends with the response in progress."""
        self.cycle.keep_alive = False
        self._refused = True
        self._forget_data()

    @property
    def _ignores_offer(self) -> bool:
        """The request offers another protocol, which is not used (RFC 9110, 7.8)."""
        is_offer = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        return is_offer and not self._should_upgrade()

    def _should_upgrade(self) -> bool:
        """Return whether a request that offers another protocol opens a WebSocket."""
        headers = dict(self.headers)
        return (
            self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and headers.get(b"upgrade", b"").lower() == b"websocket"
            and b"sec-websocket-key" in headers
            and headers.get(b"content-length", b"0") == b"0"
            and b"transfer-encoding" not in headers
        )

    def _head_without_offer(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(each for each in options if each.lower() not in _OFFER_HEADERS)
            if name not in _OFFER_HEADERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _count_header_bytes(self, number: int) -> None:
        self._num_parsed_bytes += number
        if self._num_parsed_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")

    def _refuse_headers(self) -> None:
        self._refuse(
            HeadersTooLargeError(
                f"URL and headers are larger than {MAX_HEADER_BYTES} bytes together, or there are "
                f"more than {MAX_HEADERS} headers"
            )
        )

    def _on_headers_late(self) -> None:
        """Refuse a request without complete headers; close a connection without a request."""
        if self._is_responding:
            # a response is being sent: look again later
            self._receive_timeout.schedule(HEADER_SECONDS, self._on_headers_late)
        elif self._in_headers:
            self._refuse(SlowUploadError(f"the headers did not come in {HEADER_SECONDS:g} s"))
        else:
            self.transport.close()

    def _abort_stalled(self) -> None:
        self.cycle.scope[_STALLED] = True  # type: ignore[typeddict-unknown-key]
        super()._abort_stalled()

    def _refuse(self, error: RequestError) -> None:
        self._log_refusal(error, self.url or b"", self.headers or ())
        response = error_response(error)
        origin = next((value for name, value in self.headers or () if name == b"origin"), None)
        _add_cors_headers(self.app, response, None if origin is None else origin.decode("latin-1"))
        self._refused = True
        self._receive_timeout.cancel()
        self._write_refusal(response)


def _add_cors_headers(app: object, response: Response, origin: str | None) -> None:
    """Add the CORS headers of an application to a response that does not come from it.

    origin: of the page that asks; None if it is not known.
    """
    if not isinstance(app, CORSMiddleware):
        return
    response.headers.update(app.simple_headers)
    if origin is not None and app.preflight_explicit_allow_origin and app.is_allowed_origin(origin):
        app.allow_explicit_origin(response.headers, origin)
