"""A request that has not finished, with what another engine needs to continue it.

`OutputStream` receives what the engine says of the request; `OpenRequest` counts the engine deaths
that the request may have caused.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from api_server.engine.router import RoutedRequest
from proto.codec import changed
from proto.errors import QueueTimeoutError, RequestError, TimeLimitError
from proto.messages.engine_io import EngineCoreOutput, EngineCoreRequest, RequestProgress

NO_ENGINE: Final = 0
"""Epoch of a request that no engine has."""


class OutputStream(Protocol):
    """Receiver of the outputs of one engine request: a `RequestStream` or a `Session`."""

    @property
    def request_id(self) -> int:
        """The engine's id."""

    @property
    def num_choices(self) -> int: ...

    @property
    def finished(self) -> bool:
        """No more output will come."""

    @property
    def error(self) -> Exception | None:
        """Why the request failed; None if it did not."""

    @property
    def ended_well(self) -> bool:
        """All choices finished without an error or an abort."""

    @property
    def output_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """The output tokens of each choice so far."""

    @property
    def finished_choices(self) -> tuple[int, ...]:
        """Indices of the choices that need no more tokens."""

    def note_engine(self, index: int) -> None:
        """Note the engine that computes the request from now on."""

    def accept(self) -> None:
        """Note that an engine has accepted the request."""

    def fail(self, error: RequestError) -> None:
        """End every choice that has not finished with an error."""

    def called_tool(self) -> str:
        """Return the engine's name of the tool that the answer calls, or ""."""

    def process_output(self, output: EngineCoreOutput, timestamp: float) -> bool:
        """Take one output; True if it ended a choice that the engine still computes.

        timestamp: monotonic seconds at which the tokens left the engine.
        Raises RequestError for an output that cannot follow those before it.
        """


@dataclass(slots=True)
class OpenRequest:
    """A request that has not finished.

    request: as it was submitted. sent_to: epoch of the engine that has it. accepted: by that engine
    or an earlier one. awaits_token: of several engines, the one that has it has sent none yet.
    alone: the engine reported that it runs nothing else beside this request.
    started: the engine reported that it computes the request; engines report it only for requests
    that have seen an engine die.
    crash_count: deaths of engines, since the last progress, that the request may have caused.
    routed: what decides where it is sent; None before that is needed.
    model: only engines with this number in `EngineConnection.model` may continue it.
    """

    request: EngineCoreRequest
    stream: OutputStream
    sent_to: int = NO_ENGINE
    alone: bool = False
    started: bool = False
    accepted: bool = False
    awaits_token: bool = False
    crash_count: int = 0
    routed: RoutedRequest | None = None
    model: int = 0
    _num_tokens: int = 0
    _num_tokens_at_crash: int = 0
    _num_computed_tokens: int = 0
    _num_tokens_under_way: int = 0

    def accept(self) -> None:
        self.accepted = True
        self.stream.accept()

    def check_deadlines(self, now: float) -> None:
        """Raise TimeLimitError or, for a request without a token, QueueTimeoutError.

        now: monotonic seconds.
        """
        request = self.request
        if request.deadline <= now:
            seconds = request.deadline - request.arrival_time
            raise TimeLimitError(f"the request did not finish within {seconds:g} s", "timeout_ms")
        if request.queue_deadline <= now and not self._num_tokens:
            seconds = request.queue_deadline - request.arrival_time
            raise QueueTimeoutError(
                f"the request did not start within {seconds:g} s, the longest it may wait",
                "queue_timeout_ms",
            )

    def record_progress(self, progress: RequestProgress) -> None:
        """Note what the engine is about to compute; the furthest choice counts."""
        self.started = True
        self._num_computed_tokens = max(self._num_computed_tokens, progress.num_computed_tokens)
        self._num_tokens_under_way = max(self._num_tokens_under_way, progress.num_tokens_under_way)

    def lose_engine(
        self, crashes_until_isolated: int | None, *, others_started: bool = False
    ) -> bool:
        """Note that the request's engine is gone, and count the crash if the request is suspect.

        crashes_until_isolated: None if the engine did not die. others_started: the engine had
        `started` some request. Returns whether the request crashed it alone.

        A request with `crashes_until_isolated` crashes is suspect only if it ran alone. One with
        fewer, but some, is suspect only if this engine had started it, or had started no request.
        Progress clears the blame: a new token, or all tokens that were being computed in the last
        crash.
        """
        num_tokens = sum(map(len, self.stream.output_token_ids))
        passed_crash = 0 < self._num_tokens_at_crash <= self._num_computed_tokens
        if num_tokens > self._num_tokens or passed_crash:
            self.crash_count, self.alone = 0, False
        only_waited = self.crash_count > 0 and others_started and not self.started
        crashed_alone = False
        if crashes_until_isolated is not None and self.sent_to != NO_ENGINE and not only_waited:
            crashed_alone = self.alone
            self.crash_count += crashed_alone or self.crash_count < crashes_until_isolated
            self._num_tokens_at_crash = self._num_tokens_under_way
        self._num_tokens = num_tokens
        self._num_computed_tokens = self._num_tokens_under_way = 0
        self.sent_to, self.alone, self.started = NO_ENGINE, False, False
        return crashed_alone

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
