"""The client of the engines: send requests, route outputs to streams, survive an engine's death.

`EngineConnection` is the connection to the engine of one epoch, `EngineClient` sends each request
over one of them, which `Router` chooses. Start reading at `EngineClient.submit` and
`EngineClient.handle_message`. Runs on the event loop only and knows nothing of HTTP.

    engine 0 ─ dies ─▶ its open requests go to engines 1 … N - 1 at once; if none of them
                       is ready they wait, aborts remove them ─▶ the next engine 0 gets them

    the workers of engine 0 die: the same, and until they are ready it gets no requests

    a reload    engine of epoch 2 ── its open requests ────────▶ the last one finishes, or the
                engine of epoch 3 ── all new requests ─────────▶ engine dies and 3 gets the rest

A reload may bring another model, so each engine and each request has the number of a model, and a
request is only sent to engines of its number.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar

from api_server.engine.async_link import SupervisorLink
from api_server.engine.open_request import NO_ENGINE, OpenRequest, OutputStream
from api_server.engine.router import EngineLoad, RoutedRequest, Router
from api_server.errors import NotAvailableError
from api_server.live_view import LiveViewPublisher
from api_server.metrics.metrics import Metrics
from proto import PROTOCOL_VERSION
from proto.codec import Message, changed
from proto.errors import (
    InternalRequestError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    RequestError,
)
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
LOAD_SECONDS: Final = 0.02
"""Least time between two looks at the statistics that other front ends have received."""
CRASHES_TO_RUN_ALONE: Final = 2
"""Engines that may have died of a request, after which it runs where no other request does."""
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
    index: of the engine. model: number of its model. is_current: the one of this index, not one
    before or after a reload.
    engine: its properties; None before it is ready. adapters: by name; None before it sent them.
    is_watched: it sends views.
    """

    def __init__(
        self, client: "EngineClient", link: Link, epoch: int, index: int, model: int
    ) -> None:
        self._client = client
        self._link = link
        self.epoch = epoch
        self.index = index
        self.model = model
        self.is_current = self.is_watched = False
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
        self._client.handle_message(self, message)


Call = TypeVar("Call", bound=AdminCall | AdapterCall)
Reply = TypeVar("Reply", bound=AdminReply | AdapterReply)


class CallToEngines(Generic[Call, Reply]):
    """A call to several engines, and their replies.

    replies: by engine. missing: engines that have not replied; one that dies gets the call again.
    """

    def __init__(self, call: Call, engines: Collection[int]) -> None:
        self.call = call
        self.missing = set(engines)
        self.replies: dict[int, Reply] = {}
        self.done: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()

    def note_reply(self, engine: int, reply: Reply) -> None:
        """Note the reply of an engine; the last one completes the call."""
        if engine in self.missing and not self.done.done():
            self.replies[engine] = reply
            self._wait_no_longer(engine)

    def skip(self, engine: int) -> None:
        """Wait for this engine no longer, unless only engines that rest were asked."""
        if engine in self.missing and (self.replies or len(self.missing) > 1):
            self._wait_no_longer(engine)

    def _wait_no_longer(self, engine: int) -> None:
        """Complete the call if no other engine is missing."""
        self.missing.discard(engine)
        if not self.missing and not self.done.done():
            self.done.set_result([self.replies[index] for index in sorted(self.replies)])

    def fail(self, error: RequestError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class EngineClient:
    """Sends requests to the engines and routes the outputs of all engines to their streams.

    connections: a link to each engine, by index, with its epoch; it receives `FromEngine`.
    request_ids: source of the engines' request ids. crashes_until_isolated: as in the settings of
    the scheduler. live_view: gets the views of engines. supervisor: is notified of an engine that
    sends garbage.

    adapters: by name, in the order of loading; while no engine is ready, those of the last one.
    """

    def __init__(
        self,
        connections: Sequence[tuple[Link, int]],
        request_ids: Iterator[int],
        metrics: Metrics,
        crashes_until_isolated: int,
        live_view: LiveViewPublisher,
        supervisor: SupervisorLink,
    ) -> None:
        self._routes = len(connections) > 1  # with one engine nothing is kept for a choice
        self._crashes_until_isolated = (
            min(crashes_until_isolated, CRASHES_TO_RUN_ALONE)
            if self._routes
            else crashes_until_isolated
        )
        self._crashes_of_engine = crashes_until_isolated
        self._request_ids = request_ids
        self._metrics = metrics
        self._live_view = live_view
        self._supervisor = supervisor
        self._open: dict[int, OpenRequest] = {}
        self._admin_calls: dict[int, CallToEngines[AdminCall, AdminReply]] = {}
        self._adapter_calls: dict[int, CallToEngines[AdapterCall, AdapterReply]] = {}
        self._num_calls = 0
        self.adapters = AdapterTable()
        self._properties: dict[int, EngineReady] = {}
        self._engine: EngineReady | None = None
        self._closed = self._checks_deadlines = False
        self._loop = asyncio.get_running_loop()
        self._router = Router(len(connections), time.monotonic)
        self._connections: dict[int, EngineConnection] = {}
        self._model = 0
        self._models: dict[int, int] = {}  # epoch of an engine, also of a dead one → its model
        self._reported_missing: set[int] = set()
        self._restarted: set[int] = set()
        self._resting: set[int] = set()
        self._suspects: set[int] = set()  # open requests that run alone, of one engine
        self._suspects_wait = False
        self._loads_read_at = 0.0
        self._current = [
            self.connect(link, epoch, index) for index, (link, epoch) in enumerate(connections)
        ]
        for connection in self._current:
            connection.is_current = True

    @property
    def epochs(self) -> list[int]:
        """Epoch of each current engine, by index."""
        return [each.epoch for each in self._current]

    @property
    def num_engines(self) -> int:
        return len(self._current)

    def update_view_subscription(self) -> None:
        """Have exactly those engines send views whose views have subscribers."""
        for connection in self._current:
            wanted = self._live_view.has_subscribers(connection.index)
            if connection.ready and not self._closed and wanted != connection.is_watched:
                connection.is_watched = wanted
                connection.send(Watch(connection.epoch, wanted))

    @property
    def engine(self) -> EngineReady:
        """The properties that all engines have; while one is restarted, of the last one.

        Limits of a request are the lowest of any engine, limits of queues the sum of all.
        Raises NotAvailableError before the first engine is ready and after `close`.
        """
        if self._closed:
            raise NotAvailableError("the server is shutting down")
        if self._engine is None:
            raise NotAvailableError("the server is starting")
        return self._engine

    def properties_of(self, engine: int) -> EngineReady:
        """Return the properties of an engine, those of another one if it was never ready."""
        return self._properties.get(engine, self.engine)

    @property
    def connected(self) -> bool:
        """Whether an engine takes requests."""
        return any(connection.ready for connection in self._current)

    @property
    def missing_engines(self) -> list[int]:
        """Engines that take no requests now: they, or their workers, are restarted or hang."""
        return [each.index for each in self._current if not self._takes_requests(each)]

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def wait_ready(self) -> EngineReady:
        """Return when an engine accepts requests; raises ProtocolError for another version."""
        while not self.connected and not self._closed:
            waits = [asyncio.create_task(each.wait_ready_or_closed()) for each in self._current]
            done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in others:
                task.cancel()
            for task in done:
                task.result()  # closed: the next engine replaces it
        return self.engine

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def submit(
        self, request: EngineCoreRequest, stream: OutputStream, engine: int | None = None
    ) -> None:
        """Send a request to an engine, or keep it until one is ready.

        `stream` gets all outputs. engine: the one that the client wants, by index; None for any.
        After a reload, a request with an earlier epoch goes to the old engine if that is the only
        one and still runs, and otherwise to any engine of the same model.
        Raises OverloadedError when no engine keeps up, NotAvailableError when the wanted one is
        missing, InvalidRequestError when there is none of that index, and InternalRequestError if
        no engine has the model of the request any more.
        """
        _ = self.engine
        model = self._models.get(request.epoch, self._model)
        if model != self._model and not self._has_engine(model):
            raise InternalRequestError("the engine of this request died")
        open_request = OpenRequest(request, stream, model=model)
        wanted = None if engine is None else self._wanted(engine)
        connection = self._connections.get(request.epoch)
        if self._routes or connection is None or connection.is_current:
            uses_wanted = wanted is not None and model == self._model
            connection = wanted if uses_wanted else self._route(open_request)
        if connection is not None and connection.ready:
            if connection.stalled:
                raise OverloadedError("the engine does not keep up")
            self._send_request(open_request, connection)
        elif len(self._open) >= MAX_WAITING:
            self._metrics.count_rejection("restart")
            raise OverloadedError("the engine is being restarted and too many requests wait")
        self._open[request.request_id] = open_request
        if open_request.sent_to == NO_ENGINE:
            self._check_deadlines()

    def send_input(self, message: SessionInput) -> None:
        """Send the next part of the input of an accepted session, unless the session has ended.

        Raises OverloadedError when the engine does not keep up.
        """
        session = self._open.get(message.request_id)
        connection = None if session is None else self._connections.get(session.sent_to)
        if connection is not None:
            if connection.stalled:
                raise OverloadedError("the engine does not keep up")
            connection.send(changed(message, epoch=connection.epoch))

    def abort_request(self, stream: OutputStream) -> None:
        """Remove a request and send an Abort to its engine; does nothing if it is not open."""
        if stream.request_id in self._open:
            open_request = self._remove_request(stream.request_id)
            self._send_abort(open_request, "disconnect", None)

    async def call_admin(self, name: AdminName, **parameters: Any) -> AdminReply:
        """Send an `AdminCall` with these parameters to all engines, and join their replies."""
        if name == "reset_prefix_cache":
            for connection in self._current:
                self._router.forget_prefixes(connection.index)
        replies = await self._ask_all(self._admin_calls, AdminCall(0, 0, name, **parameters))
        return _joined(name, replies)

    async def wait_for_lists(self) -> None:
        """Return when lists of adapters that engines have sent before have arrived."""
        ready = [connection.index for connection in self._current if connection.ready]
        await self._ask_all(self._admin_calls, AdminCall(0, 0, "get_pause"), ready)

    async def call_adapters(self, call: AdapterCall) -> AdapterReply:
        """Send a call about adapters to all engines; return a refusal, or the first reply.

        An engine that replaces a dead one gets it again. Sets epoch and call_id.
        """
        replies = await self._ask_all(self._adapter_calls, call)
        return next((reply for reply in replies if reply.status != 200), replies[0])

    def reconnect(self, link: Link, epoch: int, engine: int = 0, *, died: bool = True) -> int:
        """Connect to the engine that replaces one which is gone; return how many requests it had.

        Open requests of that go to other engines at once, or to the new one when it is ready.
        died: the old engine crashed, so its requests may be the reason.
        """
        if self._closed:
            link.close()
            return 0
        old = self._replace(self.connect(link, epoch, engine))
        self._router.note_down(engine)
        number = self._lose_engine(old.epoch, died)
        self._send_waiting_requests()
        self._check_deadlines()
        return number

    def note_missing(
        self,
        missing: Collection[int],
        restarted: Collection[int],
        resting: Collection[int] = (),
    ) -> None:
        """Note which engines take no requests now, as the supervisor knows.

        missing: they, or their workers, have ended or hang. restarted: those of them that have
        ended; they lose their open requests. resting: those of these that no call waits for.
        """
        self._resting = set(resting)
        for engine in resting:
            for call in self._admin_calls.values():
                call.skip(engine)
            for adapter_call in self._adapter_calls.values():
                adapter_call.skip(engine)
        came_back = self._reported_missing.difference(missing)
        died = set(restarted) - self._restarted
        self._reported_missing, self._restarted = set(missing), set(restarted)
        for engine in died:
            self._leave_engine(self._current[engine])
        if came_back:
            self._send_waiting_requests()

    def note_restarted_workers(self, engine: int) -> None:
        """Note that the workers of an engine have died, before the supervisor's report says so."""
        self._reported_missing.add(engine)
        self._restarted.add(engine)
        self._leave_engine(self._current[engine])

    def _leave_engine(self, connection: EngineConnection) -> None:
        """Take the open requests from one of several engines that computes nothing now.

        They go to other engines, or wait for the first one that is ready, so that every death is
        counted here. Sessions with input in parts stay, because their engine may compute them
        again.
        """
        if self._closed or not self._routes or not connection.ready:
            return
        connection.exchange_messages()
        index, properties = connection.index, self._properties[connection.index]
        self._router.note_up(index, properties.block_size, properties.num_blocks)
        moved = [
            request
            for request in self._open.values()
            if request.sent_to == connection.epoch and not request.request.resumable
        ]
        for request in moved:
            self._send_abort(request, "disconnect", None)
        self._move_requests(moved, died=True)
        self._send_waiting_requests()
        self._check_deadlines()

    def switch(self, epochs: Sequence[int], *, is_same_model: bool) -> list[int]:
        """Make the engines of these epochs current; open requests stay with the old ones.

        is_same_model: the new engines may continue requests of the old ones; if not, they must be
        all engines. Returns the epochs of the old ones.
        """
        if not is_same_model:
            self._model += 1
            self._properties.clear()
        left = []
        for epoch in epochs:
            new = self._connections[epoch]
            new.model = self._models[epoch] = self._model
            old = self._replace(new)
            left.append(old.epoch)
            self._router.note_down(new.index)
            if old.is_watched and old.ready:
                old.send(Watch(old.epoch, False))
        for epoch in epochs:
            new = self._connections[epoch]
            if new.ready:
                self._on_engine_ready(new)
            elif new.engine is not None:
                self.report_garbage(epoch)
        return left

    def is_needed(self, epoch: int, *, more_come: bool) -> bool:
        """Whether an old engine has an open request, or may get one.

        more_come: requests of its time may not have been submitted yet. The only engine gets them,
        and of several the last one of its model, if that is an old one.
        """
        old = self._connections[epoch]
        if any(request.sent_to == epoch for request in self._open.values()):
            return True
        is_last = old.model != self._model and self._old_engines(old.model) == [old]
        return more_come and (is_last or not self._routes)

    def drop(self, epoch: int) -> None:
        """Disconnect an engine that is not current; others of its model get its open requests.

        Without any they fail.
        """
        assert epoch not in self.epochs, "a current engine is replaced, not dropped"
        if epoch not in self._connections or self._closed:
            return
        self._lose_engine(epoch, died=True)
        for request in list(self._open.values()):
            if not self._has_engine(request.model):
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
        for admin_call in self._admin_calls.values():
            admin_call.fail(error)
        for adapter_call in self._adapter_calls.values():
            adapter_call.fail(error)
        self._open.clear()
        for connection in self._connections.values():
            connection.close()

    def handle_message(self, connection: EngineConnection, message: FromEngine) -> None:
        """Process a message of an engine."""
        if self._closed:
            return
        if isinstance(message, EngineCoreOutputs):
            self._process_outputs(connection, message)
        elif isinstance(message, EngineReady):
            if connection.is_current:
                self._on_engine_ready(connection)
        elif isinstance(message, EngineView):
            if connection.is_current:
                self._live_view.publish_view(connection.index, message)
                self.update_view_subscription()  # a subscriber that does not read was dropped
        elif isinstance(message, AdapterList):
            if connection.adapters is None:
                connection.adapters = AdapterTable()
            connection.adapters.update(message)
            self._choose_adapters()
        elif isinstance(message, AdapterUsage):
            if connection.is_current:
                self._metrics.note_adapter_usage(connection.index, message)
        elif isinstance(message, AdapterReply):
            _note_reply(self._adapter_calls, connection.index, message)
        else:
            _note_reply(self._admin_calls, connection.index, message)

    def report_garbage(self, epoch: int) -> None:
        """Report an engine that sent an undecodable message to the supervisor, which kills it.

        Its requests wait for the next engine. For an engine that is not a current one yet, the
        report waits until `switch`.
        """
        connection = self._connections[epoch]
        if epoch <= self._current[connection.index].epoch:
            reason = "it sent an undecodable message"
            self._supervisor.send(ProtocolViolation("engine_core", connection.index, epoch, reason))

    def connect(self, link: Link, epoch: int, engine: int = 0) -> EngineConnection:
        """Connect to an engine, a current one after `switch`, and return the connection."""
        connection = EngineConnection(self, link, epoch, engine, self._model)
        self._connections[epoch] = connection
        self._models[epoch] = self._model
        self._metrics.add_engine(epoch, engine)
        return connection

    # Which engine

    def _old_engines(self, model: int) -> list[EngineConnection]:
        """Return the ready engines of a model that a reload has replaced."""
        connections = self._connections.values()
        return [each for each in connections if each.ready and each.model == model]

    def _has_engine(self, model: int) -> bool:
        """Whether there is an engine of a model, ready or not."""
        return any(each.model == model for each in self._connections.values())

    def _replace(self, connection: EngineConnection) -> EngineConnection:
        """Make a connection the current one of its engine, and return the one before."""
        old = self._current[connection.index]
        self._current[connection.index] = connection
        old.is_current, connection.is_current = False, True
        return old

    def _takes_requests(self, connection: EngineConnection) -> bool:
        return connection.ready and connection.index not in self._reported_missing

    def _wanted(self, engine: int) -> EngineConnection:
        """Return the connection to the engine that a client wants; see `submit` for errors."""
        if engine >= self.num_engines:
            raise InvalidRequestError(
                f"data_parallel_rank {engine} does not exist: there are engines 0 to "
                f"{self.num_engines - 1}",
                "data_parallel_rank",
            )
        connection = self._current[engine]
        if not self._takes_requests(connection) and self.num_engines > 1:
            raise NotAvailableError(f"engine {engine} is being restarted")
        return connection

    def _route(self, request: OpenRequest) -> EngineConnection | None:
        """Return the connection to the engine that should get a request; None if none is ready.

        With one engine, its connection, ready or not.

        An engine that runs suspects of crashes gets no other requests, as long as others are ready.
        """
        if request.model != self._model:
            old = self._old_engines(request.model)
            return old[request.request.request_id % len(old)] if old else None
        if not self._routes:
            return self._current[0]
        alive = [each for each in self._current if each.ready and each.index not in self._restarted]
        ready = list(filter(self._takes_requests, alive)) or alive
        ready = [each for each in ready if not each.stalled] or ready
        if self._suspects:
            isolated = self._isolated_engine()
            ready = [each for each in ready if each.index != isolated] or ready
        if len(ready) < 2:
            return ready[0] if ready else None
        self._read_loads()
        routed = self._described(request)
        return self._current[self._router.choose(routed, [each.index for each in ready])]

    def _described(self, request: OpenRequest) -> RoutedRequest:
        if request.routed is None:
            request.routed = self._router.describe(request.request)
        return request.routed

    def _isolated_engine(self) -> int | None:
        """Return the engine that runs suspects of crashes, if one does."""
        for request_id in self._suspects:
            connection = self._connections.get(self._open[request_id].sent_to)
            if connection is not None:
                return connection.index
        return None

    def _route_suspect(self) -> EngineConnection | None:
        """Return the connection to an engine where suspects disturb no other request.

        None if there is none now; one comes when the engine is back that died of them.
        """
        isolated = self._isolated_engine()
        ready = list(filter(self._takes_requests, self._current))
        if isolated is not None:
            return next((each for each in ready if each.index == isolated), None)
        used = {request.sent_to for request in self._open.values()}
        idle = [each for each in ready if each.epoch not in used]
        others_wait = any(
            request.sent_to == NO_ENGINE and not self._is_suspect(request)
            for request in self._open.values()
        )
        return idle[0] if idle and (len(ready) > 1 or not others_wait) else None

    def _is_suspect(self, request: OpenRequest) -> bool:
        return self._routes and request.crash_count >= self._crashes_until_isolated

    def _read_loads(self) -> None:
        """Give the router the statistics that any front end has received."""
        now = time.monotonic()
        if now < self._loads_read_at + LOAD_SECONDS:
            return
        self._loads_read_at = now
        for values in self._metrics.latest_engine_gauges():
            if values.epoch == self._current[values.engine].epoch:
                load = EngineLoad(
                    int(values.gauges["num_running"]),
                    int(values.gauges["num_waiting"]),
                    int(values.gauges["num_queued_tokens"]),
                    values.gauges["kv_cache_usage"],
                    values.timestamp,
                )
                self._router.note_load(values.engine, load)

    # Engines come and go

    def _on_engine_ready(self, connection: EngineConnection) -> None:
        """Note a current engine's properties, and send it everything that waited for it."""
        self._note_ready(connection)
        self._choose_adapters()
        index, epoch = connection.index, connection.epoch
        for call in self._admin_calls.values():
            if index in call.missing:
                connection.send(changed(call.call, epoch=epoch))
        for adapter_call in self._adapter_calls.values():
            if index in adapter_call.missing:
                connection.send(changed(adapter_call.call, epoch=epoch, resent=True))
        connection.is_watched = False  # until this engine is asked
        self.update_view_subscription()
        self._send_waiting_requests()

    def _note_ready(self, connection: EngineConnection) -> None:
        engine = connection.engine
        assert engine is not None, "it is ready"
        index = connection.index
        self._properties[index] = engine
        self._engine = _common_properties([*self._properties.values()])
        self._router.note_up(index, engine.block_size, engine.num_blocks)
        self._metrics.set_engine_info(index, engine)
        self._live_view.on_engine_ready(index, engine)

    def _choose_adapters(self) -> None:
        """Serve the adapters of the first engine that has sent its list."""
        for connection in self._current:
            if connection.adapters is not None:
                self.adapters = connection.adapters
                return

    def _send_request(self, request: OpenRequest, connection: EngineConnection) -> None:
        request.sent_to = connection.epoch
        message = request.message(connection.epoch)
        if request.crash_count and self._is_suspect(request):
            # the engine isolates it from the other suspects, too
            crash_count = max(request.crash_count, self._crashes_of_engine)
            message = changed(message, crash_count=crash_count)
            if connection.is_current:
                self._suspects.add(request.request.request_id)
        connection.send(message)
        if self._routes and connection.is_current:
            request.awaits_token = True
            request.stream.note_engine(connection.index)
            self._router.note_sent(self._described(request), connection.index)

    def _send_waiting_requests(self) -> None:
        """Send the requests that no engine has to ready ones, as fast as these accept them.

        Suspects go first, so that no other request runs when an engine computes them.
        """
        if self._closed or not self.connected:
            return
        self._suspects_wait = False
        waiting = [request for request in self._open.values() if request.sent_to == NO_ENGINE]
        for request in sorted(waiting, key=lambda request: -request.crash_count):
            is_suspect = self._is_suspect(request) and request.model == self._model
            connection = self._route_suspect() if is_suspect else self._route(request)
            if connection is None:
                self._suspects_wait = self._suspects_wait or is_suspect
                continue
            if connection.stalled:
                self._loop.call_later(FLUSH_SECONDS, self._send_waiting_requests)
                return
            self._send_request(request, connection)

    def _check_deadlines(self) -> None:
        """End requests whose deadline has passed, as long as some wait for an engine."""
        if not self._checks_deadlines:
            self._checks_deadlines = True
            self._loop.call_soon(self._continue_deadline_checks)

    def _continue_deadline_checks(self) -> None:
        waiting = [
            request for request in self._open.values() if request.sent_to not in self._connections
        ]
        if self._closed or (self.connected and not waiting):
            self._checks_deadlines = False
            return
        now = time.monotonic()
        for request in waiting:  # of others the engine checks the deadlines
            try:
                request.check_deadlines(now)
            except RequestError as error:
                self._fail_request(request.stream, error)
        self._loop.call_later(DEADLINE_CHECK_SECONDS, self._continue_deadline_checks)

    def _lose_engine(self, epoch: int, died: bool) -> int:
        """Close the connection of an engine that is gone; its open requests wait for another.

        Returns their number.
        """
        connection = self._connections[epoch]
        connection.exchange_messages()  # outputs that it sent before its death count
        connection.close()
        del self._connections[epoch]
        self._metrics.remove_engine(epoch)
        lost = [
            request for request in self._open.values() if request.sent_to not in self._connections
        ]
        for request in lost:
            if request.request.resumable:
                self._remove_request(request.request.request_id)
                request.stream.fail(InternalRequestError("the session ended with its engine"))
        moved = [each for each in lost if not each.request.resumable]
        self._move_requests(moved, died=died)
        return len(moved)

    def _move_requests(self, requests: Sequence[OpenRequest], *, died: bool) -> None:
        """Take requests from their engine. died: it, or its workers, maybe because of them.

        Of several engines, at most CRASHES_TO_RUN_ALONE die with other requests because of one; if
        it crashes one more, where it runs alone, it is ended.
        """
        any_started = any(request.started for request in requests)
        limit = self._crashes_until_isolated if died else None
        for request in requests:
            self._suspects.discard(request.request.request_id)
            self._router.note_finished(request.request.request_id)
            if request.lose_engine(limit, others_started=any_started) and self._routes:
                text = (
                    f"the server crashed {request.crash_count} times while it computed this "
                    "request, at last with no other request running; it is not tried again"
                )
                self._fail_request(request.stream, InternalRequestError(text))

    # Outputs

    def _process_outputs(self, connection: EngineConnection, message: EngineCoreOutputs) -> None:
        if message.stats is not None:
            self._metrics.record_scheduler_stats(
                message.stats, connection.epoch, message.timestamp, connection.index
            )
            if connection.is_current and message.stats.kv_tiers:
                self._router.note_tiers(connection.index, message.stats.kv_tiers)
        get, epoch = self._open.get, connection.epoch
        for request_id in message.accepted:
            request = get(request_id)
            if request is not None and request.sent_to == epoch:
                request.accept()
        for request_id in message.alone:
            request = self._request_of(connection, request_id)
            if request is not None:
                request.alone = True
        for progress in message.progress:
            request = self._request_of(connection, progress.request_id)
            if request is not None:
                request.record_progress(progress)
        for output in message.outputs:
            request = get(output.request_id)
            if request is not None and request.sent_to == epoch:
                self._process_output(request, output, message.timestamp)

    def _request_of(self, connection: EngineConnection, request_id: int) -> OpenRequest | None:
        """Return the open request of an engine's message; None if another engine has it."""
        request = self._open.get(request_id)
        return request if request is not None and request.sent_to == connection.epoch else None

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
        if request.awaits_token and output.new_token_ids:
            request.awaits_token = False
            self._router.note_token(stream.request_id)
            self._suspects.discard(stream.request_id)
        if stream.error is not None and stream.num_choices > 1:
            self._send_abort(request, "disconnect", None)  # the choices that still run
        elif engine_goes_on:
            self._send_abort(request, "stop_string", output.choice)
        if stream.finished and stream.request_id in self._open:
            self._remove_request(stream.request_id)
            if request.request.agent is not None and stream.ended_well:
                # after the response has written the last chunk
                self._loop.call_soon(self._send_turn_ended, request)

    def _remove_request(self, request_id: int) -> OpenRequest:
        """Remove an open request, which has ended, and return it."""
        request = self._open.pop(request_id)
        self._suspects.discard(request_id)
        if self._routes:
            self._router.note_finished(request_id)
        if self._suspects_wait:  # an engine may be idle now
            self._loop.call_soon(self._send_waiting_requests)
        return request

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

    # Calls to all engines

    async def _ask_all(
        self,
        calls: dict[int, CallToEngines[Call, Reply]],
        call: Call,
        engines: Sequence[int] | None = None,
    ) -> list[Reply]:
        """Send a call to these engines, or all, and return their replies in the order of indices.

        An engine that is not ready gets it when it is; one that rests is left out of all.
        """
        _ = self.engine
        self._num_calls += 1
        number = self._num_calls
        call = changed(call, call_id=number)
        present = [index for index in range(self.num_engines) if index not in self._resting]
        asked = CallToEngines[Call, Reply](call, engines or present)
        calls[number] = asked
        try:
            for index in sorted(asked.missing):
                connection = self._current[index]
                if connection.ready:
                    connection.send(changed(call, epoch=connection.epoch))
            return await asked.done
        finally:
            calls.pop(number, None)


def _note_reply(calls: dict[int, CallToEngines[Call, Reply]], engine: int, reply: Reply) -> None:
    asked = calls.get(reply.call_id)
    if asked is not None:
        asked.note_reply(engine, reply)


def _joined(name: AdminName, replies: Sequence[AdminReply]) -> AdminReply:
    """Return one reply for the replies of all engines to an admin call.

    It fails if one fails. Numbers are added, except whether an engine is paused.
    """
    failed = [reply for reply in replies if not reply.ok]
    details = dict.fromkeys(reply.detail for reply in failed or replies if reply.detail)
    values = [reply.value for reply in replies]
    return AdminReply(
        epoch=replies[0].epoch,
        call_id=replies[0].call_id,
        ok=not failed,
        detail="\n".join(details),
        value=max(values) if name == "get_pause" else sum(values),
    )


def _common_properties(engines: Sequence[EngineReady]) -> EngineReady:
    """Return properties that hold for requests to any of several engines."""
    limits = {
        "max_num_queued_reqs": [engine.max_num_queued_reqs for engine in engines],
        "max_num_queued_tokens": [engine.max_num_queued_tokens for engine in engines],
    }
    return changed(
        engines[-1],
        max_model_len=min(engine.max_model_len for engine in engines),
        **{name: sum(values) if all(values) else 0 for name, values in limits.items()},
    )
