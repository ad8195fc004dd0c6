"""From a generation to an HTTP response, streamed or whole.

Owns the order of things: no status before the engine accepted the request, then
the events, and an abort as soon as the client goes away. Speaks ASGI itself: one
wake-up and one send for each new piece of text, or, where the connection takes it at
once, just one write.
"""

import asyncio
import json
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_server.http_protocol import (
    BodyWriter,
    body_writer,
    close_after_response,
    has_left,
    is_stalled,
)
from api_server.protocol.answers import Answer
from api_server.stream import Generation, KeepAlive
from proto.errors import InternalRequestError, RequestError

logger = logging.getLogger("tokend.api")

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """The response to one generation.

    stream: as server-sent events. keep_alive: seconds of silence after which a stream gets a
    sign of life, 0 for never. more_headers: beside those of every answer.
    """

    def __init__(
        self,
        generation: Generation,
        answer: Answer,
        *,
        stream: bool,
        keep_alive: float,
        more_headers: list[tuple[bytes, bytes]],
    ) -> None:
        super().__init__()
        self._more_headers = more_headers
        self._generation = generation
        self._answer = answer
        self._stream = stream
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        watch = asyncio.create_task(self._watch(scope, receive))
        try:
            if has_left(scope):
                await watch  # which hears of it in a moment
                return
            await generation.start()
            if generation.disconnected:
                return
            if self._stream:
                await self._send_events(scope, send)
            else:
                await self._send_whole(send)
        finally:
            watch.cancel()
            generation.close()

    async def _watch(self, scope: Scope, receive: Receive) -> None:
        """End the generation when the client goes away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.disconnect("slow_reader" if is_stalled(scope) else "disconnect")

    async def _send_events(self, scope: Scope, send: Send) -> None:
        """Event by event. A failure is an event, the last one, then the end of the connection."""
        headers = EVENT_STREAM_HEADERS + self._more_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        keep_alive = KeepAlive(
            self._keep_alive, self._generation.bell.ring, self._answer.keep_alive
        )
        try:
            await self._send_until_over(scope, send, keep_alive)
        finally:
            keep_alive.close()

    async def _send_until_over(self, scope: Scope, send: Send, keep_alive: KeepAlive) -> None:
        generation, begin = self._generation, self._answer.begin()
        writer = body_writer(scope)
        while True:  # look, then wait: what came with the acceptance has rung already
            if generation.disconnected:
                return
            events, over, error = self._next_events()
            if error is not None:
                close_after_response(scope)
                events += self._answer.failure(error)
            events = begin + events or keep_alive.take()
            begin = ""
            if events:
                body = events.encode()
                generation.unsent.is_blocked = True  # seen by others only if `send` has to wait
                await send({"type": "http.response.body", "body": body, "more_body": not over})
                generation.unsent.is_blocked = False
                keep_alive.spoke()
            if over:
                return
            await generation.wait(lambda: self._tell(writer, keep_alive))

    def _tell(self, writer: BodyWriter, keep_alive: KeepAlive) -> bool:
        """Write what there is if the answer just goes on; False where there is more to it."""
        generation = self._generation
        if not (writer.ready and generation.goes_on):
            return False
        try:
            events = "".join([self._answer.chunk(delta) for delta in generation.take()])
        except Exception:
            logger.exception("%s: an answer could not be put into words", generation.label)
            generation.fail(InternalRequestError("internal error"))
            return False
        events = events or keep_alive.take()
        if events:
            writer.write(events.encode())
            keep_alive.spoke()
        return True

    def _next_events(self) -> tuple[str, bool, RequestError | None]:
        """What there is to send, whether it is the last, and the failure that makes it so."""
        generation = self._generation
        try:
            events = "".join([self._answer.chunk(delta) for delta in generation.take()])
            if generation.error is not None:
                return events, True, generation.error
            if generation.finished:
                events += self._answer.end(generation.usage())
            return events, generation.finished, None
        except Exception:  # the status is sent: no other handler could tell the client
            logger.exception("%s: an answer could not be put into words", generation.label)
            return "", True, InternalRequestError("internal error")

    async def _send_whole(self, send: Send) -> None:
        generation = self._generation
        while not generation.finished and generation.error is None:
            await generation.wait()
            if generation.disconnected:
                return
        if generation.error is not None:
            raise generation.error
        body = json.dumps(self._answer.body(generation.take(), generation.usage())).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._more_headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
