"""The output of one HTTP request: submit its engine requests, wait for output, close.

    handler ─ submit ─▶ TokenStream ─▶ EngineClient ─▶ engine
                                                         │
    connection ◀─ GenerationResponse ◀─ pop_deltas ─ RequestStream ◀─ EngineClient

When the client disconnects or a part fails, `TokenStream.close` aborts the requests that have not
finished, counts them and writes one line to the log. Everything here runs on the event loop.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from starlette.requests import Request

from api_server.engine.engine_client import EngineClient
from api_server.generation.request_stream import (
    Choice,
    Delta,
    DeltaWriter,
    RequestStream,
    SendBuffer,
    StreamNotifier,
    Usage,
)
from api_server.generation.tracing import RequestTracer
from api_server.http.connection import client_disconnected, wait_disconnect
from api_server.http.http_protocol import is_stalled
from api_server.http.request_log import Fields, error_fields, log_fields
from api_server.metrics.metrics import Metrics
from api_server.parsers.output import TOOL_CALLS, ChoiceParser
from api_server.turns import current_client
from proto.errors import QueueFullError, RequestAbortedError, RequestError
from proto.messages.engine_io import EngineCoreRequest, FinishReason


@dataclass(slots=True, eq=False)
class TokenStream:
    """All output of one HTTP request.

    label: the response's id. key_name: of the client's API key.
    requests, streams: one per prompt, in the same order.
    open_streams: contains this stream from its submission to its end.
    engine: index of the engine that the client wants; None for any.
    ignored: names of the request's unknown fields, for the log.
    origin: fields of the line in the log at the end (`RequestLog.origin`); None for no line.
    tracer: exports spans; None if they are off.
    choice_parsers: of a chat, one for each choice.
    cleanup: closed when the stream ends, for any reason.
    disconnected: the client has closed the connection; nothing more is sent.
    """

    label: str
    client: EngineClient
    metrics: Metrics
    notifier: StreamNotifier
    requests: Sequence[EngineCoreRequest]
    streams: Sequence[RequestStream]
    send_buffer: SendBuffer
    open_streams: "set[TokenStream]"
    origin: Fields | None = None
    engine: int | None = None
    ignored: str = ""
    key_name: str = ""
    tracer: RequestTracer | None = None
    choice_parsers: Sequence[ChoiceParser] = ()
    cleanup: ExitStack = field(default_factory=ExitStack, init=False)
    disconnected: bool = field(default=False, init=False)
    _cause: str = field(default="", init=False)
    _closed: bool = field(default=False, init=False)

    async def submit(self, connection: Request | None = None) -> None:
        """Send the requests; return when the engine has accepted all of them.

        A request that may expire in the queue counts as accepted once it is scheduled.
        connection: of the client. If it closes before the stream ends, the engine requests are
        aborted; if it closes during this call, the call returns with `disconnected` set. None if
        the client does not wait for the response. Raises the RequestError of the first prompt that
        is refused.
        """
        try:
            if connection is not None:
                watch = asyncio.create_task(self._watch_client(connection))
                self.cleanup.callback(watch.cancel)
                if client_disconnected(connection.scope):
                    await asyncio.wait([watch])
                    return
            self._send_requests()
            current_client().release_body()
            while not self.disconnected and not all(
                stream.is_status_known for stream in self.streams
            ):
                self._raise_error()
                await self.notifier.wait()
            self._raise_error()
        except BaseException:
            self.close()
            raise

    async def wait(self, write: DeltaWriter | None = None) -> None:
        """Return when there is output that `write` could not write, or at the end."""
        await self.notifier.wait(write)

    def pop_deltas(self) -> list[Delta]:
        """Return the new output of each choice since the last call; only choices that have some."""
        choices = [choice for stream in self.streams for choice in stream.choices]
        choices = [choice for choice in choices if choice.has_delta]
        self.send_buffer.clear()
        return [choice.pop_delta() for choice in choices]

    @property
    def error(self) -> RequestError | None:
        """The first failure of any prompt."""
        for stream in self.streams:
            if stream.error is not None:
                return stream.error
        return None

    @property
    def finished(self) -> bool:
        return all(stream.finished for stream in self.streams)

    @property
    def is_running(self) -> bool:
        """The client is connected, no prompt has failed, and some choice has not finished."""
        if self.disconnected:
            return False
        finished = True
        for stream in self.streams:
            if stream.error is not None:
                return False
            finished = finished and stream.finished
        return not finished

    def usage(self) -> Usage:
        counters = [counter for stream in self.streams for counter in stream.reasoning_counters]
        return Usage(
            sum(len(stream.prompt_token_ids) for stream in self.streams),
            sum(stream.num_completion_tokens for stream in self.streams),
            sum(stream.num_cached_tokens for stream in self.streams),
            sum(counter.num_tokens for counter in counters) if counters else None,
        )

    def disconnect(self, cause: Literal["disconnect", "slow_reader"]) -> None:
        """Close the stream: the client disconnected, or was disconnected for not reading."""
        self.disconnected, self._cause = True, cause
        self.close()
        self.notifier.notify()

    def abort(self) -> None:
        """End the stream on behalf of an operator; the client gets an error."""
        self.fail(RequestAbortedError())

    def fail(self, error: RequestError) -> None:
        for stream in self.streams:
            stream.fail(error)

    def cancel(self) -> None:
        """End the stream with its output so far, on behalf of its client."""
        if not self.finished and all(stream.accepted for stream in self.streams):
            self.metrics.count_cut_short("cancel")
        for stream in self.streams:
            stream.finish_early()
            self.client.abort_request(stream)

    def close(self) -> None:
        """Abort what still runs, count and log the request; further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self.open_streams.discard(self)
        now = time.monotonic()
        trace_id = self.requests[0].trace_id
        for request, stream in zip(self.requests, self.streams, strict=True):
            self._close_stream(stream, now)
            if self.tracer is not None:
                trace_id = self.tracer.record_request(request, stream, now)
        if self.origin is not None:
            self._log(self.origin, now, trace_id)
        self.cleanup.close()

    def _send_requests(self) -> None:
        self.open_streams.add(self)
        for request, stream in zip(self.requests, self.streams, strict=True):
            try:
                self.client.submit(request, stream, self.engine)
            except RequestError as error:
                stream.fail(error)  # `close` counts and logs it by its type
                raise

    async def _watch_client(self, connection: Request) -> None:
        await wait_disconnect(connection.receive)
        self.disconnect("slow_reader" if is_stalled(connection.scope) else "disconnect")

    def _close_stream(self, stream: RequestStream, now: float) -> None:
        reason, cause = "abort", self._cause
        if stream.error is not None:
            reason, cause = "error", stream.error.cause
        running = [choice for choice in stream.choices if not choice.finished]
        for seconds in stream.timeline.preemptions(now):
            stream.engine_metrics.record_preemptions(seconds)
        self.client.abort_request(stream)
        if running and cause:
            self.metrics.count_cut_short(cause)
        if isinstance(stream.error, QueueFullError):
            stream.engine_metrics.count_rejection(str(stream.error.param))
        if stream.accepted:
            for choice in running:
                stream.engine_metrics.count_finished_choice(reason, len(choice.token_ids))
            if stream.error is None and not running:
                stream.record_finished(now)

    def _log(self, origin: Fields, now: float, trace_id: str) -> None:
        usage = self.usage()
        first = self.streams[0].timeline
        num_images = sum(len(request.mm_features) for request in self.requests)
        fields: Fields = {"id": self.label, **origin}
        fields |= {
            "prompts": len(self.streams),
            "choices": len(self.streams[0].choices),
            **({"engine": self._engines()} if len(self.metrics.engines) > 1 else {}),
            "prompt_tokens": usage.prompt_tokens,
            **({"images": num_images} if num_images else {}),
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "queue": _seconds(first.queued, first.scheduled),
            "ttft": _seconds(first.arrival, first.first_token),
            "total": _seconds(first.arrival, now),
            "finish": self._outcome(),
        }
        preempted = [
            seconds
            for stream in self.streams
            for seconds in chain.from_iterable(stream.timeline.preemptions(now))
        ]
        if preempted:
            fields |= {"preemptions": len(preempted), "preempted": round(sum(preempted), 6)}
        if trace_id:
            fields["trace_id"] = trace_id
        if self.ignored:
            fields["ignored_fields"] = self.ignored
        if self.error is not None:
            fields |= error_fields(self.error)
            self.error.is_logged = True  # `error_response` writes no second line
        elif self._cause and not self.finished:
            fields["cause"] = self._cause
        log_fields(fields)

    def _engines(self) -> str:
        """Return the indices of the engines that computed the prompts last: "0" or "0,2"."""
        return ",".join(map(str, sorted({stream.engine for stream in self.streams})))

    def _outcome(self) -> str:
        if self.error is not None:
            return f"error {self.error.status}"
        reasons = {
            self._finish_reason(choice) for stream in self.streams for choice in stream.choices
        }
        return ",".join(sorted(reasons))

    def _finish_reason(self, choice: Choice) -> str:
        """Return the finish_reason that the client gets."""
        if not choice.finished:
            return "abort"
        is_stop, parsers = choice.finish_reason is FinishReason.STOP, self.choice_parsers
        if is_stop and parsers and parsers[choice.index].has_tool_calls:
            return TOOL_CALLS
        return str(choice.finish_reason)

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 6)
