"""The one owner of open requests: sends them to the engine, hands out what comes back.

Runs on the event loop alone. Nothing here blocks: a link takes what is sent, and
its descriptor wakes the loop. Knows nothing of HTTP.

    engine of epoch 1 ─ dies ─▶ gap: requests wait, aborts are remembered ─▶ engine of epoch 2
                                by forgetting                                is sent what is open
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

from api_server.errors import NotAvailableError
from api_server.metrics import Metrics
from api_server.open_requests import OpenRequest, OutputStream
from proto import PROTOCOL_VERSION
from proto.codec import changed
from proto.engine_io import (
    Abort,
    AdminCall,
    AdminName,
    AdminReply,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    PauseMode,
    SessionInput,
)
from proto.errors import (
    InternalRequestError,
    OverloadedError,
    ProtocolError,
    RequestError,
    TimeLimitError,
)
from proto.lifecycle import EngineReady
from proto.sockets import Link, PeerStalledError
from proto.stats import SchedulerStats

logger = logging.getLogger("tokend.api")

FromEngine = EngineReady | EngineCoreOutputs | AdminReply
FLUSH_SECONDS = 0.01
"""How soon to try again when the engine does not take what is sent."""
GAP_SECONDS = 0.1
"""How often to look, while there is no engine, for requests whose time is over."""
MAX_WAITING = 4096
"""Requests that wait for an engine that is being restarted; more are refused."""
NOTHING_RUNS: Final = SchedulerStats(num_running=0, num_waiting=0, kv_cache_usage=0.0)


class EngineClient:
    """A front end's connection to the engine, and to the next one when that dies.

    link: to the engine of `epoch`; receives `FromEngine`. request_ids: mints the internal
    ids. crashes_until_alone: as in the settings of the scheduler.
    """

    def __init__(
        self,
        link: Link,
        epoch: int,
        request_ids: Iterator[int],
        metrics: Metrics,
        crashes_until_alone: int,
    ) -> None:
        self._link = link
        self.epoch = epoch
        self._crashes_until_alone = crashes_until_alone
        self._request_ids = request_ids
        self._metrics = metrics
        self._open: dict[int, OpenRequest] = {}
        self._calls: dict[int, tuple[AdminCall, asyncio.Future[AdminReply]]] = {}
        self._num_calls = 0
        self._engine: EngineReady | None = None
        self._connected = False
        self._refusal: ProtocolError | None = None
        self._ready = asyncio.Event()
        self._closed = False
        self._drain_planned = False
        self._deaf = False
        self._on_nonsense: Callable[[int], None] = lambda epoch: None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link.fileno(), self._drain)
        self._plan_drain()

    def when_nonsense(self, tell: Callable[[int], None]) -> None:
        """Have `tell` called with the epoch of an engine that sends what is no message.

        What that was meant to say is lost, so nothing more is heard of that engine; its requests
        wait for the next one.
        """
        self._on_nonsense = tell

    @property
    def engine(self) -> EngineReady:
        """What the engine told of itself; raises NotAvailableError before that and at the end.

        While an engine is restarted this is what the last one told.
        """
        if self._closed:
            raise NotAvailableError("the server is shutting down")
        if self._engine is None:
            raise NotAvailableError("the server is starting")
        return self._engine

    @property
    def connected(self) -> bool:
        """An engine takes what is sent now."""
        return self._connected

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
        """Send a request, or let it wait for the engine; `stream` gets all that comes of it.

        Raises OverloadedError when the engine does not keep up.
        """
        _ = self.engine
        entry = OpenRequest(request, stream)
        if self._connected:
            self._ask(entry.message(self.epoch))
            entry.sent = True
        elif len(self._open) >= MAX_WAITING:
            self._metrics.admission_rejected("restart")
            raise OverloadedError("the engine is being restarted and too many requests wait")
        self._open[request.request_id] = entry

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
        pause_mode: PauseMode = "finish_running",
        reset_running_requests: bool = False,
    ) -> AdminReply:
        """Ask the engine for an operator's service; the parameters are those of `AdminCall`."""
        _ = self.engine
        self._num_calls += 1
        reply: asyncio.Future[AdminReply] = self._loop.create_future()
        call = AdminCall(self.epoch, self._num_calls, name, pause_mode, reset_running_requests)
        self._calls[self._num_calls] = call, reply
        if self._connected:
            self._send(call)
        return await reply

    def reconnect(self, link: Link, epoch: int) -> None:
        """The engine died: what is open goes to the one of this epoch, as soon as it is ready."""
        if self._closed:
            link.close()
            return
        self._drain()  # what it said before it died counts
        self._loop.remove_reader(self._link.fileno())
        self._link.close()
        self._link, self.epoch, self._connected, self._deaf = link, epoch, False, False
        for entry in list(self._open.values()):
            entry.note_crash(self._crashes_until_alone)
            if entry.request.resumable:
                del self._open[entry.request.request_id]
                entry.stream.fail(InternalRequestError("the session ended with its engine"))
        self._loop.add_reader(link.fileno(), self._drain)
        self._plan_drain()
        self._watch_gap(epoch)

    def close(self) -> None:
        """Fail all that is open and stop listening."""
        if self._closed:
            return
        error = NotAvailableError("the server is shutting down")
        self._closed = True
        self._loop.remove_reader(self._link.fileno())
        for entry in list(self._open.values()):
            entry.stream.fail(error)
        for _, reply in self._calls.values():
            reply.cancel()
        self._open.clear()
        self._link.close()

    def _watch_gap(self, epoch: int) -> None:
        """Until the engine of an epoch is there, nobody else ends requests whose time is over."""
        if self._closed or self._connected or epoch != self.epoch:
            return
        now = time.monotonic()
        for entry in list(self._open.values()):
            try:
                entry.check_time(now)
            except TimeLimitError as error:
                self._fail(entry.stream, error)
        self._loop.call_later(GAP_SECONDS, self._watch_gap, epoch)

    def _ask(self, message: EngineCoreRequest | SessionInput) -> None:
        _ = self.engine
        try:
            self._send(message)
        except PeerStalledError:
            raise OverloadedError("the engine does not keep up") from None

    def _abort(
        self, request_id: int, reason: Literal["disconnect", "stop_string"], choice: int | None
    ) -> None:
        if self._closed or not self._connected:
            return  # the next engine never hears of what is not open any more
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
        if self._closed or self._deaf:
            return
        if not self._link.flush() and not self._drain_planned:
            self._drain_planned = True
            self._loop.call_later(FLUSH_SECONDS, self._planned_drain)
        messages = self._link.receive()
        if self._link.num_undecodable and self._connected:
            logger.error("the engine sent what is no message: waiting for the next one")
            self._deaf, self._connected = True, False
            self._on_nonsense(self.epoch)
            return  # what came with it may have a hole in it
        for message in messages:
            self._dispatch(message)

    def _dispatch(self, message: Any) -> None:
        if message.epoch != self.epoch:
            logger.warning("dropped a message of epoch %d", message.epoch)
        elif isinstance(message, EngineCoreOutputs):
            self._on_outputs(message)
        elif isinstance(message, EngineReady):
            self._on_ready(message)
        else:
            _, reply = self._calls.pop(message.call_id, (None, None))
            if reply is not None and not reply.done():
                reply.set_result(message)

    def _on_ready(self, message: EngineReady) -> None:
        if message.protocol_version != PROTOCOL_VERSION:
            self._refusal = ProtocolError(
                f"the engine speaks protocol {message.protocol_version}, not {PROTOCOL_VERSION}"
            )
        else:
            self._engine = message
            self._metrics.queue_limits(message.max_num_queued_reqs, message.max_num_queued_tokens)
            self._connected = True
            self._send_again()
        self._ready.set()

    def _send_again(self) -> None:
        """To the engine that is ready: all that is open and all calls that have no answer.

        Suspects go first: nothing else can then be under way when they are computed.
        """
        self._metrics.scheduler_stats(NOTHING_RUNS)  # until it says otherwise
        for call, _ in self._calls.values():
            self._send(changed(call, epoch=self.epoch))
        entries = [entry for entry in self._open.values() if not entry.sent]
        for entry in sorted(entries, key=lambda each: -each.crash_count):
            try:
                self._ask(entry.message(self.epoch))
                entry.sent = True
            except OverloadedError as error:
                self._fail(entry.stream, error)

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        if message.stats is not None:
            self._metrics.scheduler_stats(message.stats)
        for request_id in message.accepted:
            entry = self._open.get(request_id)
            if entry is not None:
                entry.accept()
        for request_id in message.alone:
            entry = self._open.get(request_id)
            if entry is not None:
                entry.alone = True
        for output in message.outputs:
            entry = self._open.get(output.request_id)
            if entry is not None:
                self._feed(entry.stream, output, message.timestamp)

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
