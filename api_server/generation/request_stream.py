"""Engine outputs of one request → text → deltas.

    EngineClient ─ output ─▶ RequestStream ─▶ Choice ─▶ detokenizer, stop strings ─▶ Delta
                               │                                                    │
                               └─ notify ─▶ StreamNotifier ─▶ GenerationResponse ◀──┘

An HTTP request has a `RequestStream` for each of its prompts, with n choices each; a `TokenStream`
(`stream.py`) holds them together. Start reading at `RequestStream.process_output`.
Everything here runs on the event loop.
"""

import asyncio
import math
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from api_server.errors import SlowReaderError
from api_server.metrics.engine_metrics import EngineMetrics
from api_server.metrics.metrics import Metrics
from api_server.parsers.called_tool import AgentTurn, TextTail
from api_server.parsers.output import ContentStops
from api_server.parsers.reasoning import TokenCounter
from api_server.text.detokenizer import Detokenizer
from api_server.text.logprobs import ENTRY_BYTES, LogprobRow, TextToken, unpack_logprobs
from api_server.text.stop_strings import StopStrings
from proto.codec import from_json
from proto.errors import (
    InternalRequestError,
    InvalidRequestError,
    RequestCancelledError,
    RequestError,
)
from proto.messages.engine_io import (
    EngineCoreEvent,
    EngineCoreOutput,
    EventType,
    FinishReason,
    RoutedExperts,
)

DeltaWriter = Callable[[], bool]
"""Function that writes the pending deltas to the connection; returns False, having done nothing, if
the connection is blocked."""


class StreamNotifier:
    """Notifies the response of an HTTP request of new output.

    Resuming the response's task resumes every coroutine between uvicorn and the response. For most
    tokens a plain function, the DeltaWriter, writes the chunk instead, and the task stays
    suspended. All notifications of one iteration of the event loop are handled together.

        notify ─▶ (end of this iteration) ─▶ write() ── True ──▶ the task stays suspended
                                                    └── False ─▶ the task is resumed
    """

    __slots__ = ("_pending", "_scheduled", "_waiter", "_write")

    def __init__(self) -> None:
        self._pending = self._scheduled = False
        self._waiter: asyncio.Future[None] | None = None
        self._write: DeltaWriter | None = None

    def notify(self) -> None:
        self._pending = True
        waiter = self._waiter
        if waiter is not None and not self._scheduled:
            self._scheduled = True
            waiter.get_loop().call_soon(self._write_or_resume)

    async def wait(self, write: DeltaWriter | None = None) -> None:
        """Return when there is new output that `write` could not write.

        Returns immediately if there was a notification since the last call.
        """
        if not self._pending:
            self._write = write
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._pending = False

    def _write_or_resume(self) -> None:
        self._scheduled = False
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._write is not None and self._write():
            self._pending = False
        else:
            waiter.set_result(None)


MAX_UNSENT_BYTES: Final = 1 << 20
"""Most bytes of text and log-probabilities that may wait for a blocked connection."""


class SendBuffer:
    """Bytes of output of one HTTP request that are not passed to the connection yet.

    limit: most bytes; infinite for a response that is not streamed. is_blocked: the connection
    accepts no more bytes for now; the limit applies only then, because otherwise the waiting bytes
    are about to be sent. `http_protocol` closes connections that accept nothing for long.
    max_response_bytes: of the whole response, sent or not. names_size: returns how many bytes the
    names of tokens have in log-probabilities.
    """

    __slots__ = (
        *("_has_logprobs", "_limit", "_max_response_bytes", "_names_size", "_response_bytes"),
        *("is_blocked", "num_bytes"),
    )

    def __init__(
        self,
        limit: float = math.inf,
        max_response_bytes: float = math.inf,
        names_size: Callable[[Sequence[int]], int] = lambda ids: 0,
    ) -> None:
        self._limit = limit
        self._max_response_bytes = max_response_bytes
        self._names_size = names_size
        self._response_bytes = 0
        self._has_logprobs = False
        self.is_blocked = False
        self.num_bytes = 0

    def add_text(self, text: str) -> None:
        size = len(text.encode())
        self.num_bytes += size
        self._response_bytes += size

    def add_logprobs(self, token_ids: Sequence[int]) -> None:
        """Add log-probabilities of these tokens."""
        size = ENTRY_BYTES * len(token_ids)
        self.num_bytes += size
        self._response_bytes += size + self._names_size(token_ids)
        self._has_logprobs = True

    def clear(self) -> None:
        """Set the count to 0: all output was passed to the connection."""
        self.num_bytes = 0

    def check(self) -> None:
        """Raise SlowReaderError if the connection is blocked and the limit exceeded.

        Raises InvalidRequestError if the response has become too long.
        """
        if self.is_blocked and self.num_bytes > self._limit:
            raise SlowReaderError(
                f"the stream was ended: the client had not read {self.num_bytes} bytes of it"
            )
        if self._response_bytes > self._max_response_bytes:
            field = "logprobs" if self._has_logprobs else "max_tokens"
            raise InvalidRequestError(
                "the response has more bytes than --max-response-bytes, which is "
                f"{self._max_response_bytes}: fewer tokens, or fewer log-probabilities, fit",
                field,
            )


REPETITION_DETECTED: Final = "repetition_detected"
"""stop_reason of a choice that ended because its text repeated."""


@dataclass(slots=True)
class Delta:
    """New output of a choice since its last delta.

    index: of the choice in the response.
    tokens: text offset and log-probabilities of each new token, if requested.
    num_tokens: output tokens of the choice so far, including the new ones.
    finish_reason: set only in the last delta of a choice.
    num_certain: how much of the content so far the client may get (`ContentStops`); None without
        `ContentStops`: then `text` is certain.
    """

    index: int
    text: str
    token_ids: list[int]
    tokens: list[TextToken]
    num_tokens: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_certain: int | None = None


@dataclass(slots=True)
class ExpertRows:
    """The experts of a choice's tokens, from the first of the prompt on; see RoutedExperts.

    After a preemption or a restart tokens are computed again, and their experts replaced.
    """

    num_layers: int = 0
    top_k: int = 0
    num_bytes: int = 1
    data: bytearray = field(default_factory=bytearray)

    def store(self, part: RoutedExperts) -> None:
        """Raises InternalRequestError if experts of tokens before were lost."""
        self.num_layers, self.top_k, self.num_bytes = part.num_layers, part.top_k, part.num_bytes
        start = part.first_position * self._row_bytes
        if start > len(self.data):
            raise InternalRequestError("routed experts were lost")
        self.data[start : start + len(part.data)] = part.data

    def encode(self, num_tokens: int) -> dict[str, Any]:
        """Return the experts of the first tokens, at most `num_tokens`, as the client gets them."""
        data = self.data[: num_tokens * self._row_bytes]
        return {
            "dtype": f"uint{8 * self.num_bytes}",
            "shape": [len(data) // max(1, self._row_bytes), self.num_layers, self.top_k],
            "data": b64encode(data).decode(),
        }

    @property
    def _row_bytes(self) -> int:
        return self.num_layers * self.top_k * self.num_bytes


@dataclass(slots=True)
class Choice:
    """The tokens and the text of one choice, and how it ended.

    index: of the choice in the response, counted over all prompts of the HTTP request.
    min_tokens: stop strings within this number of tokens do not end the choice.
    includes_stop: the text of a stop token is part of the choice.
    interval: new tokens per delta, after the first delta.
    counts_tokens: tokens without text make a delta, too.
    send_buffer: of the HTTP request.
    text_tail: collects the text of an agent's answer; None for other requests.
    experts: of its tokens, if the request returns them.
    """

    index: int
    detokenizer: Detokenizer
    stop_strings: StopStrings | ContentStops | None = None
    min_tokens: int = 0
    includes_stop: bool = False
    interval: int = 1
    counts_tokens: bool = False
    send_buffer: SendBuffer = field(default_factory=SendBuffer)
    text_tail: TextTail | None = None
    token_ids: list[int] = field(default_factory=list)
    experts: ExpertRows = field(default_factory=ExpertRows)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _draft_flags: bytearray = field(default_factory=bytearray)  # 1 or 0, to the last 1
    _num_decoded_characters: int = 0
    _num_sent: int = 0
    _new_texts: list[str] = field(default_factory=list)
    _new_tokens: list[TextToken] = field(default_factory=list)
    _end_reported: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_delta(self) -> bool:
        """There is new output to send: enough tokens for the interval, or very much."""
        if self.finished and not self._end_reported:
            return True
        num_new = len(self.token_ids) - self._num_sent
        is_little = num_new < self.interval and self.send_buffer.num_bytes <= MAX_UNSENT_BYTES
        if self._num_sent and is_little:
            return False
        return bool(self._new_texts or self._new_tokens) or (self.counts_tokens and num_new > 0)

    def extend(
        self,
        token_ids: list[int],
        rows: list[LogprobRow],
        finish_reason: FinishReason | None,
        stop_reason: int | None,
        num_accepted: int = 0,
    ) -> int:
        """Append new tokens; return how many belong to the choice: fewer if a stop string ended it.

        rows: log-probabilities, one row per token, or empty. num_accepted: the first of the tokens
        that were accepted drafts.
        """
        if num_accepted > 0:
            self._draft_flags.extend(bytes(len(self.token_ids) - len(self._draft_flags)))
            self._draft_flags.extend(b"\1" * num_accepted)
        stopped = finish_reason is FinishReason.STOP and not self.includes_stop
        num_with_text = len(token_ids) - 1 if stopped else len(token_ids)
        for position, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if rows:
                offset = self._num_decoded_characters
                self._new_tokens.append(TextToken(token_id, offset, rows[position]))
                self.send_buffer.add_logprobs(rows[position].token_ids)
            if position >= num_with_text:
                break  # a stop token ends the choice and has no text
            if self._add_text(self.detokenizer.decode_token(token_id)):
                return position + 1
        if finish_reason is not None:
            self._end(finish_reason, stop_reason)
        return len(token_ids)

    def accepted_drafts(self, start: int, end: int) -> list[bool]:
        """Return for each of the tokens [start, end) whether it was an accepted draft."""
        return [flag == 1 for flag in self._draft_flags[start:end].ljust(end - start, b"\0")]

    def pop_delta(self) -> Delta:
        """Return the output since the last call."""
        text = "".join(self._new_texts)
        tokens, self._new_tokens = self._new_tokens, []
        self._new_texts.clear()
        delta = Delta(
            self.index,
            text,
            self.token_ids[self._num_sent :],
            tokens,
            len(self.token_ids),
        )
        self._num_sent = len(self.token_ids)
        if isinstance(self.stop_strings, ContentStops):
            delta.num_certain = self.stop_strings.num_certain
        if self.finished and not self._end_reported:
            self._end_reported = True
            delta.finish_reason = str(self.finish_reason)
            delta.stop_reason = self.stop_reason
        return delta

    def _add_text(self, text: str) -> bool:
        """Append text; return True if it completes a stop string, which ends the choice."""
        if not text:
            return False
        self._num_decoded_characters += len(text)
        if self.stop_strings is None:
            self._show(text)
            return False
        min_tokens_reached = len(self.token_ids) > self.min_tokens
        shown, stop = self.stop_strings.filter_text(text, min_tokens_reached=min_tokens_reached)
        if shown:
            self._show(shown)
        return self._ends_with(stop)

    def _ends_with(self, stop: str | None) -> bool:
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return stop is not None

    def _end(self, finish_reason: FinishReason, stop_reason: int | None) -> None:
        if self._add_text(self.detokenizer.flush_text()):
            return
        if isinstance(self.stop_strings, ContentStops):
            stop = self.stop_strings.end_text(
                is_cut=finish_reason is not FinishReason.STOP,
                min_tokens_reached=len(self.token_ids) > self.min_tokens,
            )
            if self._ends_with(stop):
                return
        elif self.stop_strings is not None and (rest := self.stop_strings.pop_buffer()):
            self._show(rest)
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if finish_reason is FinishReason.REPETITION:
            self.stop_reason = REPETITION_DETECTED

    def _show(self, text: str) -> None:
        self._new_texts.append(text)
        if self.text_tail is not None:
            self.text_tail.append_text(text)
        self.send_buffer.add_text(text)


@dataclass(slots=True)
class Timeline:
    """Times of a request's events, in monotonic seconds; None if not happened yet.

    events: those of the scheduler by choice, of all engines that computed the request. The first
    QUEUED and SCHEDULED of any choice are those of the request.
    """

    arrival: float
    first_token: float | None = None
    events: list[tuple[int, EngineCoreEvent]] = field(default_factory=list)

    @property
    def queued(self) -> float | None:
        return self._first(EventType.QUEUED)

    @property
    def scheduled(self) -> float | None:
        return self._first(EventType.SCHEDULED)

    def preemptions(self, now: float) -> list[list[float]]:
        """Return the seconds of each preemption, for each choice that was scheduled.

        A preemption ends when the choice is scheduled again; one that lasts, ends `now`.
        """
        found: dict[int, list[float]] = {}
        since: dict[int, float] = {}
        for choice, event in self.events:
            if event.type is EventType.PREEMPTED:
                since[choice] = event.timestamp
            elif event.type is EventType.SCHEDULED:
                seconds = found.setdefault(choice, [])
                if choice in since:
                    seconds.append(event.timestamp - since.pop(choice))
        for choice, start in since.items():
            found.setdefault(choice, []).append(now - start)
        return list(found.values())

    def _first(self, event_type: EventType) -> float | None:
        for _, event in self.events:
            if event.type is event_type:
                return event.timestamp
        return None


@dataclass(slots=True)
class RequestStream:
    """The output of one engine request: acceptance, choices, prompt log-probabilities, times.

    After an engine restart, outputs may arrive twice; the token index identifies repeated ones.

    request_id: the engine's id.
    prompt_token_ids: [num_prompt_tokens].
    prompt_rows: [num_prompt_tokens] when prompt log-probabilities were requested; the first
        row is None, as are those that have not arrived yet.
    may_expire_in_queue: the engine may still refuse it after acceptance, for waiting too long.
    send_buffer: of the HTTP request.
    turn: finds the tool call in an agent's turn; None for other requests.
    max_tokens: requested for each choice.
    reasoning_counters: one per choice of a model with reasoning.
    kv_transfer_params: what the KV connector reports to the client when a choice ends; of the
        choice that ended last.
    pooler_output: float32 little-endian, the result of a pooling request that has finished.
    engine: index of the engine that computes it, 0 before one does. engine_metrics: its metrics.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    choices: list[Choice]
    notifier: StreamNotifier
    metrics: Metrics
    timeline: Timeline
    prompt_rows: list[LogprobRow | None] = field(default_factory=list)
    may_expire_in_queue: bool = False
    send_buffer: SendBuffer = field(default_factory=SendBuffer)
    turn: AgentTurn | None = None
    reasoning_counters: Sequence[TokenCounter] = ()
    accepted: bool = False
    num_cached_tokens: int = 0
    max_tokens: int = 0
    kv_transfer_params: dict[str, Any] = field(default_factory=dict)
    pooler_output: bytes = b""
    error: RequestError | None = None
    engine: int = field(init=False, default=0)
    engine_metrics: EngineMetrics = field(init=False)
    _last_token_times: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine_metrics = self.metrics.engines[0]

    @property
    def finished(self) -> bool:
        if self.error is None:
            for choice in self.choices:
                if choice.finish_reason is None:
                    return False
        return True

    @property
    def ended_well(self) -> bool:
        reasons = [choice.finish_reason for choice in self.choices]
        return self.error is None and not {None, FinishReason.ABORT}.intersection(reasons)

    @property
    def is_status_known(self) -> bool:
        """The request can no longer be refused, so the HTTP status is known."""
        has_begun = self.timeline.scheduled is not None or self.finished
        return self.accepted and (has_begun or not self.may_expire_in_queue)

    @property
    def num_choices(self) -> int:
        return len(self.choices)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def output_token_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(choice.token_ids) for choice in self.choices)

    @property
    def finished_choices(self) -> tuple[int, ...]:
        return tuple(number for number, choice in enumerate(self.choices) if choice.finished)

    @property
    def last_token_time(self) -> float | None:
        """Monotonic seconds at which the last token so far left the engine."""
        return max(self._last_token_times.values(), default=None)

    def record_finished(self, now: float) -> None:
        timeline, metrics = self.timeline, self.engine_metrics
        metrics.record_finished_request(now - timeline.arrival, len(self.choices), self.max_tokens)
        if timeline.scheduled is not None and timeline.first_token is not None:
            lengths = [len(choice.token_ids) for choice in self.choices]
            last = max(self._last_token_times.values())
            metrics.record_phases(timeline.scheduled, timeline.first_token, last, lengths)

    def note_engine(self, index: int) -> None:
        """Note which engine computes the request from now on."""
        self.engine = index
        self.engine_metrics = self.metrics.engines[index]

    def accept(self) -> None:
        if not self.accepted:
            self.accepted = True
            self.engine_metrics.record_prompt(len(self.prompt_token_ids))
            self.notifier.notify()

    def fail(self, error: RequestError) -> None:
        if not self.finished:
            self.error = error
            self.notifier.notify()

    def finish_early(self) -> None:
        """End every choice with its output so far; fail a request that was not accepted yet."""
        if not self.accepted:
            self.fail(RequestCancelledError())
            return
        for choice in self.choices:
            if not choice.finished and self.error is None:
                choice.extend([], [], FinishReason.ABORT, None)
                self._count_finished(choice)
        self.notifier.notify()

    def called_tool(self) -> str:
        return "" if self.turn is None else self.turn.called_tool()

    def process_output(self, output: EngineCoreOutput, timestamp: float) -> bool:
        """Take one output; True if a stop string ended a choice that the engine still computes.

        timestamp: monotonic seconds at which the tokens left the engine.
        Raises InternalRequestError when outputs were lost, SlowReaderError when the client does
        not read, InvalidRequestError when the response is too long.
        """
        if output.events:
            self._record_events(output)
        if output.error is not None:
            self.fail(output.error.to_exception())
            return False
        if output.finish_reason is FinishReason.ERROR:
            self.fail(InternalRequestError("the request was ended by the server"))
            return False
        choice = self.choices[output.choice]
        if choice.finished:
            self.engine_metrics.count_discarded_tokens("after_stop", len(output.new_token_ids))
            return False
        if output.kv_transfer_params:
            self.kv_transfer_params = from_json(output.kv_transfer_params, dict[str, Any])
        if output.pooler_output:
            self.pooler_output = output.pooler_output
        if output.prompt_logprobs is not None:
            self._store_prompt_rows(output)
        if output.routed_experts is not None:
            choice.experts.store(output.routed_experts)
        num_repeated = self._num_repeated(choice, output)
        rows = (
            unpack_logprobs(output.logprobs)[num_repeated:] if output.logprobs is not None else []
        )
        new = output.new_token_ids[num_repeated:] if num_repeated else output.new_token_ids
        if num_repeated:
            self.engine_metrics.count_discarded_tokens("repeated", num_repeated)
        num_accepted = output.num_accepted_drafts - num_repeated
        num_new = choice.extend(new, rows, output.finish_reason, output.stop_reason, num_accepted)
        if num_new:
            self._record_tokens(output.choice, num_new, timestamp)
        if choice.finished:
            self._count_finished(choice)
        if choice.has_delta:
            self.notifier.notify()
        self.send_buffer.check()
        return choice.finished and output.finish_reason is None

    def _count_finished(self, choice: Choice) -> None:
        reason, number = str(choice.finish_reason), len(choice.token_ids)
        self.engine_metrics.count_finished_choice(reason, number)

    def _num_repeated(self, choice: Choice, output: EngineCoreOutput) -> int:
        """Return the number of the output's tokens that were received before."""
        have = len(choice.token_ids)
        if output.token_index > have:
            raise InternalRequestError("outputs of the engine were lost")
        return min(have - output.token_index, len(output.new_token_ids))

    def _record_events(self, output: EngineCoreOutput) -> None:
        was_scheduled = self.timeline.scheduled is not None
        self.timeline.events += [(output.choice, event) for event in output.events]
        queued, scheduled = self.timeline.queued, self.timeline.scheduled
        if was_scheduled or scheduled is None:
            return
        first = next(each for each in output.events if each.type is EventType.SCHEDULED)
        self.num_cached_tokens = first.num_cached_tokens
        self.engine_metrics.record_first_step(
            scheduled - (scheduled if queued is None else queued),
            len(self.prompt_token_ids),
            first.num_cached_tokens,
            first.num_external_tokens,
        )

    def _record_tokens(self, choice: int, number: int, timestamp: float) -> None:
        last = self._last_token_times.get(choice)
        self._last_token_times[choice] = timestamp
        if last is None:
            self.engine_metrics.record_first_tokens(timestamp - self.timeline.arrival, number)
            if self.timeline.first_token is None:
                self.timeline.first_token = timestamp
        else:
            self.engine_metrics.record_next_tokens(timestamp - last, number)

    def _store_prompt_rows(self, output: EngineCoreOutput) -> None:
        arrays = output.prompt_logprobs
        assert arrays is not None
        for position, row in enumerate(unpack_logprobs(arrays), start=arrays.first_position):
            if 0 < position < len(self.prompt_rows):
                self.prompt_rows[position] = row


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a response. reasoning_tokens: None for a model without reasoning."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
