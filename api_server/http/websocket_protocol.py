"""A WebSocket connection: uvicorn's protocol with limits on what a client sends, and does not read.

    handshake ─▶ accepted or refused ─▶ frames ─▶ a message ─▶ application ─▶ next message …
                                      |UPLOAD_SECONDS|

A subclass, because uvicorn (0.54) answers no handshake that its parser rejects, reads frames as
fast as a client sends them, keeps pongs for a client that does not read, logs tracebacks of what
clients send, and closes a connection whose client does not read only after its data is sent, which
may be never.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Literal

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request

from api_server.errors import error_response
from api_server.http.connection import (
    UPLOAD_BYTES,
    UPLOAD_SECONDS,
    ReceivingProtocol,
    Timeout,
    Upload,
)
from api_server.http.request_log import TokenBucket
from proto.errors import InvalidRequestError, RequestError, shown

logger = logging.getLogger("tokend.api")

SMALL_FRAME_BYTES: Final = 16
"""Frames below this size are small; so are pings and pongs of any size."""

SMALL_FRAMES: Final = 250
"""Small frames that a client may send at once …"""

SMALL_FRAMES_PER_SECOND: Final = 50
"""… and how many more in each second. A connection with more of them is closed."""

_CONTROL: Final = frozenset({Opcode.PING, Opcode.PONG, Opcode.CLOSE})


class HandshakeError(InvalidRequestError):
    code = "invalid_handshake"


class LimitedWebSocketProtocol(ReceivingProtocol, WebSocketsSansIOProtocol):
    """uvicorn's protocol; parses frames in turns, one message ahead of the application.

    `frames` holds one array, to which the fragments of a message are appended. The
    `LimitedHttpProtocol` of the handshake sets `connection_gauge`, which counts this one already.
    """

    frames: list[bytearray]  # type: ignore[assignment]

    _num_queued_bytes = 0
    _num_taken_bytes = 0
    _num_bytes_at_mark = 0
    _late_pong = b""
    _is_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._slow_timeout = Timeout(self.loop)
        now = self.loop.time()
        self._small_frames = TokenBucket(SMALL_FRAMES, SMALL_FRAMES_PER_SECOND, now)

    def connection_lost(self, exc: Exception | None) -> None:
        self._slow_timeout.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        if self._late_pong and not self._is_ended:
            self.transport.write(self._late_pong)
            self._late_pong = b""
        super().resume_writing()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take the handshake, and then frames, which wait until it is answered."""
        if self._is_ended:
            self._read_slowly()
            return
        if self.handshake_initiated:
            self._receive(data)
            return
        self.handshake_initiated = True
        self.conn.receive_data(data)
        if self.conn.handshake_exc is not None:
            self._refuse_handshake()
        else:
            self.handle_events()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code != 101:
            headers = [
                (b"%b" % name.lower().encode(), value.encode(errors="replace"))
                for name, value in event.headers.raw_items()
            ]
            self._log_refusal(self._handshake_error(), event.path.encode(), headers)
            return
        self.scope["extensions"].update(self._extensions())

    def handle_text(self, event: Frame) -> None:
        self._begin_message(event, "text")

    def handle_bytes(self, event: Frame) -> None:
        self._begin_message(event, "bytes")

    def handle_cont(self, event: Frame) -> None:
        self.frames[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer pings; of those that come while the client does not read, only the last one."""
        output = self.conn.data_to_send()
        if self._is_ended:
            return
        if self.writable.is_set():
            self.transport.write(b"".join(output))
        elif output:
            self._late_pong = output[-1]

    def send_receive_event_to_app(self) -> None:
        """Queue a message, or close the connection if its text is no UTF-8."""
        data, self.frames = self.frames[0], []
        if self.close_sent:
            return
        if self.curr_msg_data_type == "bytes":
            self.queue.put_nowait({"type": "websocket.receive", "bytes": bytes(data)})
        else:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                self._close(CloseCode.INVALID_DATA, "the text is not valid UTF-8")
                return
            self.queue.put_nowait({"type": "websocket.receive", "text": text})
        self._num_queued_bytes += len(data)

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next message.

        It is counted until the application decodes it or asks for another one.
        Each takes a pass of the event loop, so that many small ones do not hold up other tasks.
        """
        self._num_taken_bytes = 0
        self._count_upload()
        await asyncio.sleep(0)
        message = await super().receive()
        if self.queue.empty():
            self._num_taken_bytes, self._num_queued_bytes = self._num_queued_bytes, 0
        self._continue_parsing()
        return message

    def begin_upload(self, tenant: int, end: Callable[[RequestError], None]) -> Upload:
        """Return an upload for the message that the application has taken."""
        self._num_taken_bytes = 0
        self._count_upload()
        return super().begin_upload(tenant, end)

    async def send(self, message: ASGISendEvent) -> None:
        if self._is_ended or (self.close_sent and self.transport.is_closing()):
            raise ClientDisconnected  # closed because of what the client sent
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # it is refused; uvicorn would log an error besides
        self._continue_parsing()  # after the answer of the handshake, and after a close

    def handle_parser_exception(self) -> None:
        logger.warning("a WebSocket is closed: %s", shown(str(self.conn.parser_exc)))
        super().handle_parser_exception()

    def _may_parse(self) -> bool:
        if self._is_ended or self.disconnected or self.transport.is_closing():
            return False
        if not self.handshake_complete:
            return False
        return self.close_sent or self.queue.empty()

    def _parse(self, data: bytes) -> None:
        self.conn.receive_data(data)
        if not self._small_frames.take(self.loop.time(), self._num_small_frames()):
            self._close(CloseCode.POLICY_VIOLATION, "too many small frames, pings or pongs")
        elif self.conn.parser_exc is not None:
            self.handle_parser_exception()
        else:
            self.handle_events()
            self._watch_progress()

    def _num_small_frames(self) -> int:
        return sum(
            isinstance(event, Frame)
            and (event.opcode in _CONTROL or len(event.data) < SMALL_FRAME_BYTES)
            for event in self.conn.events
        )

    def _begin_message(self, event: Frame, kind: Literal["text", "bytes"]) -> None:
        self.curr_msg_data_type = kind
        self.frames = [bytearray(event.data)]
        if event.fin:
            self.send_receive_event_to_app()

    def _num_partial_bytes(self) -> int:
        """Return how many bytes there are of a message that is not complete."""
        return len(self.conn.reader.buffer) + (len(self.frames[0]) if self.frames else 0)

    def _num_received(self) -> int:
        held = self._num_queued_bytes + self._num_taken_bytes
        return len(self._unparsed) + self._num_partial_bytes() + held

    def _watch_progress(self) -> None:
        """Close the connection unless more of a partial message comes in time."""
        number = self._num_partial_bytes()
        if not number and not self.frames:
            self._slow_timeout.cancel()
            self._num_bytes_at_mark = 0
            return
        grown = number - self._num_bytes_at_mark
        if not self._slow_timeout.is_scheduled or not 0 <= grown < UPLOAD_BYTES:
            self._num_bytes_at_mark = number
            self._slow_timeout.schedule(UPLOAD_SECONDS, self._on_slow)

    def _on_slow(self) -> None:
        if self._may_parse():
            self._close(CloseCode.POLICY_VIOLATION, "the message came too slowly")
        else:  # this side waits: an earlier message is being answered
            self._slow_timeout.schedule(UPLOAD_SECONDS, self._on_slow)

    def _end_upload(self, error: RequestError) -> None:
        self._close(CloseCode.TRY_AGAIN_LATER, error.message)

    def _close(self, code: CloseCode, reason: str) -> None:
        """End the connection; what still comes is dropped, or a reset would hide the reason."""
        self._slow_timeout.cancel()
        if self._is_ended or self.disconnected or self.transport.is_closing():
            return
        self._is_ended = True
        logger.warning("a WebSocket is closed: %s", reason)
        self.conn.fail(code, reason)
        while not self.queue.empty():
            self.queue.get_nowait()
        if self.close_sent or self.conn.close_sent is None or not self.writable.is_set():
            self.transport.abort()  # nothing more can be said, or the client does not read
        else:
            self.transport.write(b"".join(self.conn.data_to_send()))
            self._close_later()
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.conn.reader.discard()
        self.frames = []
        self._num_queued_bytes = self._num_taken_bytes = 0
        self._forget_data()

    def _refuse_handshake(self) -> None:
        """Answer a handshake that the parser of WebSockets rejects, and close."""
        error = self._handshake_error()
        self._log_refusal(error)
        self.handshake_complete = self.close_sent = self._is_ended = True
        self._write_refusal(error_response(error))

    def _handshake_error(self) -> "HandshakeError":
        error = self.conn.handshake_exc
        reason = shown(str(error and (error.__cause__ or error)))
        return HandshakeError(f"the WebSocket handshake is invalid: {reason}")
