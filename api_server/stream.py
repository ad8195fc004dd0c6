"""Everything that one HTTP request asked of the engine: one stream for each prompt.

Owns sending the requests, waiting for their acceptance, and their orderly end: what
is not finished when the client goes away or something fails is aborted, counted and
logged here, once.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from api_server.engine_client import EngineClient
from api_server.errors import SlowReaderError
from api_server.metrics.collector import Metrics
from api_server.parsers.called_tool import NO_TURN, Listener, Turn, unheard
from api_server.parsers.reasoning import ThoughtCount
from api_server.text.detokenizer import Detokenizer
from api_server.text.logprobs import LogprobRow, TextToken, unpack
from api_server.text.stop_strings import StopMatcher
from proto.codec import from_json
from proto.engine_io import EngineCoreOutput, EngineCoreRequest, FinishReason, FirstTokenInfo
from proto.errors import (
    InternalRequestError,
    QueueFullError,
    RequestAbortedError,
    RequestCancelledError,
    RequestError,
)
from proto.log_lines import FIELDS

# Wakes the one task that waits for news of an HTTP request, where it has to be woken at all.
#
#     ring ─▶ (end of this turn of the loop) ─▶ tell() ── True ──▶ all is told
#                                                   └──── False ─▶ the task wakes


Tell = Callable[[], bool]
"""Tells the client what there is; False, with nothing done, where only the task can."""


def tell_nothing() -> bool:
    """Leave it all to the task."""
    return False


class Bell:
    """Rung for each piece of news; those of one turn of the loop are told together."""

    __slots__ = ("_planned", "_rung", "_tell", "_waiter")

    def __init__(self) -> None:
        self._rung = self._planned = False
        self._waiter: asyncio.Future[None] | None = None
        self._tell: Tell = tell_nothing

    def ring(self) -> None:
        self._rung = True
        waiter = self._waiter
        if waiter is not None and not self._planned:
            self._planned = True
            waiter.get_loop().call_soon(self._answer)

    async def wait(self, tell: Tell = tell_nothing) -> None:
        """Return at once if it rang since the last call, or when it rings and `tell` is False."""
        if not self._rung:
            self._tell = tell
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._rung = False

    def _answer(self) -> None:
        self._planned = False
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._tell():
            self._rung = False
        else:
            waiter.set_result(None)


# What waits for a client that reads its stream more slowly than it is produced.


MAX_UNSENT_BYTES: Final = 1 << 20
"""Of text and log-probabilities that were produced and that the connection has not taken."""
ENTRY_BYTES: Final = 64
"""What one log-probability with its token counts for."""


class Unsent:
    """limit: bytes; infinite for an answer that is sent as a whole.

    is_blocked: the connection takes nothing more just now. Otherwise all that waits is about
    to be sent, however much a burst of the engine has brought.
    """

    __slots__ = ("_limit", "is_blocked", "num_bytes")

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self.is_blocked = False
        self.num_bytes = 0

    def add_text(self, text: str) -> None:
        self.num_bytes += len(text.encode())

    def add_entries(self, number: int) -> None:
        """Log-probabilities."""
        self.num_bytes += ENTRY_BYTES * number

    def clear(self) -> None:
        """All of it is on its way to the connection."""
        self.num_bytes = 0

    def check(self) -> None:
        """Raise SlowReaderError when too much waits."""
        if self.is_blocked and self.num_bytes > self._limit:
            raise SlowReaderError(
                f"the stream was ended: {self.num_bytes} bytes of it waited to be read"
            )


# One choice of a request: its tokens, its text, how it ended.


REPETITION_DETECTED: Final = "repetition_detected"
"""The stop_reason of a choice that repeats itself."""


@dataclass(slots=True)
class Delta:
    """What a choice gained since it was last looked at.

    index: place of the choice in the answer.
    tokens: where the text of each token begins, when log-probabilities were asked for.
    num_tokens: output tokens of the choice so far, these included.
    finish_reason: set in the last delta of a choice and in no other.
    """

    index: int
    text: str
    token_ids: list[int]
    tokens: list[TextToken]
    num_tokens: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Choice:
    """Text of one choice, growing.

    index: its place in the answer, over all prompts of the HTTP request.
    text_start: characters before the first output (the prompt, when it is echoed);
    offsets of tokens count from there.
    min_tokens: stop strings that are complete within so many tokens do not count.
    shows_stop: the text of a stop token is part of the choice's.
    interval: new tokens that make a piece of news, after the first one.
    counts_tokens: tokens are news also where they bring no text.
    unsent: of all choices of the HTTP request.
    heard: is given all text that is shown.
    """

    index: int
    detokenizer: Detokenizer
    stops: StopMatcher
    min_tokens: int = 0
    text_start: int = 0
    shows_stop: bool = False
    interval: int = 1
    counts_tokens: bool = False
    unsent: Unsent = field(default_factory=Unsent)
    heard: Listener = unheard
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _num_decoded_characters: int = 0
    _num_taken: int = 0
    _pieces: list[str] = field(default_factory=list)
    _new_tokens: list[TextToken] = field(default_factory=list)
    _end_reported: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_news(self) -> bool:
        """Whether a delta would show anything, and it is time for one."""
        if self.finished and not self._end_reported:
            return True
        num_new = len(self.token_ids) - self._num_taken
        if self._num_taken and num_new < self.interval:
            return False
        return bool(self._pieces or self._new_tokens) or (self.counts_tokens and num_new > 0)

    def extend(
        self,
        token_ids: list[int],
        rows: list[LogprobRow],
        finish_reason: FinishReason | None,
        stop_reason: int | None,
    ) -> int:
        """Take in new tokens; returns how many count, fewer when a stop string ended the choice.

        rows: one for each token, or none at all.
        """
        stopped = finish_reason is FinishReason.STOP and not self.shows_stop
        silent = len(token_ids) - 1 if stopped else len(token_ids)
        for position, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if rows:
                offset = self.text_start + self._num_decoded_characters
                self._new_tokens.append(TextToken(token_id, offset, rows[position]))
                self.unsent.add_entries(len(rows[position].token_ids))
            if position >= silent:
                break  # a stop token ends the choice and has no text
            if self._add_text(self.detokenizer.feed(token_id)):
                return position + 1
        if finish_reason is not None:
            self._end(finish_reason, stop_reason)
        return len(token_ids)

    def take(self) -> Delta:
        """Everything since the last call; merges what came in between."""
        text = "".join(self._pieces)
        tokens, self._new_tokens = self._new_tokens, []
        self._pieces.clear()
        delta = Delta(
            self.index,
            text,
            self.token_ids[self._num_taken :],
            tokens,
            len(self.token_ids),
        )
        self._num_taken = len(self.token_ids)
        if self.finished and not self._end_reported:
            self._end_reported = True
            delta.finish_reason = str(self.finish_reason)
            delta.stop_reason = self.stop_reason
        return delta

    def _add_text(self, piece: str) -> bool:
        """True when a stop string is complete."""
        if not piece:
            return False
        self._num_decoded_characters += len(piece)
        shown, stop = self.stops.feed(piece, armed=len(self.token_ids) > self.min_tokens)
        if shown:
            self._show(shown)
        if stop is None:
            return False
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return True

    def _end(self, finish_reason: FinishReason, stop_reason: int | None) -> None:
        if self._add_text(self.detokenizer.flush()):
            return
        rest = self.stops.flush()
        if rest:
            self._show(rest)
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if finish_reason is FinishReason.REPETITION:
            self.stop_reason = REPETITION_DETECTED

    def _show(self, text: str) -> None:
        self._pieces.append(text)
        self.heard(text)
        self.unsent.add_text(text)


# What one engine request produces: acceptance, choices, prompt log-probabilities, times.


@dataclass(slots=True)
class Timeline:
    """Monotonic seconds. None: did not happen (yet)."""

    arrival: float
    queued: float | None = None
    scheduled: float | None = None
    first_token: float | None = None


@dataclass(slots=True)
class RequestStream:
    """One engine request, as its front end sees it.

    request_id: the internal id.
    prompt_token_ids: [num_prompt_tokens].
    prompt_rows: [num_prompt_tokens] when prompt log-probabilities were asked for; the
        first is None, as are those that have not come yet.
    may_expire_in_queue: it may still be refused after it was accepted, for having waited.
    unsent: of all streams of the HTTP request.
    turn: what there is to know of it as a turn of a job.
    max_tokens: of a choice, that were asked for.
    thought_counts: one for each choice, where there may be thoughts.
    kv_transfer_params: what the KV connector has the client told at the end of the choice that
        ended last; empty for nothing.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    choices: list[Choice]
    bell: Bell
    metrics: Metrics
    timeline: Timeline
    prompt_rows: list[LogprobRow | None] = field(default_factory=list)
    may_expire_in_queue: bool = False
    unsent: Unsent = field(default_factory=Unsent)
    turn: Turn = NO_TURN
    thought_counts: Sequence[ThoughtCount] = ()
    accepted: bool = False
    num_cached_tokens: int = 0
    max_tokens: int = 0
    kv_transfer_params: dict[str, Any] = field(default_factory=dict)
    error: RequestError | None = None
    _last_token_times: dict[int, float] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Nothing more will come."""
        if self.error is None:
            for choice in self.choices:
                if choice.finish_reason is None:
                    return False
        return True

    @property
    def ended_well(self) -> bool:
        """All choices came to an end of their own."""
        reasons = [choice.finish_reason for choice in self.choices]
        return self.error is None and not {None, FinishReason.ABORT}.intersection(reasons)

    @property
    def status_is_known(self) -> bool:
        """It is accepted, and has begun where it could be refused until then."""
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
        """What each choice has so far."""
        return tuple(tuple(choice.token_ids) for choice in self.choices)

    @property
    def finished_choices(self) -> tuple[int, ...]:
        """Numbers of the choices that need no more tokens."""
        return tuple(number for number, choice in enumerate(self.choices) if choice.finished)

    def count_end(self) -> None:
        """All choices have ended by themselves."""
        timeline, metrics = self.timeline, self.metrics.requests
        metrics.asked(len(self.choices), self.max_tokens)
        if timeline.scheduled is not None and timeline.first_token is not None:
            lengths = [len(choice.token_ids) for choice in self.choices]
            last = max(self._last_token_times.values())
            metrics.ended(timeline.scheduled, timeline.first_token, last, lengths)

    def accept(self) -> None:
        """The engine took the request in."""
        if not self.accepted:
            self.accepted = True
            self.metrics.prompt_accepted(len(self.prompt_token_ids))
            self.bell.ring()

    def fail(self, error: RequestError) -> None:
        """End all choices that have not ended."""
        if not self.finished:
            self.error = error
            self.bell.ring()

    def cut(self) -> None:
        """End all choices that have not ended, as they are; before it is accepted it fails."""
        if not self.accepted:
            self.fail(RequestCancelledError())
            return
        for choice in self.choices:
            if not choice.finished and self.error is None:
                choice.extend([], [], FinishReason.ABORT, None)
                self.metrics.choice_ended(str(choice.finish_reason), len(choice.token_ids))
        self.bell.ring()

    def called_tool(self) -> str:
        """The engine's name of the tool that the answer calls; empty for none."""
        return self.turn.tool()

    def feed(self, output: EngineCoreOutput, timestamp: float) -> bool:
        """Take in one output; True when a stop string ended a choice that the engine goes on with.

        timestamp: monotonic seconds at which the tokens left the engine.
        Raises InternalRequestError when outputs were lost, SlowReaderError when too much waits
        to be read.
        """
        if output.error is not None:
            self.fail(output.error.to_exception())
            return False
        if output.finish_reason is FinishReason.ERROR:
            self.fail(InternalRequestError("the request was ended by the server"))
            return False
        choice = self.choices[output.choice]
        if choice.finished:
            self.metrics.discarded("after_stop", len(output.new_token_ids))
            return False
        if output.first is not None:
            self._note_first(output.first)
        if output.kv_transfer_params:
            self.kv_transfer_params = from_json(output.kv_transfer_params, dict[str, Any])
        if output.prompt_logprobs is not None:
            self._note_prompt_rows(output)
        num_known = self._num_known(choice, output)
        rows = unpack(output.logprobs)[num_known:] if output.logprobs is not None else []
        new = output.new_token_ids[num_known:] if num_known else output.new_token_ids
        if num_known:
            self.metrics.discarded("repeated", num_known)
        num_counted = choice.extend(new, rows, output.finish_reason, output.stop_reason)
        if num_counted:
            self._note_tokens(output.choice, num_counted, timestamp)
        if choice.finished:
            self.metrics.choice_ended(str(choice.finish_reason), len(choice.token_ids))
        if choice.has_news:
            self.bell.ring()
        self.unsent.check()
        return choice.finished and output.finish_reason is None

    def _num_known(self, choice: Choice, output: EngineCoreOutput) -> int:
        """How many of the output's tokens came before."""
        have = len(choice.token_ids)
        if output.token_index > have:
            raise InternalRequestError("outputs of the engine were lost")
        return min(have - output.token_index, len(output.new_token_ids))

    def _note_first(self, first: FirstTokenInfo) -> None:
        if self.timeline.queued is None:
            self.timeline.queued, self.timeline.scheduled = first.queued_at, first.scheduled_at
            self.num_cached_tokens = first.num_cached_tokens
            self.metrics.queue_time(first.scheduled_at - first.queued_at)
            self.metrics.requests.begun(
                len(self.prompt_token_ids), first.num_cached_tokens, first.num_external_tokens
            )

    def _note_tokens(self, choice: int, number: int, timestamp: float) -> None:
        last = self._last_token_times.get(choice)
        self._last_token_times[choice] = timestamp
        if last is None:
            self.metrics.first_token(timestamp - self.timeline.arrival, number)
            if self.timeline.first_token is None:
                self.timeline.first_token = timestamp
        else:
            self.metrics.next_tokens(timestamp - last, number)

    def _note_prompt_rows(self, output: EngineCoreOutput) -> None:
        arrays = output.prompt_logprobs
        assert arrays is not None
        for position, row in enumerate(unpack(arrays), start=arrays.first_position):
            if 0 < position < len(self.prompt_rows):
                self.prompt_rows[position] = row


# Requests under way by the id of their answers, for operators who end some of them.


class Abortable(Protocol):
    """What is under way. label: the answer's id. owner: name of the key it came with."""

    @property
    def label(self) -> str: ...

    @property
    def owner(self) -> str: ...

    def abort(self) -> None:
        """End it as one that an operator has ended."""
        ...


class OpenGenerations:
    """Of one front end."""

    def __init__(self) -> None:
        self._by_label: dict[str, list[Abortable]] = {}

    def enter(self, generation: Abortable) -> None:
        self._by_label.setdefault(generation.label, []).append(generation)

    def leave(self, generation: Abortable) -> None:
        """It is over; nothing for one that is not here."""
        namesakes = self._by_label.get(generation.label, [])
        if generation in namesakes:
            namesakes.remove(generation)
            if not namesakes:
                del self._by_label[generation.label]

    def abort(self, labels: Collection[str], owner: str | None) -> None:
        """End those with exactly these ids; owner: those of this key only, None for any."""
        for label in labels:
            for generation in list(self._by_label.get(label, ())):
                if owner is None or generation.owner == owner:
                    generation.abort()


logger = logging.getLogger("tokend.requests")


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer. reasoning_tokens: None where there can be no thoughts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None


@dataclass(slots=True, eq=False)
class Generation:
    """The streams of one HTTP request.

    label: the answer's id. owner: name of the key that it came with.
    under_way: where it is entered while it is.
    requests, streams: one each per prompt, in the same order.
    unsent: what waits to be taken.
    ignored: fields of the request that nobody defines, for the log.
    disconnected: the client is gone; nothing needs to be sent any more.
    """

    label: str
    client: EngineClient
    metrics: Metrics
    bell: Bell
    requests: Sequence[EngineCoreRequest]
    streams: Sequence[RequestStream]
    log: bool
    unsent: Unsent = field(default_factory=Unsent)
    ignored: str = ""
    owner: str = ""
    under_way: OpenGenerations = field(default_factory=OpenGenerations)
    disconnected: bool = field(default=False, init=False)
    _cause: str = field(default="", init=False)
    _closed: bool = field(default=False, init=False)

    async def start(self) -> None:
        """Return when a status can be sent for every prompt, or the client is gone.

        Raises the RequestError of the first prompt that was refused.
        """
        self.under_way.enter(self)
        for request, stream in zip(self.requests, self.streams, strict=True):
            try:
                self.client.submit(request, stream)
            except RequestError as error:
                stream.fail(error)  # counted and logged as what it is
                raise
        while not self.disconnected and not all(each.status_is_known for each in self.streams):
            self._raise_error()
            await self.bell.wait()
        self._raise_error()

    async def wait(self, tell: Tell = tell_nothing) -> None:
        """Return when there is something to take that `tell` leaves, or the end."""
        await self.bell.wait(tell)

    def take(self) -> list[Delta]:
        """What each choice gained since the last call; nothing for those without news."""
        self.unsent.clear()
        return [
            choice.take() for stream in self.streams for choice in stream.choices if choice.has_news
        ]

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
    def goes_on(self) -> bool:
        """Neither is it over nor has any of it failed, and somebody listens."""
        if self.disconnected:
            return False
        over = True
        for stream in self.streams:
            if stream.error is not None:
                return False
            over = over and stream.finished
        return not over

    def usage(self) -> Usage:
        return Usage(
            sum(len(stream.prompt_token_ids) for stream in self.streams),
            sum(stream.num_completion_tokens for stream in self.streams),
            sum(stream.num_cached_tokens for stream in self.streams),
            self._num_reasoning_tokens(),
        )

    def _num_reasoning_tokens(self) -> int | None:
        counts = [count for stream in self.streams for count in stream.thought_counts]
        return sum(count.num_tokens for count in counts) if counts else None

    def disconnect(self, cause: Literal["disconnect", "slow_reader"]) -> None:
        """The client is gone, or was cut off because it did not read: stop at once."""
        self.disconnected, self._cause = True, cause
        self.close()
        self.bell.ring()

    def abort(self) -> None:
        """An operator ends it: an error, not a finish reason, tells the client."""
        self.fail(RequestAbortedError())

    def fail(self, error: RequestError) -> None:
        """End all that has not ended."""
        for stream in self.streams:
            stream.fail(error)

    def cancel(self) -> None:
        """Whoever asked wants no more of it: what there is stands, as an answer cut short."""
        if not self.finished and all(stream.accepted for stream in self.streams):
            self.metrics.cut_short("cancel")
        for stream in self.streams:
            stream.cut()
            self.client.abandon(stream)

    def close(self) -> None:
        """Abort what still runs, count and log the request; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self.under_way.leave(self)
        now = time.monotonic()
        for stream in self.streams:
            self._close_stream(stream, now)
        if self.log:
            self._log(now)

    def _close_stream(self, stream: RequestStream, now: float) -> None:
        reason, cause = "abort", self._cause
        if stream.error is not None:
            reason, cause = "error", stream.error.cause
        running = [choice for choice in stream.choices if not choice.finished]
        self.client.abandon(stream)
        if running and cause:
            self.metrics.cut_short(cause)
        if isinstance(stream.error, QueueFullError):
            self.metrics.admission_rejected(str(stream.error.param))
        if stream.accepted:
            for choice in running:
                self.metrics.choice_ended(reason, len(choice.token_ids))
            if stream.error is None and not running:
                self.metrics.request_ended(now - stream.timeline.arrival)
                stream.count_end()

    def _log(self, now: float) -> None:
        usage = self.usage()
        first = self.streams[0].timeline
        fields: dict[str, str | int | float | None] = {
            "id": self.label,
            "prompts": len(self.streams),
            "choices": len(self.streams[0].choices),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "queue": _seconds(first.queued, first.scheduled),
            "ttft": _seconds(first.arrival, first.first_token),
            "total": _seconds(first.arrival, now),
            "finish": self._outcome(),
        }
        if self.ignored:
            fields["ignored_fields"] = self.ignored
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        logger.info("%s", text, extra={FIELDS: fields})

    def _outcome(self) -> str:
        if self.error is not None:
            return f"error {self.error.status}"
        reasons = {
            str(choice.finish_reason) if choice.finished else "abort"
            for stream in self.streams
            for choice in stream.choices
        }
        return ",".join(sorted(reasons))

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 6)


def _shown(value: str | float | None) -> str:
    """In a line for people; seconds are the only numbers that are not whole."""
    if value is None:
        return "-"
    return f"{value:.3f}s" if isinstance(value, float) else str(value)


# A sign of life for a stream that has nothing to say: proxies end what is silent for long.


COMMENT: Final = ": keep-alive\n\n"
"""Clients skip lines that begin with a colon (HTML standard, server-sent events)."""


class KeepAlive:
    """From the first byte of a stream to its end (`close`).

    seconds: of silence, after which a comment is due; 0 for never. wake: called at that moment,
    to have somebody `take` it. sign: what is written then.
    """

    def __init__(self, seconds: float, wake: Callable[[], None], sign: str = COMMENT) -> None:
        self._seconds = seconds
        self._wake = wake
        self._sign = sign
        self._loop = asyncio.get_running_loop()
        self._due = False
        self._spoke_at = self._loop.time()
        self._look_again = self._loop.call_later(seconds, self._look) if seconds else None

    def spoke(self) -> None:
        """Something was written just now."""
        self._due = False
        self._spoke_at = self._loop.time()

    def take(self) -> str:
        """The sign if it is due, nothing otherwise."""
        return self._sign if self._due else ""

    def close(self) -> None:
        if self._look_again is not None:
            self._look_again.cancel()

    def _look(self) -> None:
        """One timer for the whole stream: most of the time it finds that something was written."""
        left = self._spoke_at + self._seconds - self._loop.time()
        if left <= 0.0:
            self._due = True
            self._wake()
            left = self._seconds
        self._look_again = self._loop.call_later(left, self._look)
