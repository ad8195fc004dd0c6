"""Requests under way, and what it takes to send them to another engine.

Owns, per request, how often the engine died over it. What its stream has is not lost with
an engine; the engine that follows is told all of it and goes on from there.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from proto.codec import changed
from proto.engine_io import EngineCoreOutput, EngineCoreRequest, RequestProgress
from proto.errors import QueueTimeoutError, RequestError, TimeLimitError

NOBODY: Final = 0
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
    begun: that engine has said that it computes it; it says so only of who saw another one die.
    crash_count: engines that died since it got further, as far as it may have been the reason.
    """

    request: EngineCoreRequest
    stream: OutputStream
    sent_to: int = NOBODY
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
        """Raise what an engine would answer when its time is over; now: monotonic seconds.

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

    def lose_engine(self, crashes_until_alone: int | None, *, others_begun: bool = False) -> None:
        """No engine has it any more. None: nobody died. others_begun: as `begun`, of any request.

        Who is a suspect by now is blamed only for what it did alone, and who saw an engine die
        before only if it was begun with, unless nothing was. Nobody is who has got
        further: a token, or all that was under way when the engine before died (where that
        is known: an engine says it only of those who have seen another one die).
        """
        num_tokens = sum(map(len, self.stream.output_token_ids))
        if num_tokens > self._num_tokens or 0 < self._died_at <= self._computed:
            self.crash_count = 0
        only_waited = self.crash_count > 0 and others_begun and not self.begun
        if crashes_until_alone is not None and self.sent_to != NOBODY and not only_waited:
            self.crash_count += self.alone or self.crash_count < crashes_until_alone
            self._died_at = self._under_way
        self._num_tokens = num_tokens
        self._computed = self._under_way = 0
        self.sent_to, self.alone, self.begun = NOBODY, False, False

    def message(self, epoch: int) -> EngineCoreRequest:
        """What the engine of an epoch is asked: to go on where the stream ends."""
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
