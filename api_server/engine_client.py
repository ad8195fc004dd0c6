"""The one owner of open requests: sends them to the engine, hands out what comes back.

Runs on the event loop alone. Nothing here blocks: a link takes what is sent, and
its descriptor wakes the loop. Knows nothing of HTTP.
"""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from api_server.errors import NotAvailableError
from api_server.metrics import Metrics
from proto import PROTOCOL_VERSION
from proto.engine_io import (
    Abort,
    AdminCall,
    AdminName,
    AdminReply,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SessionInput,
)
from proto.errors import InternalRequestError, OverloadedError, ProtocolError, RequestError
from proto.lifecycle import EngineReady
from proto.sockets import Link, PeerStalledError

logger = logging.getLogger("tokend.api")

FromEngine = EngineReady | EngineCoreOutputs | AdminReply
FLUSH_SECONDS = 0.01
"""How soon to try again when the engine does not take what is sent."""


class OutputStream(Protocol):
    """Where the outputs of one engine request go."""

    @property
    def request_id(self) -> int:
        """The internal id."""
        ...

    @property
    def num_choices(self) -> int: ...

    @property
    def finished(self) -> bool:
        """Nothing more will come."""
        ...

    @property
    def error(self) -> Exception | None:
        """Why it failed, if it did."""
        ...

    def accept(self) -> None:
        """The engine took the request in."""
        ...

    def fail(self, error: RequestError) -> None:
        """End what has not ended."""
        ...

    def feed(self, output: EngineCoreOutput, timestamp: float) -> bool:
        """Take in one output; True when this ended a choice that the engine goes on with.

        timestamp: monotonic seconds at which the tokens left the engine.
        Raises a RequestError when the output is not one that can follow.
        """
        ...


class EngineClient:
    """A front end's connection to the engine of one epoch.

    link: receives `FromEngine`. request_ids: mints the internal ids.
    """

    def __init__(
        self, link: Link, epoch: int, request_ids: Iterator[int], metrics: Metrics
    ) -> None:
        self._link = link
        self.epoch = epoch
        self._request_ids = request_ids
        self._metrics = metrics
        self._open: dict[int, OutputStream] = {}
        self._calls: dict[int, asyncio.Future[AdminReply]] = {}
        self._num_calls = 0
        self._engine: EngineReady | None = None
        self._refusal: ProtocolError | None = None
        self._ready = asyncio.Event()
        self._closed = False
        self._drain_planned = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link.fileno(), self._drain)
        self._plan_drain()

    @property
    def engine(self) -> EngineReady:
        """What the engine told of itself; raises NotAvailableError before that and at the end."""
        if self._closed:
            raise NotAvailableError("the server is shutting down")
        if self._engine is None:
            raise NotAvailableError("the server is starting")
        return self._engine

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def wait_ready(self) -> EngineReady:
        """Return when the engine takes requests; raises ProtocolError for another version."""
        await self._ready.wait()
        if self._refusal is not None:
            raise self._refusal
        return self.engine

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def submit(self, request: EngineCoreRequest, stream: OutputStream) -> None:
        """Send a request; `stream` gets all that comes of it.

        Raises OverloadedError when the engine does not keep up.
        """
        self._ask(request)
        self._open[request.request_id] = stream

    def send_input(self, message: SessionInput) -> None:
        """Send the next part of a session's input; nothing for a session that is over.

        Raises OverloadedError when the engine does not keep up.
        """
        if message.request_id in self._open:
            self._ask(message)

    def abandon(self, stream: OutputStream) -> None:
        """Nobody waits for this request any more: forget it and tell the engine."""
        if self._open.pop(stream.request_id, None) is not None:
            self._abort(stream.request_id, "disconnect", None)

    async def admin(
        self,
        name: AdminName,
        *,
        pause_mode: Literal["finish_running", "freeze"] = "finish_running",
        reset_running_requests: bool = False,
    ) -> AdminReply:
        """Ask the engine for an operator's service; the parameters are those of `AdminCall`."""
        _ = self.engine
        self._num_calls += 1
        reply: asyncio.Future[AdminReply] = self._loop.create_future()
        self._calls[self._num_calls] = reply
        self._send(AdminCall(self.epoch, self._num_calls, name, pause_mode, reset_running_requests))
        return await reply

    def close(self) -> None:
        """Fail all that is open and stop listening."""
        if self._closed:
            return
        error = NotAvailableError("the server is shutting down")
        self._closed = True
        self._loop.remove_reader(self._link.fileno())
        for stream in list(self._open.values()):
            stream.fail(error)
        for reply in self._calls.values():
            reply.cancel()
        self._open.clear()
        self._link.close()

    def _ask(self, message: EngineCoreRequest | SessionInput) -> None:
        _ = self.engine
        try:
            self._send(message)
        except PeerStalledError:
            raise OverloadedError("the engine does not keep up") from None

    def _abort(
        self, request_id: int, reason: Literal["disconnect", "stop_string"], choice: int | None
    ) -> None:
        if self._closed:
            return
        try:
            self._send(Abort(self.epoch, request_id, reason, choice))
        except PeerStalledError as error:
            logger.warning("an abort waits: %s", error)

    def _send(self, message: EngineCoreRequest | SessionInput | Abort | AdminCall) -> None:
        try:
            self._link.send(message)
        finally:
            self._plan_drain()

    def _plan_drain(self) -> None:
        """The link's descriptor is edge-triggered and a send may swallow its edge."""
        if not self._drain_planned:
            self._drain_planned = True
            self._loop.call_soon(self._planned_drain)

    def _planned_drain(self) -> None:
        self._drain_planned = False
        self._drain()

    def _drain(self) -> None:
        if self._closed:
            return
        if not self._link.flush() and not self._drain_planned:
            self._drain_planned = True
            self._loop.call_later(FLUSH_SECONDS, self._planned_drain)
        for message in self._link.receive():
            self._dispatch(message)

    def _dispatch(self, message: Any) -> None:
        if message.epoch != self.epoch:
            logger.warning("dropped a message of epoch %d", message.epoch)
        elif isinstance(message, EngineCoreOutputs):
            self._on_outputs(message)
        elif isinstance(message, EngineReady):
            self._on_ready(message)
        else:
            reply = self._calls.pop(message.call_id, None)
            if reply is not None and not reply.done():
                reply.set_result(message)

    def _on_ready(self, message: EngineReady) -> None:
        if message.protocol_version != PROTOCOL_VERSION:
            self._refusal = ProtocolError(
                f"the engine speaks protocol {message.protocol_version}, not {PROTOCOL_VERSION}"
            )
        else:
            self._engine = message
        self._ready.set()

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        if message.stats is not None:
            self._metrics.scheduler_stats(message.stats)
        for request_id in message.accepted:
            stream = self._open.get(request_id)
            if stream is not None:
                stream.accept()
        for output in message.outputs:
            stream = self._open.get(output.request_id)
            if stream is not None:
                self._feed(stream, output, message.timestamp)

    def _feed(self, stream: OutputStream, output: EngineCoreOutput, timestamp: float) -> None:
        """Whatever goes wrong here is the fault of one request and ends only that one."""
        try:
            engine_goes_on = stream.feed(output, timestamp)
        except RequestError as error:
            self._fail(stream, error)
            return
        except Exception:
            logger.exception("request %d failed", stream.request_id)
            self._fail(stream, InternalRequestError("internal error"))
            return
        if stream.error is not None and stream.num_choices > 1:
            self._abort(stream.request_id, "disconnect", None)  # the choices that still run
        elif engine_goes_on:
            self._abort(stream.request_id, "stop_string", output.choice)
        if stream.finished:
            self._open.pop(stream.request_id, None)

    def _fail(self, stream: OutputStream, error: RequestError) -> None:
        stream.fail(error)
        self.abandon(stream)
