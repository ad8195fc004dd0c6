"""Everything that one HTTP request asked of the engine: one stream for each prompt.

Owns sending the requests, waiting for their acceptance, and their orderly end: what
is not finished when the client goes away or something fails is aborted, counted and
logged here, once.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from api_server.engine_client import EngineClient
from api_server.metrics import Metrics
from api_server.outputs.bell import Bell, Tell, tell_nothing
from api_server.outputs.choice import Delta
from api_server.outputs.open_generations import OpenGenerations
from api_server.outputs.request_stream import RequestStream
from api_server.outputs.unsent import Unsent
from proto.engine_io import EngineCoreRequest
from proto.errors import QueueFullError, RequestAbortedError, RequestError
from proto.log_lines import FIELDS

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
