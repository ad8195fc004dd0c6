"""What the front ends ask for, turned into calls of the scheduler.

Owns the minting of seq_ids. Whatever is wrong with one request ends as one output
of that request and harms nothing else. Knows no sockets.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_events import NO_KV_EVENTS, KVEventSink
from engine_core.request import Request, choices_of
from engine_core.scheduler.crash_isolation import is_repeated_crash, repeated_crash_error
from engine_core.scheduler.result import ClientOutputs, completion, stop_token
from engine_core.scheduler.scheduler import Scheduler
from engine_core.structured_output.grammars import NO_GRAMMARS, Grammars
from engine_core.transport import FrontEndLinks
from engine_core.validation import RequestLimits, validate_input, validate_request
from engine_core.view.views import NO_VIEWS, Views
from proto.engine_io import (
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
from proto.errors import ErrorInfo, InvalidRequestError, QueueFullError
from proto.view import Watch

# Outputs, acceptances, replies and statistics wait here until the next flush, which sends one
# message to each front end; replies to operators are sent separately.


class OutputDispatcher:
    """Collects per front end; `flush` sends."""

    def __init__(
        self,
        front_ends: FrontEndLinks,
        scheduler: Scheduler,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
        kv_events: KVEventSink = NO_KV_EVENTS,
        views: Views = NO_VIEWS,
    ) -> None:
        self._front_ends = front_ends
        self._scheduler = scheduler
        self._epoch = epoch
        self._clock = clock
        self._kv_events = kv_events
        self._views = views
        self._accepted: dict[int, list[int]] = {}
        self._outputs: ClientOutputs = {}
        self._progress: dict[int, list[RequestProgress]] = {}
        self._replies: list[tuple[int, AdminReply]] = []

    def accept(self, client: int, request_id: int) -> None:
        """A request was taken in."""
        self._accepted.setdefault(client, []).append(request_id)

    def add(self, client: int, output: EngineCoreOutput) -> None:
        """An output that no step made."""
        self._outputs.setdefault(client, []).append(output)

    def add_step(self, outputs: ClientOutputs) -> None:
        """The outputs of a step."""
        for client, each in outputs.items():
            self._outputs.setdefault(client, []).extend(each)

    def begins(self, request: Request, *, alone: bool) -> None:
        """Say at once that a request is begun with: deciding its step may be the end."""
        self._front_ends.send(
            request.client_index,
            EngineCoreOutputs(
                epoch=self._epoch,
                step=self._scheduler.step,
                timestamp=self._clock(),
                alone=[request.request_id] if alone else [],
                progress=[RequestProgress(request.request_id, 0, 0)],
            ),
        )

    def add_progress(self, progress: list[tuple[Request, int]]) -> None:
        """So far these are computed: the tokens in complete steps."""
        for request, num_tokens in progress:
            self._progress.setdefault(request.client_index, []).append(
                RequestProgress(request.request_id, num_tokens, request.num_computed_tokens)
            )

    def reply(self, client: int, reply: AdminReply) -> None:
        """The answer to a call."""
        self._replies.append((client, reply))

    def flush(self) -> None:
        """Send everything. The statistics go out even if there is nothing else to say.

        They ride with what one front end is told anyway, if it is alive.
        """
        self._kv_events.publish(self._scheduler.kv_transfer.take_events())
        replies, self._replies = self._replies, []
        for client, reply in replies:
            self._front_ends.send(client, reply)
        outputs, self._outputs = self._outputs, {}
        accepted, self._accepted = self._accepted, {}
        progress, self._progress = self._progress, {}
        told, alive = {*outputs, *accepted, *progress}, self._front_ends.alive
        clients = [each for each in alive if each in told] or alive[:1]
        stats = self._scheduler.take_stats() if clients else None
        self._views.count(outputs, stats)
        for index, client in enumerate(clients):
            self._front_ends.send(
                client,
                EngineCoreOutputs(
                    epoch=self._epoch,
                    step=self._scheduler.step,
                    timestamp=self._clock(),
                    outputs=outputs.get(client, []),
                    accepted=accepted.get(client, []),
                    stats=stats if index == 0 else None,
                    progress=progress.get(client, []),
                ),
            )


logger = logging.getLogger("tokend.intake")

INTERNAL_ERROR: Final = ErrorInfo("internal", "internal error")
"""All that a client is told of a mistake of ours: its words may be about anything."""


class InputProcessor:
    """Takes the messages of front ends, one at a time, in order."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv_cache: KVCacheManager,
        outbox: OutputDispatcher,
        limits: RequestLimits,
        check_integrity: Callable[[], list[str]],
        grammars: Grammars = NO_GRAMMARS,
        views: Views = NO_VIEWS,
    ) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._output_dispatcher = outbox
        self._limits = limits
        self._check_integrity = check_integrity
        self._grammars = grammars
        self._views = views

    def take(self, client: int, message: ToEngine) -> None:
        """Do what a message asks; never raises for what is in it."""
        if isinstance(message, EngineCoreRequest):
            self._take_request(client, message)
        elif isinstance(message, SessionInput):
            self._take_input(client, message)
        elif isinstance(message, Abort):
            stopped = message.reason == "stop_string"
            self._scheduler.abort(message.request_id, message.choice, stopped=stopped)
        elif isinstance(message, TurnEnded):
            self._scheduler.end_turn(message.request_id, message.job, message.tool)
        elif isinstance(message, AdminCall):
            self._output_dispatcher.reply(client, self._call(message))
        elif isinstance(message, Watch):
            self._views.watch(client, wanted=message.wanted)

    def end_overdue(self) -> bool:
        """End the requests whose time is over; False when there are none."""
        overdue = self._scheduler.deadlines.take_overdue()
        for each in overdue:
            self._scheduler.abort(each.request_id)
            self._output_dispatcher.add(each.client_index, _final(each.request_id, each.error))
        return bool(overdue)

    def _end_everyone(self) -> None:
        """Whoever waits for something is told that this was all."""
        outputs = self._scheduler.abort_everyone()
        for client, each in outputs.items():
            for request_id in {output.request_id for output in each}:
                self._output_dispatcher.accept(
                    client, request_id
                )  # its grammar may be compiled still
        self._output_dispatcher.add_step(outputs)

    def answer_compiled(self) -> bool:
        """Take in, or refuse, those that waited for their grammar; False when there are none."""
        answers = self._grammars.take_compiled()
        for each in answers:
            if not self._scheduler.knows(each.request_id):
                continue  # its client has left
            if each.error is None:
                self._output_dispatcher.accept(each.client, each.request_id)
            else:
                self._scheduler.abort(each.request_id)
                self._output_dispatcher.add(each.client, _final(each.request_id, _told(each.error)))
        return bool(answers)

    def _take_request(self, client: int, message: EngineCoreRequest) -> None:
        if self._scheduler.knows(message.request_id):
            # An answer would end the stream of the request that is running.
            logger.error("front end %d sent request %d twice", client, message.request_id)
            return
        try:
            validate_request(message, self._limits)
            if is_repeated_crash(message.crash_count, self._limits.crashes_until_isolated):
                self._refuse(client, message, repeated_crash_error(message.crash_count))
                return
            self._scheduler.queue_limits.check(message)
            accepted = self._grammars.admit(client, message)
            next_seq_id = self._scheduler.next_seq_id
            for request in choices_of(message, next_seq_id, client, self._kv_cache.hasher):
                if message.resumable:
                    self._scheduler.sessions.open(request)
                self._add(request, message)
        except InvalidRequestError as error:
            self._refuse(client, message, _told(error))
        except QueueFullError as error:
            self._refuse(client, message, _full(error))
        except Exception:  # one bad request must not end the engine
            logger.exception("request %d could not be added", message.request_id)
            self._scheduler.abort(message.request_id)
            self._refuse(client, message, INTERNAL_ERROR)
        else:
            if accepted:
                self._output_dispatcher.accept(client, message.request_id)

    def _add(self, request: Request, message: EngineCoreRequest) -> None:
        """Queue a choice, or end it at once where an earlier engine finished it unheard."""
        status = completion(request, self._limits.max_model_len)
        if not status.is_finished:
            self._scheduler.add_request(request)
            self._scheduler.queue_limits.enter(request)
            self._scheduler.deadlines.enter(request, message)
            self._grammars.enter(request, message)
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
        outputs = {request.client_index: [output]}
        self._scheduler.sessions.end_turn(request)
        self._scheduler.sessions.begin_turns(outputs)
        self._output_dispatcher.add_step(outputs)

    def _take_input(self, client: int, message: SessionInput) -> None:
        """Begin or queue a turn. Input that is wrong ends its session, whatever that is doing."""
        sessions, request_id = self._scheduler.sessions, message.request_id
        if not sessions.takes_input(client, request_id):
            logger.warning("front end %d: request %d takes no input", client, request_id)
            return
        try:
            validate_input(message, self._limits)
            outputs = sessions.take(message)
        except InvalidRequestError as error:
            outputs = [sessions.fail(request_id, _told(error))]
        except Exception:  # one bad input must not end the engine
            logger.exception("request %d could not take its input", request_id)
            outputs = [sessions.fail(request_id, INTERNAL_ERROR)]
        for output in outputs:
            self._output_dispatcher.add(client, output)

    def _refuse(self, client: int, message: EngineCoreRequest, error: ErrorInfo) -> None:
        """For a request that was never taken in."""
        self._output_dispatcher.add(client, _final(message.request_id, error))

    def _call(self, message: AdminCall) -> AdminReply:
        ok, detail, value = True, "", 0
        match message.name:
            case "check_integrity":
                detail = "\n".join(self._check_integrity())
                ok = not detail
            case "reset_prefix_cache":
                ok = self._scheduler.reset_prefix_cache(preempting=message.reset_running_requests)
                detail = "" if ok else f"{self._scheduler.num_unfinished} requests are unfinished"
                if ok and message.reset_external and not self._scheduler.kv_transfer.reset_cache():
                    ok, detail = False, "copies of the KV connector are under way"
            case "pause":
                if message.ends_unfinished:
                    self._end_everyone()
                self._scheduler.pause(message.pause_mode)
            case "resume":
                self._scheduler.resume()
            case "get_pause":
                detail = self._scheduler.pause_mode or ""
                value = int(bool(detail))
            case "get_num_unfinished":
                value = self._scheduler.num_unfinished
        return AdminReply(message.epoch, message.call_id, ok, detail, value)


def _final(request_id: int, error: ErrorInfo) -> EngineCoreOutput:
    """One output that stands for all choices."""
    return EngineCoreOutput(request_id, 0, 0, [], FinishReason.ERROR, error=error)


def _full(error: QueueFullError) -> ErrorInfo:
    seconds = error.retry_after_seconds
    return ErrorInfo("queue_full", error.message, error.param, retry_after_seconds=seconds)


def _told(error: InvalidRequestError) -> ErrorInfo:
    return ErrorInfo("invalid_request", error.message, error.param)
