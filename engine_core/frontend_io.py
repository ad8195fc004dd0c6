"""Messages from and to the front ends.

`InputProcessor` turns their messages into calls of the scheduler, and `OutputDispatcher` collects
what each front end is sent. The channels are in `transport.py`. An error in one request ends as
one output of that request, and affects no other.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from engine_core.adapters import AdapterRegistry
from engine_core.kv_cache.integrity import check
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_events import KVEventPublisher
from engine_core.live_view import EngineViewPublisher
from engine_core.profiler import PROFILER_OFF, EngineProfiler
from engine_core.request import Request, choices_of, with_adapter
from engine_core.scheduler.features.crash_isolation import is_repeated_crash, repeated_crash_error
from engine_core.scheduler.request_lifecycle import OutputsByFrontEnd, completion, stop_token
from engine_core.scheduler.scheduler import Scheduler
from engine_core.structured_output.compiler import UNAVAILABLE
from engine_core.structured_output.manager import StructuredOutputManager, grammar_source_of
from engine_core.transport import FrontEndLinks
from engine_core.validation import RequestLimits, validate_input, validate_request
from proto.errors import (
    ErrorInfo,
    ErrorKind,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    UnknownModelError,
)
from proto.messages.engine_io import (
    Abort,
    AdminCall,
    AdminReply,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    RequestProgress,
    SessionInput,
    ToEngine,
    TurnEnded,
)
from proto.messages.lora import AdapterCall, AdapterReply, AdapterUsage
from proto.messages.view import Watch

logger = logging.getLogger("tokend.frontend_io")

NO_ADAPTERS: Final = "adapters need a server that was started with --enable-lora"

INTERNAL_ERROR: Final = ErrorInfo("internal", "internal error")
"""Sent to clients instead of the text of an unexpected exception, which may contain anything."""


class InputProcessor:
    """Processes the messages of front ends, one at a time, in order.

    structured_output: compiles grammars; None refuses requests with one. profiler: None refuses
    profiles. adapters: None refuses requests with one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv_cache: KVCacheManager,
        output_dispatcher: "OutputDispatcher",
        limits: RequestLimits,
        structured_output: StructuredOutputManager | None = None,
        profiler: EngineProfiler | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._profiler = profiler
        self._adapters = adapters
        self._output_dispatcher = output_dispatcher
        self._limits = limits
        self._structured_output = structured_output

    def process_message(self, front_end: int, message: ToEngine) -> None:
        """Process a message of a front end; raises nothing for invalid messages."""
        if isinstance(message, EngineCoreRequest):
            self._process_request(front_end, message)
        elif isinstance(message, SessionInput):
            self._process_session_input(front_end, message)
        elif isinstance(message, Abort):
            stopped = message.reason == "stop_string"
            self._scheduler.abort_request(message.request_id, message.choice, stopped=stopped)
        elif isinstance(message, TurnEnded):
            self._scheduler.report_tool(message.request_id, message.agent_session, message.tool)
        elif isinstance(message, AdminCall):
            if (reply := self._carry_out(front_end, message)) is not None:
                self._output_dispatcher.add_reply(front_end, reply)
        elif isinstance(message, AdapterCall):
            self._process_adapter_call(front_end, message)
        elif isinstance(message, Watch):
            self._output_dispatcher.live_view.watch(front_end, wanted=message.wanted)

    def end_overdue_requests(self) -> bool:
        """End requests whose deadline has passed. Return whether there were any."""
        overdue = self._scheduler.deadlines.pop_overdue()
        for request in overdue:
            self._scheduler.abort_request(request.request_id)
            output = _error_output(request.request_id, request.error)
            self._output_dispatcher.add_output(request.front_end_index, output)
        return bool(overdue)

    def accept_compiled_requests(self) -> bool:
        """Accept or refuse requests whose grammar has been compiled. Return if there were any."""
        assert self._structured_output is not None
        compiled = self._structured_output.pop_compiled_requests()
        for front_end, request_id, error in compiled:
            if not self._scheduler.has_request(request_id):
                continue  # its client has disconnected
            if error is None:
                self._output_dispatcher.add_accepted(front_end, request_id)
            else:
                self._scheduler.abort_request(request_id)
                self._output_dispatcher.add_output(
                    front_end, _error_output(request_id, _error_info(error))
                )
        return bool(compiled)

    def answer_profile_call(self) -> bool:
        """Add the reply to a profile call that all workers have answered; return if it was."""
        reply = None if self._profiler is None else self._profiler.pop_reply()
        if reply is None:
            return False
        self._output_dispatcher.add_reply(*reply)
        return True

    def forget_front_end(self, front_end: int) -> None:
        """Send no reply to the calls of a front end that has died."""
        if self._profiler is not None:
            self._profiler.forget_front_end(front_end)
        if self._adapters is not None:
            self._adapters.forget_front_end(front_end)

    def _process_adapter_call(self, front_end: int, message: AdapterCall) -> None:
        if self._adapters is not None:
            self._adapters.begin_call(front_end, message)
            return
        reply = AdapterReply(message.epoch, message.call_id, 400, NO_ADAPTERS)
        self._output_dispatcher.add_reply(front_end, reply)

    def _process_request(self, front_end: int, message: EngineCoreRequest) -> None:
        """Validate a request, apply the queue limits, and queue its choices."""
        if self._scheduler.has_request(message.request_id):
            # An error output would end the stream of the running request with the same id.
            logger.error(
                "front end %d sent request %d twice%s",
                front_end,
                message.request_id,
                _trace_of(message),
            )
            return
        try:
            validate_request(message, self._limits)
            message = self._find_adapter(message)
            if is_repeated_crash(message.crash_count, self._limits.crashes_until_isolated):
                self._refuse(front_end, message, repeated_crash_error(message.crash_count))
                return
            self._scheduler.queue_limits.check_message(message)
            is_accepted = self._admit_grammar(message)
            next_seq_id = self._scheduler.next_seq_id
            for request in choices_of(message, next_seq_id, front_end, self._kv_cache.hasher):
                if message.resumable:
                    self._scheduler.resumable_sessions.open_session(request)
                self._add_choice(request, message)
        except (InvalidRequestError, QueueFullError, UnknownModelError) as error:
            self._refuse(front_end, message, _error_info(error))
        except Exception:  # one bad request must not end the engine
            logger.exception(
                "request %d could not be added%s", message.request_id, _trace_of(message)
            )
            self._scheduler.abort_request(message.request_id)
            self._refuse(front_end, message, INTERNAL_ERROR)
        else:
            if is_accepted:
                self._output_dispatcher.add_accepted(front_end, message.request_id)

    def _find_adapter(self, message: EngineCoreRequest) -> EngineCoreRequest:
        """Return a request with this engine's id of its adapter; one without is returned as it is.

        Raises InvalidRequestError or UnknownModelError.
        """
        if message.lora_request is None:
            return message
        if self._adapters is None:
            raise InvalidRequestError(NO_ADAPTERS, "model")
        lora = self._adapters.find(message.lora_request, accepted=message.accepted)
        return with_adapter(message, lora)

    def _admit_grammar(self, message: EngineCoreRequest) -> bool:
        """Return whether a request is accepted now, not after its grammar is compiled."""
        if self._structured_output is not None:
            return self._structured_output.admit_request(message)
        source = grammar_source_of(message)
        if source is not None:
            raise InvalidRequestError(UNAVAILABLE).in_field(source.field)
        return True

    def _add_choice(self, request: Request, message: EngineCoreRequest) -> None:
        """Queue a choice.

        It ends at once if an earlier engine has computed all of it, but died before sending so.
        """
        status = completion(request, self._limits.max_model_len)
        if not status.is_finished:
            self._scheduler.add_request(request)
            self._scheduler.queue_limits.count_request(request)
            self._scheduler.deadlines.track_request(request, message)
            if self._structured_output is not None:
                self._structured_output.add_choice(request, message)
            return
        request.status = status
        output = EngineCoreOutput(
            request.request_id,
            request.choice,
            request.num_output_tokens,
            [],
            status.finish_reason,
            stop_token(request) if status.finish_reason is FinishReason.STOP else None,
        )
        outputs = {request.front_end_index: [output]}
        self._scheduler.resumable_sessions.on_ending(request, succeeded=True)
        self._scheduler.resumable_sessions.begin_turns(outputs)
        self._output_dispatcher.add_outputs(outputs)

    def _process_session_input(self, front_end: int, message: SessionInput) -> None:
        """Begin or queue a turn of a session; invalid input ends the session."""
        sessions, request_id = self._scheduler.resumable_sessions, message.request_id
        if not sessions.accepts_input(front_end, request_id):
            logger.warning("front end %d: request %d takes no input", front_end, request_id)
            return
        try:
            validate_input(message, self._limits)
            outputs = sessions.add_input(message)
        except InvalidRequestError as error:
            outputs = [sessions.fail_session(request_id, _error_info(error))]
        except Exception:  # one bad input must not end the engine
            logger.exception("request %d could not take its input", request_id)
            outputs = [sessions.fail_session(request_id, INTERNAL_ERROR)]
        for output in outputs:
            self._output_dispatcher.add_output(front_end, output)

    def _refuse(self, front_end: int, message: EngineCoreRequest, error: ErrorInfo) -> None:
        self._output_dispatcher.add_output(front_end, _error_output(message.request_id, error))

    def _carry_out(self, front_end: int, message: AdminCall) -> AdminReply | None:
        """Return the reply to a call; None if it follows later."""
        ok, detail, value = True, "", 0
        match message.name:
            case "check_integrity":
                detail = "\n".join(check(self._kv_cache))
                ok = not detail
            case "reset_prefix_cache":
                ok = self._scheduler.reset_prefix_cache(preempting=message.reset_running_requests)
                detail = "" if ok else f"{self._scheduler.num_unfinished} requests are unfinished"
                if ok and message.reset_external and not self._scheduler.kv_transfer.reset_cache():
                    ok, detail = False, "copies of the KV connector are in progress"
            case "reset_encoder_cache":
                ok = self._scheduler.reset_encoder_cache()
                detail = "" if ok else "requests need encoder outputs of images"
            case "pause":
                if message.ends_unfinished:
                    self._abort_all_requests()
                self._scheduler.pause(message.pause_mode)
            case "resume":
                self._scheduler.resume()
            case "get_pause":
                detail = self._scheduler.pause_mode or ""
                value = int(bool(detail))
            case "start_profile" | "stop_profile":
                if self._profiler is not None:
                    return self._profiler.begin_call(message, front_end)
                ok, detail = False, PROFILER_OFF
            case "get_num_unfinished":
                value = self._scheduler.num_unfinished
        return AdminReply(message.epoch, message.call_id, ok, detail, value)

    def _abort_all_requests(self) -> None:
        """Abort all requests, with a final output for each."""
        outputs = self._scheduler.abort_all_requests()
        for front_end, front_end_outputs in outputs.items():
            for request_id in {output.request_id for output in front_end_outputs}:
                # A request whose grammar is being compiled has not been accepted yet.
                self._output_dispatcher.add_accepted(front_end, request_id)
        self._output_dispatcher.add_outputs(outputs)


class OutputDispatcher:
    """Collects outputs, accepted ids and replies per front end until `flush` sends them.

    A flush sends one message to each front end, besides replies. It also publishes KV events and
    feeds the live view. epoch: of the engine. kv_events: None without --kv-events-config. adapters:
    None without --enable-lora.
    """

    def __init__(
        self,
        front_ends: FrontEndLinks,
        scheduler: Scheduler,
        kv_cache: KVCacheManager,
        epoch: int,
        kv_events: KVEventPublisher | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self._front_ends = front_ends
        self._scheduler = scheduler
        self._epoch = epoch
        self._kv_events = kv_events
        self._clock = clock
        self.live_view = EngineViewPublisher(
            front_ends, scheduler, kv_cache, epoch, clock, adapters
        )
        self._adapter_usage: AdapterUsage | None = None
        self._accepted: dict[int, list[int]] = {}
        self._outputs: OutputsByFrontEnd = {}
        self._progress: dict[int, list[RequestProgress]] = {}
        self._replies: list[tuple[int, AdminReply | AdapterReply]] = []

    def add_accepted(self, front_end: int, request_id: int) -> None:
        self._accepted.setdefault(front_end, []).append(request_id)

    def add_output(self, front_end: int, output: EngineCoreOutput) -> None:
        self._outputs.setdefault(front_end, []).append(output)

    def add_outputs(self, outputs: OutputsByFrontEnd) -> None:
        for front_end, front_end_outputs in outputs.items():
            self._outputs.setdefault(front_end, []).extend(front_end_outputs)

    def add_progress(self, progress: list[tuple[Request, int]]) -> None:
        """Add progress of requests. progress: requests, and tokens of theirs in complete steps."""
        for request, num_tokens in progress:
            self._progress.setdefault(request.front_end_index, []).append(
                RequestProgress(request.request_id, num_tokens, request.num_computed_tokens)
            )

    def add_reply(self, front_end: int, reply: AdminReply | AdapterReply) -> None:
        self._replies.append((front_end, reply))

    def report_begun(self, request: Request, *, alone: bool) -> None:
        """Send at once that a request is about to be scheduled, because scheduling it may crash.

        alone: whether no other request is scheduled with it.
        """
        self._front_ends.send(
            request.front_end_index,
            EngineCoreOutputs(
                epoch=self._epoch,
                step=self._scheduler.step,
                timestamp=self._clock(),
                alone=[request.request_id] if alone else [],
                progress=[RequestProgress(request.request_id, 0, 0)],
            ),
        )

    def publish_kv_events(self) -> None:
        """Publish the KV events since the last call, of the KV pool and of other media."""
        external_events = list(self._scheduler.kv_transfer.pop_events())  # or they accumulate
        if self._kv_events is not None:
            self._kv_events.publish(external_events)

    def flush(self) -> None:
        """Send everything that was added.

        Statistics are sent in any case: with the message of one front end that gets one, otherwise
        to any front end that is alive.
        """
        self.publish_kv_events()
        replies, self._replies = self._replies, []
        for front_end, reply in replies:
            self._front_ends.send(front_end, reply)
        if self._scheduler.adapters is not None:
            self._send_adapter_usage(self._scheduler.adapters.usage(self._epoch))
        outputs, self._outputs = self._outputs, {}
        accepted, self._accepted = self._accepted, {}
        progress, self._progress = self._progress, {}
        addressed, alive = {*outputs, *accepted, *progress}, self._front_ends.alive
        front_ends = [front_end for front_end in alive if front_end in addressed] or alive[:1]
        stats = self._scheduler.pop_stats() if front_ends else None
        self.live_view.count(outputs, stats)
        for index, front_end in enumerate(front_ends):
            self._front_ends.send(
                front_end,
                EngineCoreOutputs(
                    epoch=self._epoch,
                    step=self._scheduler.step,
                    timestamp=self._clock(),
                    outputs=outputs.get(front_end, []),
                    accepted=accepted.get(front_end, []),
                    stats=stats if index == 0 else None,
                    progress=progress.get(front_end, []),
                ),
            )

    def _send_adapter_usage(self, usage: AdapterUsage) -> None:
        """Send which adapters are used to all front ends, if that has changed."""
        if usage != self._adapter_usage:
            self._adapter_usage = usage
            for front_end in self._front_ends.alive:
                self._front_ends.send(front_end, usage)


def _trace_of(message: EngineCoreRequest) -> str:
    return f" (trace_id={message.trace_id})" if message.trace_id else ""


def _error_output(request_id: int, error: ErrorInfo) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, 0, 0, [], FinishReason.ERROR, error=error)


def _error_info(error: RequestError) -> ErrorInfo:
    kind: ErrorKind = "internal"
    if isinstance(error, InvalidRequestError):
        kind = "invalid_request"
    elif isinstance(error, QueueFullError):
        kind = "queue_full"
    elif isinstance(error, UnknownModelError):
        kind = "unknown_model"
    seconds = error.retry_after_seconds
    return ErrorInfo(kind, error.message, error.param, retry_after_seconds=seconds)
