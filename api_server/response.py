"""From a token stream to an HTTP response, streamed or whole.

The status is sent first, after `TokenStream.submit` has returned, then one server-sent event for
each delta. Speaks ASGI itself: one wake-up and one send per delta, or a single write where the
connection accepts it at once.
"""

import asyncio
import json
import logging
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_server.http.http_protocol import ChunkWriter, chunk_writer, close_after_response
from api_server.protocol.answers import Answer
from api_server.stream import TokenStream
from proto.errors import InternalRequestError, RequestError

logger = logging.getLogger("tokend.api")

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class KeepAlive:
    """Timer of one event stream that asks for a sign of life after a period of silence.

    Proxies close a connection that is silent for long. seconds: of silence; 0 for never.
    notify: called when the sign is due, to have the response `take` it. sign: the event to send.
    """

    def __init__(self, seconds: float, notify: Callable[[], None], sign: str) -> None:
        self._seconds = seconds
        self._notify = notify
        self._sign = sign
        self._loop = asyncio.get_running_loop()
        self._due = False
        self._last_write = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._check) if seconds else None

    def record_write(self) -> None:
        """Restart the period of silence."""
        self._due = False
        self._last_write = self._loop.time()

    def take(self) -> str:
        """Return the sign if it is due, "" otherwise."""
        return self._sign if self._due else ""

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        """Run the only timer of the stream, which usually finds that something was written."""
        left = self._last_write + self._seconds - self._loop.time()
        if left <= 0.0:
            self._due = True
            self._notify()
            left = self._seconds
        self._timer = self._loop.call_later(left, self._check)


class GenerationResponse(Response):
    """The response to one token stream, which has been submitted.

    as_events: as server-sent events. keep_alive: seconds of silence after which a stream gets a
    sign of life, 0 for never. more_headers: beside those of every answer.
    """

    def __init__(
        self,
        stream: TokenStream,
        answer: Answer,
        *,
        as_events: bool,
        keep_alive: float,
        more_headers: list[tuple[bytes, bytes]],
    ) -> None:
        super().__init__()
        self._stream = stream
        self._answer = answer
        self._as_events = as_events
        self._keep_alive = keep_alive
        self._more_headers = more_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._stream.disconnected:
                return
            if self._as_events:
                await self._send_events(scope, send)
            else:
                await self._send_whole(send)
        finally:
            self._stream.close()

    async def _send_events(self, scope: Scope, send: Send) -> None:
        """Send the events. A failure is the last event; the connection is closed after it."""
        headers = EVENT_STREAM_HEADERS + self._more_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        notify = self._stream.notifier.notify
        keep_alive = KeepAlive(self._keep_alive, notify, self._answer.keep_alive)
        try:
            await self._send_until_finished(scope, send, keep_alive)
        finally:
            keep_alive.close()

    async def _send_until_finished(self, scope: Scope, send: Send, keep_alive: KeepAlive) -> None:
        stream, begin = self._stream, self._answer.begin()
        writer = chunk_writer(scope)
        while not stream.disconnected:
            events, is_last, error = self._next_events()
            if error is not None:
                close_after_response(scope)
                events += self._answer.failure(error)
            events = begin + events or keep_alive.take()
            begin = ""
            if events:
                body = events.encode()
                stream.send_buffer.is_blocked = True  # visible to others only if `send` suspends
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
                stream.send_buffer.is_blocked = False
                keep_alive.record_write()
            if is_last:
                return
            await stream.wait(lambda: self._write_chunk(writer, keep_alive))

    def _write_chunk(self, writer: ChunkWriter | None, keep_alive: KeepAlive) -> bool:
        """Write the pending deltas of a running stream past the coroutines of the server.

        False, having done nothing, if the connection is blocked or the stream has ended.
        """
        stream = self._stream
        if writer is None or not (writer.ready and stream.is_running):
            return False
        try:
            events = "".join([self._answer.chunk(delta) for delta in stream.take_deltas()])
        except Exception:
            logger.exception("%s: the answer could not be encoded", stream.label)
            stream.fail(InternalRequestError("internal error"))
            return False
        events = events or keep_alive.take()
        if events:
            writer.write(events.encode())
            keep_alive.record_write()
        return True

    def _next_events(self) -> tuple[str, bool, RequestError | None]:
        """Return the pending events, whether they are the last, and the failure if it is one."""
        stream = self._stream
        try:
            events = "".join([self._answer.chunk(delta) for delta in stream.take_deltas()])
            if stream.error is not None:
                return events, True, stream.error
            if stream.finished:
                events += self._answer.end(stream.usage())
            return events, stream.finished, None
        except Exception:  # the status is sent: no other handler could tell the client
            logger.exception("%s: the answer could not be encoded", stream.label)
            return "", True, InternalRequestError("internal error")

    async def _send_whole(self, send: Send) -> None:
        stream = self._stream
        while not stream.finished and stream.error is None:
            await stream.wait()
            if stream.disconnected:
                return
        if stream.error is not None:
            raise stream.error
        body = json.dumps(self._answer.body(stream.take_deltas(), stream.usage())).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._more_headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
