"""The client of the engine: send requests, route outputs to streams, survive an engine's death.

`EngineConnection` is the connection to the engine of one epoch, `EngineClient` sends each request
over one of them. Start reading at `EngineClient.submit` and `EngineClient.handle_message`. Runs on
the event loop only and knows nothing of HTTP.

    engine of epoch 1 ─ dies ─▶ no engine: requests wait, aborts ─▶ engine of epoch 2
                                remove them                         gets all open requests

    a reload    engine of epoch 2 ── its open requests ────────▶ the last one finishes, or the
                engine of epoch 3 ── all new requests ─────────▶ engine dies and 3 gets the rest
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from api_server.engine.async_link import SupervisorLink
from api_server.engine.open_request import NO_ENGINE, OpenRequest, OutputStream
from api_server.errors import NotAvailableError
from api_server.live_view.publisher import LiveViewPublisher
from api_server.metrics.metrics import Metrics
from proto import PROTOCOL_VERSION
from proto.codec import Message, changed
from proto.errors import InternalRequestError, OverloadedError, ProtocolError, RequestError
from proto.messages.engine_io import (
    Abort,
    AdminCall,
    AdminName,
    AdminReply,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SessionInput,
    TurnEnded,
)
from proto.messages.lifecycle import EngineReady, ProcessBoot, ProtocolViolation
from proto.messages.lora import AdapterCall, AdapterCard, AdapterList, AdapterReply, AdapterUsage
from proto.messages.view import EngineView, Watch
from proto.runtime.sockets import Link, PeerStalledError, front_end_path

logger = logging.getLogger("tokend.api")

FromEngine = (
    EngineReady
    | EngineCoreOutputs
    | AdminReply
    | EngineView
    | AdapterReply
    | AdapterList
    | AdapterUsage
)
FLUSH_SECONDS: Final = 0.01
"""Interval of attempts to send to an engine whose receive buffer is full."""
DEADLINE_CHECK_SECONDS = 0.1
"""Interval of the deadline checks while no engine is connected."""
MAX_WAITING = 4096
"""Most requests that wait for an engine that is being restarted."""


def connect_engine(boot: ProcessBoot, epoch: int) -> Link:
    """Return the link of this front end to the engine of an epoch."""
    path = front_end_path(boot.run_dir, epoch, boot.index, boot.incarnation)
    return Link.connect(path, FromEngine)


@dataclass(slots=True)
class AdapterTable:
    """The adapters of an engine.

    by_name: in the order of loading. by_number: by the numbers of their names. default: the one of
    requests that name none; None if there is none.
    """

    by_name: dict[str, AdapterCard] = field(default_factory=dict)
    by_number: dict[int, AdapterCard] = field(default_factory=dict)
    default: AdapterCard | None = None

    def update(self, message: AdapterList) -> None:
        """Apply a message of the engine, in time for what has changed."""
        if not message.is_change:
            self.by_number.clear()
            self.default = None
        for name in (*message.removed, *(card.lora.lora_name for card in message.adapters)):
            old = self.by_name.get(name)
            if old is not None:
                self.by_number.pop(old.number, None)
            if self.default is not None and self.default.lora.lora_name == name:
                self.default = None
        message.apply_to(self.by_name)
        for card in message.adapters:
            self.by_number[card.number] = card
            if card.default_scale:
                self.default = card


class EngineConnection:
    """The connection of an `EngineClient` to the engine of one epoch, on the event loop.

    Never blocks: the link queues what is sent, and its descriptor wakes the event loop.
    engine: its properties; None before it is ready. adapters: by name; None before it sent them.
    """

    def __init__(self, client: "EngineClient", link: Link, epoch: int) -> None:
        self._client = client
        self._link = link
        self.epoch = epoch
        self.engine: EngineReady | None = None
        self.adapters: AdapterTable | None = None
        self._version_error: ProtocolError | None = None
        self._ready_or_closed = asyncio.Event()
        self._closed = self._sent_garbage = False
        self._exchange_scheduled = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link.fileno(), self.exchange_messages)
        self._schedule_exchange()

    @property
    def ready(self) -> bool:
        return self.engine is not None and not self._sent_garbage

    @property
    def stalled(self) -> bool:
        """The engine does not keep up: send it nothing that can be refused or deferred."""
        return self._link.is_stalled

    async def wait_ready_or_closed(self) -> None:
        """Return when the engine is ready or the connection is closed.

        Raises ProtocolError for an engine of another version.
        """
        await self._ready_or_closed.wait()
        if self._version_error is not None:
            raise self._version_error

    def send(self, message: Message) -> None:
        """Queue a message, also when the engine is stalled."""
        with contextlib.suppress(PeerStalledError):
            self._link.send(message)
        self._schedule_exchange()

    def exchange_messages(self) -> None:
        """Send queued messages, and pass what has arrived to the client."""
        if self._closed or self._sent_garbage:
            return
        if not self._link.flush() and not self._exchange_scheduled:
            self._exchange_scheduled = True
            self._loop.call_later(FLUSH_SECONDS, self._run_scheduled_exchange)
        messages = self._link.receive()
        if self._link.num_undecodable and self.ready:
            logger.error("the engine sent an undecodable message: waiting for the next engine")
            self._sent_garbage = True
            self._ready_or_closed.clear()
            self._client.report_garbage(self.epoch)
            return  # an output between these messages may be missing
        for message in messages:
            self._process_message(message)

    def close(self) -> None:
        """Stop receiving; further messages to the engine are dropped."""
        if not self._closed:
            self._closed = True
            self._ready_or_closed.set()
            self._loop.remove_reader(self._link.fileno())
            self._link.close()

    def _schedule_exchange(self) -> None:
        """The link's descriptor is edge-triggered, and sending may consume the edge."""
        if not self._exchange_scheduled:
            self._exchange_scheduled = True
            self._loop.call_soon(self._run_scheduled_exchange)

    def _run_scheduled_exchange(self) -> None:
        self._exchange_scheduled = False
        self.exchange_messages()

    def _process_message(self, message: Any) -> None:
        if message.epoch != self.epoch:
            logger.warning("dropped a message of epoch %d", message.epoch)
            return
        if isinstance(message, EngineReady):
            self._ready_or_closed.set()
            if message.protocol_version != PROTOCOL_VERSION:
                self._version_error = ProtocolError(
                    f"the engine speaks protocol {message.protocol_version}, not {PROTOCOL_VERSION}"
                )
                return
            self.engine = message
        self._client.handle_message(self.epoch, message)


class EngineClient:
    """Sends requests to the current engine and routes the outputs of all engines to their streams.

    link: to the engine of `epoch`; receives `FromEngine`. request_ids: source of the engine's
    request ids. crashes_until_isolated: as in the settings of the scheduler. live_view: gets the
    views of the current engine. supervisor: is notified of an engine that sends garbage.

    adapters: of the current engine by name, in the order of loading; while it is restarted, those
    of the last one.
    """

    def __init__(
        self,
        link: Link,
        epoch: int,
        request_ids: Iterator[int],
        metrics: Metrics,
        crashes_until_isolated: int,
        live_view: LiveViewPublisher,
        supervisor: SupervisorLink,
    ) -> None:
        self._crashes_until_isolated = crashes_until_isolated
        self._request_ids = request_ids
        self._metrics = metrics
        self._live_view = live_view
        self._supervisor = supervisor
        self._open: dict[int, OpenRequest] = {}
        self._admin_calls: dict[int, tuple[AdminCall, asyncio.Future[AdminReply]]] = {}
        self._num_admin_calls = 0
        self._adapter_calls: dict[int, tuple[AdapterCall, asyncio.Future[AdapterReply]]] = {}
        self.adapters = AdapterTable()
        self._engine: EngineReady | None = None
        self._closed = False
        self._receives_views = False
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, EngineConnection] = {}
        self._unmovable_epochs: set[int] = set()
        self._current = self.connect(link, epoch)

    @property
    def epoch(self) -> int:
        return self._current.epoch

    def update_view_subscription(self) -> None:
        """Have the current engine send views exactly while the live view has subscribers."""
        wanted = self._live_view.has_subscribers
        if self._current.ready and not self._closed and wanted != self._receives_views:
            self._receives_views = wanted
            self._current.send(Watch(self.epoch, wanted))

    @property
    def engine(self) -> EngineReady:
        """The properties of the engine; while it is restarted, those of the last one.

        Raises NotAvailableError before the first engine is ready and after `close`.
        """
        if self._closed:
            raise NotAvailableError("the server is shutting down")
        if self._engine is None:
            raise NotAvailableError("the server is starting")
        return self._engine

    @property
    def connected(self) -> bool:
        return self._current.ready

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def wait_ready(self) -> EngineReady:
        """Return when the engine accepts requests; raises ProtocolError for another version."""
        while not self._current.ready:
            await self._current.wait_ready_or_closed()  # closed: the next engine replaces it
            if self._closed:
                break
        return self.engine

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def submit(self, request: EngineCoreRequest, stream: OutputStream) -> None:
        """Send a request to the engine of its epoch, or keep it until an engine is ready.

        `stream` gets all outputs. If the engine of its epoch is gone, the current one gets the
        request. Raises OverloadedError when the engine does not keep up, and InternalRequestError
        if token ids have another meaning for the current engine.
        """
        _ = self.engine
        if request.epoch in self._unmovable_epochs:
            raise InternalRequestError("the engine of this request died")
        open_request = OpenRequest(request, stream)
        connection = self._connections.get(request.epoch, self._current)
        if connection.ready:
            _send_unless_stalled(connection, open_request.message(connection.epoch))
            open_request.sent_to = connection.epoch
        elif len(self._open) >= MAX_WAITING:
            self._metrics.count_rejection("restart")
            raise OverloadedError("the engine is being restarted and too many requests wait")
        self._open[request.request_id] = open_request

    def send_input(self, message: SessionInput) -> None:
        """Send the next part of the input of an accepted session, unless the session has ended.

        Raises OverloadedError when the engine does not keep up.
        """
        session = self._open.get(message.request_id)
        connection = None if session is None else self._connections.get(session.sent_to)
        if connection is not None:
            _send_unless_stalled(connection, changed(message, epoch=connection.epoch))

    def abort_request(self, stream: OutputStream) -> None:
        """Remove a request and send an Abort to its engine; does nothing if it is not open."""
        open_request = self._open.pop(stream.request_id, None)
        if open_request is not None:
            self._send_abort(open_request, "disconnect", None)

    async def call_admin(self, name: AdminName, **parameters: Any) -> AdminReply:
        """Send an `AdminCall` with these parameters to the engine, and return its reply."""
        _ = self.engine
        self._num_admin_calls += 1
        reply: asyncio.Future[AdminReply] = self._loop.create_future()
        call = AdminCall(self.epoch, self._num_admin_calls, name, **parameters)
        self._admin_calls[self._num_admin_calls] = call, reply
        if self._current.ready:
            self._current.send(call)
        return await reply

    async def call_adapters(self, call: AdapterCall) -> AdapterReply:
        """Send a call about adapters to the engine, and return its reply.

        An engine that replaces a dead one gets it again. Sets epoch and call_id.
        """
        _ = self.engine
        self._num_admin_calls += 1
        call = changed(call, epoch=self.epoch, call_id=self._num_admin_calls)
        reply: asyncio.Future[AdapterReply] = self._loop.create_future()
        self._adapter_calls[call.call_id] = call, reply
        if self._current.ready:
            self._current.send(call)
        return await reply

    def reconnect(self, link: Link, epoch: int, *, died: bool = True) -> None:
        """Replace the current engine, which is gone; the new one gets all open requests.

        died: the old engine crashed, so its requests may be the reason.
        """
        if self._closed:
            link.close()
            return
        old, self._current = self._current, self.connect(link, epoch)
        self._lose_engine(old.epoch, died)
        self._check_deadlines(epoch)

    def switch(self, epoch: int) -> None:
        """Make the engine of this epoch the current one; open requests stay with the old one."""
        if self._receives_views and self._current.ready:
            self._current.send(Watch(self.epoch, False))
        self._current = self._connections[epoch]
        if self.connected:
            self._on_engine_ready()
        else:
            self.report_garbage(epoch)

    def drop(self, epoch: int, *, movable: bool = True) -> None:
        """Disconnect an engine other than the current one, which gets its open requests.

        movable: token ids mean the same to the current engine; otherwise the requests fail.
        """
        assert epoch != self.epoch, "the current engine is replaced, not dropped"
        if epoch not in self._connections or self._closed:
            return
        requests = [request for request in self._open.values() if request.sent_to == epoch]
        self._lose_engine(epoch, died=True)
        if not movable:
            self._unmovable_epochs.add(epoch)
            for request in requests:
                error = InternalRequestError("the engine of this request died")
                self._fail_request(request.stream, error)
        self._send_waiting_requests()

    def close(self) -> None:
        """Fail all open requests and close all connections."""
        if self._closed:
            return
        error = NotAvailableError("the server is shutting down")
        self._closed = True
        for request in list(self._open.values()):
            request.stream.fail(error)
        self._live_view.close()
        for _, reply in self._admin_calls.values():
            if not reply.done():
                reply.set_exception(error)
        for _, adapter_reply in self._adapter_calls.values():
            if not adapter_reply.done():
                adapter_reply.set_exception(error)
        self._open.clear()
        for connection in self._connections.values():
            connection.close()

    def handle_message(self, epoch: int, message: FromEngine) -> None:
        """Process a message of the engine of an epoch."""
        if self._closed:
            return
        if isinstance(message, EngineCoreOutputs):
            self._process_outputs(message)
        elif isinstance(message, EngineReady):
            if epoch == self.epoch:
                self._on_engine_ready()
        elif isinstance(message, EngineView):
            if epoch == self.epoch:
                self._live_view.publish_view(message)
                self.update_view_subscription()  # a subscriber that does not read was dropped
        elif isinstance(message, AdapterList):
            connection = self._connections[epoch]
            if connection.adapters is None:
                connection.adapters = AdapterTable()
            connection.adapters.update(message)
            if epoch == self.epoch:
                self.adapters = connection.adapters
        elif isinstance(message, AdapterUsage):
            if epoch == self.epoch:
                self._metrics.adapter_usage = message
        elif isinstance(message, AdapterReply):
            _, adapter_reply = self._adapter_calls.pop(message.call_id, (None, None))
            if adapter_reply is not None and not adapter_reply.done():
                adapter_reply.set_result(message)
        else:
            _, reply = self._admin_calls.pop(message.call_id, (None, None))
            if reply is not None and not reply.done():
                reply.set_result(message)

    def report_garbage(self, epoch: int) -> None:
        """Report an engine that sent an undecodable message to the supervisor, which kills it.

        Its requests wait for the next engine. For an engine that is not the current one yet, the
        report waits until `switch`.
        """
        if epoch <= self.epoch:
            reason = "it sent an undecodable message"
            self._supervisor.send(ProtocolViolation("engine_core", 0, epoch, reason))

    def connect(self, link: Link, epoch: int) -> EngineConnection:
        """Connect to an engine, the current one after `switch`, and return the connection."""
        connection = EngineConnection(self, link, epoch)
        self._connections[epoch] = connection
        self._metrics.add_engine(epoch)
        return connection

    def _on_engine_ready(self) -> None:
        """Note the current engine's properties, and send it everything that waited for it."""
        engine = self._engine = self._current.engine
        assert engine is not None, "it is ready"
        self._metrics.set_engine_info(engine)
        if self._current.adapters is not None:
            self.adapters = self._current.adapters
        for call, _ in self._admin_calls.values():
            self._current.send(changed(call, epoch=self.epoch))
        for adapter_call, _ in self._adapter_calls.values():
            self._current.send(changed(adapter_call, epoch=self.epoch, resent=True))
        self._live_view.on_engine_ready(engine)
        self._receives_views = False  # until this engine is asked
        self.update_view_subscription()
        self._send_waiting_requests()

    def _send_waiting_requests(self) -> None:
        """Send the requests that no engine has to the current one, as fast as it accepts them.

        Suspects go first, so that no other request runs when the engine computes them.
        """
        if self._closed or not self._current.ready:
            return
        waiting = [request for request in self._open.values() if request.sent_to == NO_ENGINE]
        for request in sorted(waiting, key=lambda request: -request.crash_count):
            if self._current.stalled:
                self._loop.call_later(FLUSH_SECONDS, self._send_waiting_requests)
                return
            request.sent_to = self.epoch
            self._current.send(request.message(self.epoch))

    def _check_deadlines(self, epoch: int) -> None:
        """End requests whose deadline has passed, until the engine of an epoch is connected."""
        if self._closed or self._current.ready or epoch != self.epoch:
            return
        now = time.monotonic()
        for request in list(self._open.values()):
            if request.sent_to in self._connections:
                continue  # the engine that has it checks its deadlines
            try:
                request.check_deadlines(now)
            except RequestError as error:
                self._fail_request(request.stream, error)
        self._loop.call_later(DEADLINE_CHECK_SECONDS, self._check_deadlines, epoch)

    def _lose_engine(self, epoch: int, died: bool) -> None:
        """Close the connection of an engine that is gone; its open requests wait for another."""
        connection = self._connections[epoch]
        connection.exchange_messages()  # outputs that it sent before its death count
        connection.close()
        del self._connections[epoch]
        self._metrics.remove_engine(epoch)
        lost = [
            request for request in self._open.values() if request.sent_to not in self._connections
        ]
        any_started = any(request.started for request in lost)
        for request in lost:
            request.lose_engine(
                self._crashes_until_isolated if died else None, others_started=any_started
            )
            if request.request.resumable:
                del self._open[request.request.request_id]
                request.stream.fail(InternalRequestError("the session ended with its engine"))

    def _process_outputs(self, message: EngineCoreOutputs) -> None:
        if message.stats is not None:
            self._metrics.record_scheduler_stats(message.stats, message.epoch, message.timestamp)
        for request_id in message.accepted:
            request = self._open.get(request_id)
            if request is not None:
                request.accept()
        for request_id in message.alone:
            request = self._open.get(request_id)
            if request is not None:
                request.alone = True
        for progress in message.progress:
            request = self._open.get(progress.request_id)
            if request is not None:
                request.record_progress(progress)
        for output in message.outputs:
            request = self._open.get(output.request_id)
            if request is not None:
                self._process_output(request, output, message.timestamp)

    def _process_output(
        self, request: OpenRequest, output: EngineCoreOutput, timestamp: float
    ) -> None:
        """Pass an output to its stream; an exception ends only the request of the output."""
        stream = request.stream
        try:
            engine_goes_on = stream.process_output(output, timestamp)
        except RequestError as error:
            self._fail_request(stream, error)
            return
        except Exception:
            logger.exception("request %d failed", stream.request_id)
            self._fail_request(stream, InternalRequestError("internal error"))
            return
        if stream.error is not None and stream.num_choices > 1:
            self._send_abort(request, "disconnect", None)  # the choices that still run
        elif engine_goes_on:
            self._send_abort(request, "stop_string", output.choice)
        if stream.finished:
            self._open.pop(stream.request_id, None)
            if request.request.agent is not None and stream.ended_well:
                # after the response has written the last chunk
                self._loop.call_soon(self._send_turn_ended, request)

    def _send_turn_ended(self, request: OpenRequest) -> None:
        """Report the tool call of a finished turn to the engine that computed it, if it runs."""
        connection = self._connections.get(request.sent_to)
        agent = request.request.agent
        if agent is None or connection is None or self._closed:
            return
        tool = request.stream.called_tool()
        request_id = request.request.request_id
        connection.send(TurnEnded(connection.epoch, request_id, agent.session, tool))

    def _fail_request(self, stream: OutputStream, error: RequestError) -> None:
        stream.fail(error)
        self.abort_request(stream)

    def _send_abort(
        self, request: OpenRequest, reason: Literal["disconnect", "stop_string"], choice: int | None
    ) -> None:
        connection = self._connections.get(request.sent_to)
        if self._closed or connection is None:
            return  # no engine has the request
        connection.send(Abort(connection.epoch, request.request.request_id, reason, choice))


def _send_unless_stalled(
    connection: EngineConnection, message: EngineCoreRequest | SessionInput
) -> None:
    if connection.stalled:
        raise OverloadedError("the engine does not keep up")
    connection.send(message)
