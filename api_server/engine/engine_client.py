"""Open requests: send them to an engine, hand its outputs to their streams, outlive its death.

Runs on the event loop alone. Knows nothing of HTTP.

    engine of epoch 1 ─ dies ─▶ gap: requests wait, aborts are remembered ─▶ engine of epoch 2
                                by forgetting                                is sent what is open

    a reload    engine of epoch 2 ── what is open there ───────▶ its last request ends, or it
                engine of epoch 3 ── all new requests ─────────▶  dies: then 3 is sent the rest
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from api_server.engine.engine_connection import FLUSH_SECONDS, EngineConnection, FromEngine
from api_server.errors import NotAvailableError
from api_server.live_view.publisher import LiveViewPublisher
from api_server.metrics.collector import Metrics
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
    RequestProgress,
    SessionInput,
    TurnEnded,
)
from proto.errors import (
    InternalRequestError,
    OverloadedError,
    QueueTimeoutError,
    RequestError,
    TimeLimitError,
)
from proto.lifecycle import EngineReady
from proto.sockets import Link
from proto.view import EngineView, Watch

# Requests under way, and what it takes to send them to another engine.


NO_ENGINE: Final = 0
"""In the place of an epoch: no engine has it."""


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

    @property
    def ended_well(self) -> bool:
        """Finished, neither by an error nor by an operator."""
        ...

    @property
    def output_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """What each choice has so far."""
        ...

    @property
    def finished_choices(self) -> tuple[int, ...]:
        """Choices that need no more tokens."""
        ...

    def accept(self) -> None:
        """The engine took the request in."""
        ...

    def fail(self, error: RequestError) -> None:
        """End what has not ended."""
        ...

    def called_tool(self) -> str:
        """The tool that an answer which ended well calls, by the engine's name; empty for none."""
        ...

    def feed(self, output: EngineCoreOutput, timestamp: float) -> bool:
        """Take in one output; True when this ended a choice that the engine goes on with.

        timestamp: monotonic seconds at which the tokens left the engine.
        Raises a RequestError when the output is not one that can follow.
        """
        ...


@dataclass(slots=True)
class OpenRequest:
    """request: as it was first asked. alone: the engine has said that nothing runs beside it.

    sent_to: the epoch of the engine that has it. accepted: by it or by one before.
    begun: that engine reported that it computes the request; engines report it only for requests
    that have seen an engine die.
    crash_count: engines that died since it got further, as far as it may have been the reason.
    """

    request: EngineCoreRequest
    stream: OutputStream
    sent_to: int = NO_ENGINE
    alone: bool = False
    begun: bool = False
    accepted: bool = False
    crash_count: int = 0
    _num_tokens: int = 0
    _died_at: int = 0
    _computed: int = 0
    _under_way: int = 0

    def accept(self) -> None:
        """An engine took it in."""
        self.accepted = True
        self.stream.accept()

    def check_time(self, now: float) -> None:
        """Raise the error of an expired deadline; now: monotonic seconds.

        TimeLimitError, or QueueTimeoutError for a request that has no token.
        """
        request = self.request
        if request.deadline <= now:
            seconds = request.deadline - request.arrival_time
            message = f"the request was not over within {seconds:g} s"
            raise TimeLimitError(message, "timeout_ms")
        if request.queue_deadline <= now and not self._num_tokens:
            seconds = request.queue_deadline - request.arrival_time
            raise QueueTimeoutError(
                f"the request had not begun within {seconds:g} s, the longest that it was to wait",
                "queue_timeout_ms",
            )

    def note_progress(self, progress: RequestProgress) -> None:
        """What its engine is about to compute; of several choices that of the furthest counts."""
        self.begun = True
        self._computed = max(self._computed, progress.num_computed_tokens)
        self._under_way = max(self._under_way, progress.num_tokens_under_way)

    def lose_engine(
        self, crashes_until_isolated: int | None, *, others_begun: bool = False
    ) -> None:
        """Note that the request's engine is gone, and count the crash if the request is suspect.

        crashes_until_isolated: None if the engine did not die. others_begun: some request of that
        engine had `begun`.

        A request that has reached `crashes_until_isolated` is blamed only for crashes while it ran
        alone; one that has seen a crash before only if this engine had begun it, or none. Progress
        clears the blame: a new token, or all tokens that were being computed in the last crash.
        """
        num_tokens = sum(map(len, self.stream.output_token_ids))
        if num_tokens > self._num_tokens or 0 < self._died_at <= self._computed:
            self.crash_count = 0
        only_waited = self.crash_count > 0 and others_begun and not self.begun
        if crashes_until_isolated is not None and self.sent_to != NO_ENGINE and not only_waited:
            self.crash_count += self.alone or self.crash_count < crashes_until_isolated
            self._died_at = self._under_way
        self._num_tokens = num_tokens
        self._computed = self._under_way = 0
        self.sent_to, self.alone, self.begun = NO_ENGINE, False, False

    def message(self, epoch: int) -> EngineCoreRequest:
        """Return the request for the engine of an epoch, which continues where the stream ends."""
        if not (self.accepted or self.crash_count or self._num_tokens):
            same = self.request.epoch == epoch
            return self.request if same else changed(self.request, epoch=epoch)
        return changed(
            self.request,
            epoch=epoch,
            output_token_ids=self.stream.output_token_ids,
            finished_choices=self.stream.finished_choices,
            crash_count=self.crash_count,
            accepted=self.accepted,
        )


__all__ = ["EngineClient", "FromEngine"]

logger = logging.getLogger("tokend.api")

GAP_SECONDS = 0.1
"""Interval of the deadline checks while no engine is connected."""
MAX_WAITING = 4096
"""Requests that wait for an engine that is being restarted; more are refused."""


class EngineClient:
    """Sends requests to the current engine and routes the outputs of all engines to their streams.

    link: to the engine of `epoch`; receives `FromEngine`. request_ids: mints the internal
    ids. crashes_until_isolated: as in the settings of the scheduler.
    """

    def __init__(
        self,
        link: Link,
        epoch: int,
        request_ids: Iterator[int],
        metrics: Metrics,
        crashes_until_isolated: int,
    ) -> None:
        self._crashes_until_isolated = crashes_until_isolated
        self._request_ids = request_ids
        self._metrics = metrics
        self._open: dict[int, OpenRequest] = {}
        self._calls: dict[int, tuple[AdminCall, asyncio.Future[AdminReply]]] = {}
        self._num_calls = 0
        self._engine: EngineReady | None = None
        self._closed = False
        self._on_invalid_message: Callable[[int], None] = lambda epoch: None
        self._live_view: LiveViewPublisher | None = None
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, EngineConnection] = {}
        self._without_heir: set[int] = set()
        self._current = self._connect(link, epoch)

    @property
    def epoch(self) -> int:
        """Of the engine that is asked."""
        return self._current.epoch

    def on_invalid_message(self, report: Callable[[int], None]) -> None:
        """Call `report` with the epoch of an engine that sends an undecodable message.

        Its content is lost, so the connection to that engine is no longer read; its requests wait
        for the next engine.
        """
        self._on_invalid_message = report

    def attach_live_view(self, live_view: LiveViewPublisher) -> None:
        """Pass the views of the current engine to this publisher."""
        self._live_view = live_view

    @property
    def _is_watched(self) -> bool:
        return self._live_view is not None and self._live_view.is_watched

    def watch(self) -> None:
        """Tell the current engine whether the live view has subscribers."""
        if self._current.ready and not self._closed:
            self._current.send(Watch(self.epoch, self._is_watched))

    @property
    def engine(self) -> EngineReady:
        """The properties of the engine; raises NotAvailableError before it is ready and at the end.

        While an engine is restarted these are those of the last one.
        """
        if self._closed:
            raise NotAvailableError("the server is shutting down")
        if self._engine is None:
            raise NotAvailableError("the server is starting")
        return self._engine

    @property
    def connected(self) -> bool:
        """An engine takes what is sent now."""
        return self._current.ready

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def wait_ready(self) -> EngineReady:
        """Return when the engine takes requests; raises ProtocolError for another version."""
        while not self._current.ready:
            await self._current.settled()  # or it died before that, and another one takes over
            if self._closed:
                break
        return self.engine

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def submit(self, request: EngineCoreRequest, stream: OutputStream) -> None:
        """Send a request, or let it wait for the engine; `stream` gets all that comes of it.

        It goes to the engine of its epoch, as long as that one is there. Raises
        OverloadedError when the engine does not keep up, which then hears nothing of it, and
        InternalRequestError where that one is gone and its tokens mean something else now.
        """
        _ = self.engine
        if request.epoch in self._without_heir:
            raise InternalRequestError("the engine of this request died")
        entry = OpenRequest(request, stream)
        connection = self._connections.get(request.epoch, self._current)
        if connection.ready:
            self._send_or_refuse(connection, entry.message(connection.epoch))
            entry.sent_to = connection.epoch
        elif len(self._open) >= MAX_WAITING:
            self._metrics.admission_rejected("restart")
            raise OverloadedError("the engine is being restarted and too many requests wait")
        self._open[request.request_id] = entry

    def send_input(self, message: SessionInput) -> None:
        """Send the next part of a session's input; nothing for a session that has ended.

        Raises OverloadedError when the engine does not keep up.
        """
        entry = self._open.get(message.request_id)
        if entry is not None:
            self._send_or_refuse(self._connections.get(entry.sent_to, self._current), message)

    def abort_request(self, stream: OutputStream) -> None:
        """Forget a request and send an Abort to its engine; nothing for one that is not open."""
        entry = self._open.pop(stream.request_id, None)
        if entry is not None:
            self._abort(entry, "disconnect", None)

    async def admin(
        self,
        name: AdminName,
        *,
        pause_mode: PauseMode = "finish_running",
        ends_unfinished: bool = False,
        reset_running_requests: bool = False,
        reset_external: bool = False,
    ) -> AdminReply:
        """Ask the engine for an operator's service; the parameters are those of `AdminCall`."""
        _ = self.engine
        self._num_calls += 1
        reply: asyncio.Future[AdminReply] = self._loop.create_future()
        call = AdminCall(
            self.epoch,
            self._num_calls,
            name,
            pause_mode,
            reset_running_requests,
            reset_external,
            ends_unfinished,
        )
        self._calls[self._num_calls] = call, reply
        if self._current.ready:
            self._current.send(call)
        return await reply

    def reconnect(self, link: Link, epoch: int, *, died: bool = True) -> None:
        """Another engine takes over at once: what is open goes to it as soon as it is ready.

        died: the one before did, and its requests may be the reason.
        """
        if self._closed:
            link.close()
            return
        old, self._current = self._current, self._connect(link, epoch)
        self._lose_engine(old.epoch, died)
        self._check_deadlines(epoch)

    def connect_next(self, link: Link, epoch: int) -> EngineConnection:
        """Get to know an engine that may take over later (`switch`), or never (`drop`)."""
        return self._connect(link, epoch)

    def switch(self, epoch: int) -> None:
        """Ask the engine of this epoch from now on, which was ready; what is open stays."""
        if self._is_watched and self._current.ready:
            self._current.send(Watch(self.epoch, False))
        self._current = self._connections[epoch]
        if self.connected:
            self._on_engine_ready()
        else:
            self._report_invalid_message(epoch)

    def drop(self, epoch: int, *, movable: bool = True) -> None:
        """An engine beside that of now is gone; what is open there goes to the one of now.

        movable: its tokens mean the same there; without that they fail.
        """
        assert epoch != self.epoch, "the engine of now is replaced, not dropped"
        if epoch not in self._connections or self._closed:
            return
        held = [entry for entry in self._open.values() if entry.sent_to == epoch]
        self._lose_engine(epoch, died=True)
        if not movable:
            self._without_heir.add(epoch)
            for entry in held:
                self._fail(entry.stream, InternalRequestError("the engine of this request died"))
        self._send_waiting()

    def close(self) -> None:
        """Fail all that is open and stop listening."""
        if self._closed:
            return
        error = NotAvailableError("the server is shutting down")
        self._closed = True
        for entry in list(self._open.values()):
            entry.stream.fail(error)
        if self._live_view is not None:
            self._live_view.close()
        for _, reply in self._calls.values():
            reply.cancel()
        self._open.clear()
        for connection in self._connections.values():
            connection.close()

    def _check_deadlines(self, epoch: int) -> None:
        """End requests whose deadline has passed, until the engine of an epoch is connected."""
        if self._closed or self._current.ready or epoch != self.epoch:
            return
        now = time.monotonic()
        for entry in list(self._open.values()):
            if entry.sent_to in self._connections:
                continue  # with an engine that goes on, and looks itself
            try:
                entry.check_time(now)
            except RequestError as error:
                self._fail(entry.stream, error)
        self._loop.call_later(GAP_SECONDS, self._check_deadlines, epoch)

    def _connect(self, link: Link, epoch: int) -> EngineConnection:
        def dispatch(message: Any) -> None:
            if not self._closed:
                self._dispatch(epoch, message)

        connection = EngineConnection(link, epoch, dispatch, self._report_invalid_message)
        self._connections[epoch] = connection
        self._metrics.meet_engine(epoch)
        return connection

    def _report_invalid_message(self, epoch: int) -> None:
        """Report an engine that sent an undecodable message.

        For an engine that is not the current one yet, this waits until `switch`.
        """
        if epoch <= self.epoch:
            self._on_invalid_message(epoch)

    def _lose_engine(self, epoch: int, died: bool) -> None:
        """Close the connection of an engine that is gone; its open requests wait for another."""
        connection = self._connections[epoch]
        connection.drain()  # what it said before it died counts
        connection.close()
        del self._connections[epoch]
        self._metrics.forget_engine(epoch)
        # but for those with an engine that goes on
        lost = [each for each in self._open.values() if each.sent_to not in self._connections]
        any_begun = any(each.begun for each in lost)
        for entry in lost:
            entry.lose_engine(
                self._crashes_until_isolated if died else None, others_begun=any_begun
            )
            if entry.request.resumable:
                del self._open[entry.request.request_id]
                entry.stream.fail(InternalRequestError("the session ended with its engine"))

    def _send_or_refuse(
        self, connection: EngineConnection, message: EngineCoreRequest | SessionInput
    ) -> None:
        if connection.stalled:
            raise OverloadedError("the engine does not keep up")
        connection.send(message)

    def _abort(
        self, entry: OpenRequest, reason: Literal["disconnect", "stop_string"], choice: int | None
    ) -> None:
        connection = self._connections.get(entry.sent_to)
        if self._closed or connection is None:
            return  # the next engine never hears of what is not open any more
        connection.send(Abort(connection.epoch, entry.request.request_id, reason, choice))

    def _dispatch(self, epoch: int, message: Any) -> None:
        if isinstance(message, EngineCoreOutputs):
            self._on_outputs(message)
        elif isinstance(message, EngineReady):
            if epoch == self.epoch:
                self._on_engine_ready()
        elif isinstance(message, EngineView):
            if epoch == self.epoch and self._live_view is not None:
                self._live_view.publish(message)
        else:
            _, reply = self._calls.pop(message.call_id, (None, None))
            if reply is not None and not reply.done():
                reply.set_result(message)

    def _on_engine_ready(self) -> None:
        """The engine of now is ready."""
        engine = self._engine = self._current.engine
        assert engine is not None, "it is ready"
        self._metrics.queue_limits(engine.max_num_queued_reqs, engine.max_num_queued_tokens)
        self._metrics.weight_memory(engine.weights)
        self._metrics.cache_config(block_size=engine.block_size, num_gpu_blocks=engine.num_blocks)
        for call, _ in self._calls.values():
            self._current.send(changed(call, epoch=self.epoch))
        if self._live_view is not None:
            self._live_view.on_engine_ready(engine)
        if self._is_watched:
            self.watch()
        self._send_waiting()

    def _send_waiting(self) -> None:
        """To the engine of now: all that no engine has, as fast as that one takes it.

        Suspects go first: nothing else can then be under way when they are computed.
        """
        if self._closed or not self._current.ready:
            return
        entries = [entry for entry in self._open.values() if entry.sent_to == NO_ENGINE]
        for entry in sorted(entries, key=lambda each: -each.crash_count):
            if self._current.stalled:
                self._loop.call_later(FLUSH_SECONDS, self._send_waiting)
                return
            entry.sent_to = self.epoch
            self._current.send(entry.message(self.epoch))

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        if message.stats is not None:
            self._metrics.scheduler_stats(message.stats, message.epoch, message.timestamp)
        for request_id in message.accepted:
            entry = self._open.get(request_id)
            if entry is not None:
                entry.accept()
        for request_id in message.alone:
            entry = self._open.get(request_id)
            if entry is not None:
                entry.alone = True
        for progress in message.progress:
            entry = self._open.get(progress.request_id)
            if entry is not None:
                entry.note_progress(progress)
        for output in message.outputs:
            entry = self._open.get(output.request_id)
            if entry is not None:
                self._feed(entry, output, message.timestamp)

    def _feed(self, entry: OpenRequest, output: EngineCoreOutput, timestamp: float) -> None:
        """Whatever goes wrong here is the fault of one request and ends only that one."""
        stream = entry.stream
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
            self._abort(entry, "disconnect", None)  # the choices that still run
        elif engine_goes_on:
            self._abort(entry, "stop_string", output.choice)
        if stream.finished:
            self._open.pop(stream.request_id, None)
            if entry.request.agent is not None and stream.ended_well:
                self._loop.call_soon(
                    self._end_turn, entry
                )  # after the response has written the last chunk

    def _end_turn(self, entry: OpenRequest) -> None:
        """Report the tool call of a finished turn to the engine that computed it, if it runs."""
        connection = self._connections.get(entry.sent_to)
        agent = entry.request.agent
        if agent is None or connection is None or self._closed:
            return
        tool = entry.stream.called_tool()
        request_id = entry.request.request_id
        connection.send(TurnEnded(connection.epoch, request_id, agent.job, tool))

    def _fail(self, stream: OutputStream, error: RequestError) -> None:
        stream.fail(error)
        self.abort_request(stream)
