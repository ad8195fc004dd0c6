"""Deltas of a token stream → server-sent events or one JSON body → the connection.

`TokenStream.submit` has returned before, so the status is 200. Each delta becomes one event.
Usually `GenerationResponse._write_chunk` writes it to the connection at once, called by the
`StreamNotifier`. The response's task is resumed, and sends through uvicorn, for the headers, the
last event, failures, an event that was there before the task waited, and a full connection.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_server.generation.encoders.base import ResponseEncoder, flat_texts, json_parts
from api_server.generation.request_stream import StreamNotifier
from api_server.generation.stream import TokenStream
from api_server.http.http_protocol import (
    ChunkWriter,
    chunk_writer,
    close_after_response,
    is_disconnected,
)
from api_server.turns import current_client
from proto.errors import InternalRequestError, RequestError

logger = logging.getLogger("tokend.api")

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """The response to one token stream, which has been submitted.

    as_events: as server-sent events. keep_alive_seconds: of silence, after which an event stream
    gets a keep-alive event; 0 for never. extra_headers: beside those of every response.
    """

    def __init__(
        self,
        stream: TokenStream,
        encoder: ResponseEncoder,
        *,
        as_events: bool,
        keep_alive_seconds: float,
        extra_headers: list[tuple[bytes, bytes]],
    ) -> None:
        super().__init__()
        self._stream = stream
        self._encoder = encoder
        self._as_events = as_events
        self._keep_alive_seconds = keep_alive_seconds
        self._extra_headers = extra_headers
        self._unsent: list[str | Iterator[str]] = []  # events that `_write_chunk` did not write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._stream.disconnected:
                return
            if self._as_events:
                await self._send_events(scope, send)
            else:
                await self._send_json(scope, receive, send)
        finally:
            self._stream.close()

    async def _send_events(self, scope: Scope, send: Send) -> None:
        """Send the events. A failure is the last event; the connection is closed after it."""
        headers = EVENT_STREAM_HEADERS + self._extra_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        keep_alive = KeepAlive(
            self._keep_alive_seconds, self._stream.notifier, self._encoder.keep_alive
        )
        try:
            await self._send_until_finished(scope, send, keep_alive)
        finally:
            keep_alive.close()

    async def _send_until_finished(self, scope: Scope, send: Send, keep_alive: "KeepAlive") -> None:
        stream, begin = self._stream, self._encoder.encode_start()
        writer = chunk_writer(scope)
        while not stream.disconnected:
            events, is_last, error = next_events(stream, self._encoder)
            events, self._unsent = [begin, *self._unsent, *events], []
            if error is not None:
                close_after_response(scope)
                events.append(self._encoder.encode_error(error))
            if not any(events):
                events = [keep_alive.due_event()]
            begin = ""
            pieces = _joined(events)
            piece = next(pieces, None)
            while piece is not None and not stream.disconnected:
                following = next(pieces, None)
                more = following is not None or not is_last
                stream.send_buffer.is_blocked = True  # visible to others only if `send` suspends
                await send({"type": "http.response.body", "body": piece, "more_body": more})
                stream.send_buffer.is_blocked = False
                keep_alive.record_write()
                piece = following
                if piece is not None:
                    await asyncio.sleep(0)
            if is_last:
                return
            await stream.wait(lambda: self._write_chunk(writer, keep_alive))

    def _write_chunk(self, writer: ChunkWriter | None, keep_alive: "KeepAlive") -> bool:
        """Write the pending deltas of a running stream past the coroutines of the server.

        False, having done nothing, if the connection is blocked or the stream has ended.
        """
        stream = self._stream
        if writer is None or not (writer.ready and stream.is_running):
            return False
        try:
            pieces = [self._encoder.encode_delta(delta) for delta in stream.pop_deltas()]
        except Exception:
            _fail_to_encode(stream)
            return False
        texts = [piece for piece in pieces if isinstance(piece, str)]
        if len(texts) < len(pieces):
            self._unsent = pieces
            return False
        events = "".join(texts) or keep_alive.due_event()
        if events:
            writer.write(events.encode())
            keep_alive.record_write()
        return True

    async def _send_json(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole answer when it is finished; raises the stream's error."""
        stream = self._stream
        while not stream.finished and stream.error is None:
            await stream.wait()
            if stream.disconnected:
                return
        if stream.error is not None:
            raise self._encoder.client_error(stream.error)
        body = await self._encoder.encode_body(stream.pop_deltas(), stream.usage())
        await JsonResponse(json_parts(body), self._extra_headers)(scope, receive, send)


class JsonResponse(Response):
    """A response with a JSON body; a long one in parts, between which others get their turn.

    A part is made when the connection has taken those before it, and if the client is connected.
    """

    def __init__(self, parts: Iterator[str], extra_headers: Sequence[tuple[bytes, bytes]]) -> None:
        super().__init__()
        self._parts = parts
        self._extra_headers = extra_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        current_client().release_body()  # the client may read the response as slowly as it likes
        pieces = _joined(self._parts)
        first = next(pieces, b"")
        second = next(pieces, None)
        headers = [(b"content-type", b"application/json"), *self._extra_headers]
        if second is None:
            headers.append((b"content-length", str(len(first)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if second is not None:
            for piece in chain((first, second), pieces):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)
                if is_disconnected(scope):
                    return
            first = b""
        await send({"type": "http.response.body", "body": first})


PIECE_CHARACTERS: Final = 1 << 16
"""Characters of a response that are sent at once, about."""


def _joined(texts: Iterable[str | Iterator[str]]) -> Iterator[bytes]:
    """Yield texts, and the parts of iterators, joined to pieces of at least PIECE_CHARACTERS."""
    waiting: list[str] = []
    size = 0
    for part in flat_texts(texts):
        waiting.append(part)
        size += len(part)
        if size >= PIECE_CHARACTERS:
            yield "".join(waiting).encode()
            waiting.clear()
            size = 0
    if size:
        yield "".join(waiting).encode()


async def event_text(events: Iterable[str | Iterator[str]]) -> str:
    """Return the events as one text; others get their turn while a long one is made."""
    pieces: list[bytes] = []
    for piece in _joined(events):
        if pieces:
            await asyncio.sleep(0)
        pieces.append(piece)
    return b"".join(pieces).decode()


def next_events(
    stream: TokenStream, encoder: ResponseEncoder
) -> tuple[list[str | Iterator[str]], bool, RequestError | None]:
    """Return the pending events, whether they are the last, and the failure if it is one."""
    try:
        events = [encoder.encode_delta(delta) for delta in stream.pop_deltas()]
        if stream.error is not None:
            return events, True, stream.error
        if stream.finished:
            events.append(encoder.encode_end(stream.usage()))
        return events, stream.finished, None
    except Exception:  # the status is sent: no other handler could report the error
        return [], True, _fail_to_encode(stream)


def _fail_to_encode(stream: TokenStream) -> RequestError:
    """Log the exception, and end the stream with an error, as which it is counted and logged."""
    logger.exception("%s: the response could not be encoded", stream.label)
    error = InternalRequestError("internal error")
    stream.fail(error)
    return error


class KeepAlive:
    """Timer of one event stream; after a period of silence, a keep-alive event is due.

    Proxies close connections that are silent for long. seconds: of silence; 0 for never.
    notifier: resumes the response when the event is due.
    """

    def __init__(self, seconds: float, notifier: StreamNotifier, event: str) -> None:
        self._seconds = seconds
        self._notifier = notifier
        self._event = event
        self._loop = asyncio.get_running_loop()
        self._is_due = False
        self._last_write = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._check_silence) if seconds else None

    def record_write(self) -> None:
        self._is_due = False
        self._last_write = self._loop.time()

    def due_event(self) -> str:
        return self._event if self._is_due else ""

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_silence(self) -> None:
        """Restart the stream's only timer; usually something was written in the meantime."""
        left = self._last_write + self._seconds - self._loop.time()
        if left <= 0.0:
            self._is_due = True
            self._notifier.notify()
            left = self._seconds
        self._timer = self._loop.call_later(left, self._check_silence)
