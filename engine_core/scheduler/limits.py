"""Limits of the scheduler's work.

ChunkRule          how many tokens of a request one step computes
QueueLimits        how many requests may wait that have not begun; refuses further ones
Deadlines          when a request must have begun, and when it must have finished
PrefillThrottle    how many prompt tokens a step with decoding requests computes
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from engine_core.request import Request
from engine_core.scheduler.features.base import SchedulerFeature
from engine_core.scheduler.keyed_heap import KeyedHeap
from proto.errors import ErrorInfo, QueueFullError
from proto.messages.engine_io import EngineCoreRequest
from proto.settings.config import SchedulerConfig, flag_name


@dataclass(frozen=True)
class ChunkRule:
    """The token limits of a step.

    token_budget: maximum tokens of a step. longest_chunk: maximum tokens of one request in a step.
    chunked: whether a prompt may be computed in chunks. If not, a prompt waits for a step with room
        for all of it; a prompt that is longer than any step is still computed in chunks, because
        otherwise it never could be.
    """

    token_budget: int
    longest_chunk: int
    chunked: bool

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> "ChunkRule":
        budget = config.token_budget
        threshold = config.long_prefill_token_threshold or budget
        return cls(budget, min(threshold, budget), config.enable_chunked_prefill)

    def max_running(self, max_num_seqs: int, num_whole: int = 1) -> int:
        """Return how many requests may run: each needs a token of a step, and one `num_whole`."""
        return min(max_num_seqs, self.token_budget - num_whole + 1)

    def first_chunk(self, num_missing: int, budget: int) -> int:
        """Return the tokens for a request that is about to be admitted; 0 if it has to wait."""
        if not self.chunked and budget < num_missing <= self.token_budget:
            return 0
        return min(num_missing, self.longest_chunk, budget)


DEFAULT_QUEUED_PER_RUNNING: Final = 4
"""The default limits are this multiple of what can run at once."""
MIN_DEFAULT_REQUESTS: Final = 64
MIN_DEFAULT_TOKENS: Final = 1 << 16
"""The default limits of small pools are at least these."""

FIRST_RETRY_SECONDS: Final = 5.0
"""The minimum estimate until the first request has left the queue."""
MAX_RETRY_SECONDS: Final = 60.0
RATE_WINDOW_SECONDS: Final = 30.0
"""The rate covers the last seconds of this number in which requests waited."""


@dataclass(frozen=True, slots=True)
class QueueCapacity:
    """Maximum waiting choices, and maximum tokens of their prompts; 0: no limit."""

    num_requests: int = 0
    num_tokens: int = 0


def queue_capacity(
    config: SchedulerConfig, num_usable_blocks: int, block_size: int
) -> QueueCapacity:
    """Return the limits of a configuration; those that it does not set follow from the pool."""
    num_requests, num_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    if num_requests is None:
        num_running = min(config.max_num_seqs, num_usable_blocks)
        num_requests = max(DEFAULT_QUEUED_PER_RUNNING * num_running, MIN_DEFAULT_REQUESTS)
    if num_tokens is None:
        num_tokens = max(
            DEFAULT_QUEUED_PER_RUNNING * num_usable_blocks * block_size, MIN_DEFAULT_TOKENS
        )
    return QueueCapacity(num_requests, num_tokens)


@dataclass(slots=True)
class WaitingCounts:
    """Waiting requests of one tenant, or of all."""

    num_requests: int = 0
    num_tokens: int = 0

    def change_by(self, num_requests: int, num_tokens: int) -> None:
        """Add to the counts; negative numbers subtract."""
        self.num_requests += num_requests
        self.num_tokens += num_tokens


def _fits(limit: int, num_waiting: int, num_own: int, num_new: int, num_tenants: int) -> bool:
    """Return whether a message is within the limit of the queue, or the share of its tenant.

        |<----------- limit ----------->|<- others up to their share ->|  at most 2 · limit

    A tenant that has little in a full queue is accepted, so that one tenant cannot fill the queue
    for all others. Numbers of requests or of tokens; num_own: waiting ones of the tenant.
    """
    if not limit or num_waiting + num_new <= limit:
        return True
    if num_own == num_waiting or num_waiting >= 2 * limit:
        return False
    return not num_own or num_own + num_new <= limit // num_tenants


class QueueDrainRate:
    """The rate at which requests leave the queue, over the time in which any wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = math.inf  # start of the time that is not counted yet
        self._seconds = 0.0
        self._num_left = 0.0

    def on_first_waiting(self) -> None:
        self._since = self._clock()

    def on_empty(self) -> None:
        self._seconds += self._clock() - self._since
        self._since = math.inf

    def on_request_left(self) -> None:
        self._num_left += 1
        now = self._clock()
        self._seconds += now - self._since
        self._since = now
        if self._seconds > RATE_WINDOW_SECONDS:
            self._seconds /= 2
            self._num_left /= 2

    def seconds_for(self, number: int) -> int:
        """Return the seconds until `number` requests leave the queue, at most MAX_RETRY_SECONDS."""
        seconds = self._seconds + max(0.0, self._clock() - self._since)
        if self._num_left:
            seconds *= number / self._num_left
        else:
            seconds = max(seconds, FIRST_RETRY_SECONDS)
        return math.ceil(min(max(seconds, 1.0), MAX_RETRY_SECONDS))


class QueueLimits(SchedulerFeature):
    """Counts choices that wait for their first step, and refuses messages beyond the limits.

        message ─▶ check_message ─▶ count_request ─▶ admitted, or ended: not counted any more
                       └▶ QueueFullError: for all choices of the message

    A choice that has begun is not counted again, even after a preemption or a crash.
    shares_prompts: choices compute their prompt once; False: each of them computes it.
    """

    def __init__(
        self,
        limits: QueueCapacity,
        clock: Callable[[], float] = time.monotonic,
        *,
        shares_prompts: bool = True,
    ) -> None:
        self.limits = limits
        self._shares_prompts = shares_prompts
        self._all = WaitingCounts()
        self._by_tenant: dict[int, WaitingCounts] = {}  # by tenant; none is empty
        self._tokens: dict[int, int] = {}  # prompt tokens counted for each, by seq_id
        self._drain_rate = QueueDrainRate(clock)

    def __len__(self) -> int:
        """Number of choices that wait for their first step."""
        return len(self._tokens)

    @property
    def num_tokens(self) -> int:
        return self._all.num_tokens

    def check_message(self, message: EngineCoreRequest) -> None:
        """Raise QueueFullError if a message, with all its choices, exceeds a limit.

        Messages that find an empty queue, or were accepted by an earlier engine, are never refused.
        """
        if message.accepted or not self._tokens:
            return
        limits, total = self.limits, self._all
        own = self._by_tenant.get(message.tenant, WaitingCounts())
        num_prompts = 1 if self._shares_prompts else message.n
        num_tokens = num_prompts * len(message.prompt_token_ids)
        num_tenants = len(self._by_tenant.keys() | {message.tenant})
        reqs = (limits.num_requests, total.num_requests, own.num_requests, message.n)
        tokens = (limits.num_tokens, total.num_tokens, own.num_tokens, num_tokens)
        for numbers, unit, field in (
            (reqs, "request", "max_num_queued_reqs"),
            (tokens, "prompt token", "max_num_queued_tokens"),
        ):
            limit, num_waiting, num_own, num_new = numbers
            if not _fits(limit, num_waiting, num_own, num_new, num_tenants):
                waiting = f"{num_waiting} {unit}s wait" if num_waiting != 1 else f"1 {unit} waits"
                error = QueueFullError(
                    f"the queue is full: {waiting}, this would add {num_new}, "
                    f"and {flag_name(field)} is {limit}",
                    field,
                )
                error.retry_after_seconds = self.seconds_to_empty
                raise error

    def count_request(self, request: Request) -> None:
        """Count a choice in the queue; a prompt that choices share counts with the first one."""
        if not self._tokens:
            self._drain_rate.on_first_waiting()
        is_shared = self._shares_prompts and request.choice > 0
        num_tokens = 0 if is_shared else request.num_prompt_tokens
        self._tokens[request.seq_id] = num_tokens
        self._all.change_by(1, num_tokens)
        self._by_tenant.setdefault(request.tenant, WaitingCounts()).change_by(1, num_tokens)

    @property
    def seconds_to_empty(self) -> int:
        """Estimated seconds until all that wait now have left, for Retry-After."""
        return self._drain_rate.seconds_for(len(self))

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self._uncount(request)

    def on_released(self, request: Request) -> None:
        self._uncount(request)

    def _uncount(self, request: Request) -> None:
        if request.seq_id not in self._tokens:
            return
        num_tokens = self._tokens.pop(request.seq_id)
        self._all.change_by(-1, -num_tokens)
        counts = self._by_tenant[request.tenant]
        counts.change_by(-1, -num_tokens)
        if not counts.num_requests:
            del self._by_tenant[request.tenant]
        self._drain_rate.on_request_left()
        if not self._tokens:
            self._drain_rate.on_empty()


@dataclass(slots=True)
class _Limited:
    """A request with a deadline.

    num_choices: unfinished choices. queue_deadline: infinite once any choice has begun.
    """

    front_end_index: int
    arrival: float
    queue_deadline: float
    deadline: float
    num_choices: int = 0


@dataclass(frozen=True, slots=True)
class Overdue:
    """A request, with all its choices, whose deadline has passed."""

    request_id: int
    front_end_index: int
    error: ErrorInfo


class Deadlines(SchedulerFeature):
    """Deadlines of requests, in seconds of the machine's monotonic clock.

    The front end computes them from the arrival of the request, so they survive the restart of any
    process. An admitted request has no queue deadline any more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limited: dict[int, _Limited] = {}
        self._next: KeyedHeap[int] = KeyedHeap()  # request ids by their next deadline

    def track_request(self, request: Request, message: EngineCoreRequest) -> None:
        """Watch the deadlines of a choice in the queue; with output tokens it has begun already."""
        queue_deadline = inf if any(message.output_token_ids) else message.queue_deadline
        if queue_deadline == message.deadline == inf:
            return
        limited = self._limited.get(request.request_id)
        if limited is None:
            limited = self._limited[request.request_id] = _Limited(
                request.front_end_index, message.arrival_time, queue_deadline, message.deadline
            )
            next_deadline = min(queue_deadline, message.deadline)
            self._next.set_key(request.request_id, next_deadline, request.request_id)
        limited.num_choices += 1

    @property
    def seconds_to_next_end(self) -> float | None:
        """Seconds until `pop_overdue` may return a request; None for never."""
        first = self._next.first()
        return None if first is None else max(0.0, first[0] - self._clock())

    def pop_overdue(self) -> list[Overdue]:
        """Return requests whose deadline has passed since the last call; the caller ends them."""
        overdue: list[Overdue] = []
        while (first := self._next.first()) is not None and first[0] <= (now := self._clock()):
            request_id = first[1]
            self._next.remove(request_id)
            limited = self._limited.pop(request_id)
            error = _error(limited, now)
            overdue.append(Overdue(request_id, limited.front_end_index, error))
        return overdue

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        limited = self._limited.get(request.request_id)
        if limited is not None and limited.queue_deadline != inf:
            limited.queue_deadline = inf
            if limited.deadline == inf:
                self._next.remove(request.request_id)
            else:
                self._next.set_key(request.request_id, limited.deadline, request.request_id)

    def on_released(self, request: Request) -> None:
        limited = self._limited.get(request.request_id)
        if limited is None:
            return
        limited.num_choices -= 1
        if not limited.num_choices:
            del self._limited[request.request_id]
            self._next.remove(request.request_id)


def _error(limited: _Limited, now: float) -> ErrorInfo:
    if limited.deadline <= now:
        seconds = limited.deadline - limited.arrival
        return ErrorInfo(
            "time_limit", f"the request did not finish within {seconds:g} s", "timeout_ms"
        )
    seconds = limited.queue_deadline - limited.arrival
    return ErrorInfo(
        "queue_timeout",
        f"the request was still queued after {seconds:g} s, its limit",
        "queue_timeout_ms",
    )


SHORT_SECONDS: Final = 0.02
"""A step of this length is no noticeable gap between tokens."""
MIN_PROMPT_TOKENS: Final = 48
"""Prompt tokens that a step always has room for: fewer would cost more per token."""
PACE: Final = 1.25
"""Prompt tokens of a step, as a multiple of what keeps up with the requests: above 1, so that no
queue builds up; below 2, so that most steps have some and take about equally long."""
MULTIPLE: Final = 16
"""Kernels take rows in groups of this size."""
WEIGHT: Final = 0.125
"""Weight of a new measurement in the running mean."""
MAX_OUTLIER: Final = 2.0
"""A measurement counts as at most this multiple of the mean, because cores may be shared."""


class PrefillThrottle(SchedulerFeature):
    """Limits how much prompt chunks may slow down a step with decoding requests.

        time of a step   |<---- decodes, by their number ---->|<-- tokens · seconds per token -->|
                         |<-------------------- at most max_slowdown · decodes ----------------->|

    Decoding requests wait for the whole step, so a chunk delays the next token of each. Some prompt
    tokens are always allowed: as many as a short step takes, because smaller chunks would slow
    prompts down for no gain; MIN_PROMPT_TOKENS; and as many as the requests need. If n requests are
    in progress and each has p prompt tokens without KV and decodes in d steps (its output tokens,
    less accepted drafts), a step has to compute n · p / d prompt tokens. With fewer, prompts would
    pile up, fewer requests would decode in each step, and all would take longer. So a burst or a
    load of long prompts is computed as fast as it comes, spread over the steps. p / d counts as at
    least 1: then n, which grows with the queue, lengthens the chunks even while p and d, learned
    from earlier requests with short prompts, are too small for the prompts that wait.

    p and d are learned when requests end. Times come from the workers' reports.
    token_budget: tokens of a step, also used until a request has ended. max_slowdown: 0 or None: no
    limit; nor is there one without chunks.
    """

    def __init__(
        self, token_budget: int, max_slowdown: float | None, *, chunked: bool = True
    ) -> None:
        self._token_budget = token_budget
        self._max_slowdown = (max_slowdown or 0.0) if chunked else 0.0
        self._decode_seconds: dict[int, float] = {}  # by number of rows
        self._token_seconds = 0.0  # 0: unknown
        self._num_prompt_tokens = 0.0  # of requests that have ended, the last ones most
        self._num_decode_steps = 0.0  # of the same requests; 0: none has ended

    def prompt_tokens(
        self, num_decoding: int, num_requests: int, encoder_seconds: float = 0.0
    ) -> int:
        """Return the prompt tokens of a step.

        num_requests: that run, or wait and could run. encoder_seconds: of images in this step, for
        which decoding requests wait, too.
        """
        if not self._max_slowdown or not num_decoding or not self._num_decode_steps:
            return self._token_budget
        per_step = max(1.0, self._num_prompt_tokens / self._num_decode_steps)
        num_needed = round(PACE * num_requests * per_step / MULTIPLE) * MULTIPLE
        num_tokens = max(
            MIN_PROMPT_TOKENS, self._num_fitting(num_decoding, encoder_seconds), num_needed
        )
        return min(num_tokens, self._token_budget)

    def spare_seconds(self, num_decoding: int) -> float:
        """Return how much longer a step may take than its decoding requests; infinite: no limit."""
        if not self._max_slowdown or not num_decoding:
            return inf
        decode = self._seconds_to_decode(num_decoding) if self._decode_seconds else 0.0
        return max(self._max_slowdown * decode, SHORT_SECONDS) - decode

    def on_released(self, request: Request) -> None:
        if request.num_output_tokens:
            num_prompt = request.num_prompt_tokens - request.num_cached_tokens
            self._num_prompt_tokens += num_prompt - WEIGHT * self._num_prompt_tokens
            num_steps = max(1, request.num_output_tokens - request.num_accepted_drafts)
            self._num_decode_steps += num_steps - WEIGHT * self._num_decode_steps

    def _num_fitting(self, num_decoding: int, encoder_seconds: float) -> int:
        """Return the prompt tokens with which a step is short enough; 0 while that is unknown."""
        if not self._decode_seconds or not self._token_seconds:
            return 0
        seconds = max(0.0, self.spare_seconds(num_decoding) - encoder_seconds)
        return int(seconds / self._token_seconds) // MULTIPLE * MULTIPLE

    def learn_step(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from the time of a step with decoding rows, drafts included, and prompt tokens."""
        if not self._max_slowdown or not num_decoding or seconds <= 0.0:
            return
        if not num_prompt_tokens:
            known = self._decode_seconds.get(num_decoding, 0.0)
            self._decode_seconds[num_decoding] = _mean(known, seconds)
        elif num_prompt_tokens >= MULTIPLE and self._decode_seconds:
            token_seconds = (seconds - self._seconds_to_decode(num_decoding)) / num_prompt_tokens
            if token_seconds > 0.0:
                self._token_seconds = _mean(self._token_seconds, token_seconds)

    def _seconds_to_decode(self, num_decoding: int) -> float:
        """Return the seconds of a step that only decodes, interpolated between known numbers."""
        known = self._decode_seconds
        if num_decoding in known:
            return known[num_decoding]
        fewer = max((number for number in known if number < num_decoding), default=min(known))
        more = min((number for number in known if number > num_decoding), default=max(known))
        if fewer >= more:  # nothing is known on one side
            return known[fewer]
        part = (num_decoding - fewer) / (more - fewer)
        return known[fewer] + part * (known[more] - known[fewer])


def _mean(known: float, seconds: float) -> float:
    """Return the running mean with one more measurement; known: 0 for the first."""
    if not known:
        return seconds
    return known + WEIGHT * (min(seconds, MAX_OUTLIER * known) - known)
