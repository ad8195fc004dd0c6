"""What one engine request produces: acceptance, choices, prompt log-probabilities, times.

Owns all that the front end knows of a request after it was sent. Fed by the engine
client, read by the response; both run on the event loop. A repeated output is
recognised by its token index and counted once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from api_server.metrics import Metrics
from api_server.outputs.bell import Bell
from api_server.outputs.choice import Choice
from api_server.outputs.logprobs import LogprobRow, unpack
from api_server.outputs.thoughts import ThoughtCount
from api_server.outputs.turn import NO_TURN, Turn
from api_server.outputs.unsent import Unsent
from proto.codec import from_json
from proto.engine_io import EngineCoreOutput, FinishReason, FirstTokenInfo
from proto.errors import InternalRequestError, RequestCancelledError, RequestError


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
