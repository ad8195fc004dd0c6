"""What bounds the scheduler's work: chunks, the queue's length, deadlines, prompt tokens of a step.

ChunkRule          how many of a request's missing tokens one step computes
QueueLimits        how many requests may wait that have not begun; refuses what is too much
Deadlines          until when a request must have begun, and must have finished
PrefillThrottle    how many prompt tokens join the sequences that decode in a step
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from engine_core.request import Request
from proto.config import SchedulerConfig, flag_name
from proto.engine_io import EngineCoreRequest
from proto.errors import ErrorInfo, QueueFullError


@dataclass(frozen=True)
class ChunkRule:
    """The token limits of a step.

    step_budget: tokens of a whole step.
    longest_chunk: most tokens of one request in a step.
    chunked: whether a prompt may be spread over several steps. Without it a prompt
        waits for a step with room for all of it; one that is longer than any step
        is spread all the same, because nothing else could ever compute it.
    """

    step_budget: int
    longest_chunk: int
    chunked: bool

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> "ChunkRule":
        budget = config.step_tokens
        threshold = config.long_prefill_token_threshold or budget
        return cls(budget, min(threshold, budget), config.enable_chunked_prefill)

    def first_chunk(self, num_missing: int, budget: int) -> int:
        """Tokens for a request that is about to be admitted; 0 when it has to wait."""
        if not self.chunked and budget < num_missing <= self.step_budget:
            return 0
        return min(num_missing, self.longest_chunk, budget)


# Queue limits count the choices that wait for their first step and the tokens of their prompts,
# and measure the rate at which they leave the queue. A choice that has begun is not counted again,
# not even when it is preempted or computed again after a crash.
#
#     a message ─▶ check ─▶ enter ─▶ admitted, or forgotten ─▶ (out)
#                    └▶ QueueFullError: all its choices, or none
#
# A message of a tenant with few waiting requests is accepted although the queue is full, so that
# one tenant cannot fill the queue for all others:
#
#     |<----------- limit ----------->|<- others up to their share ->|  some twice the limit


TURNS: Final = 4
"""By default as much may wait as runs at once in so many turns."""
FEWEST_REQUESTS: Final = 64
FEWEST_TOKENS: Final = 1 << 16
"""By default at least so much may wait: for small pools, since it costs next to nothing."""

FIRST_GUESS_SECONDS: Final = 5.0
"""Until somebody has left the queue, nobody knows how long it takes."""
LONGEST_RETRY_SECONDS: Final = 60.0
MEMORY_SECONDS: Final = 30.0
"""The rate is that of the last such times, in which somebody waited."""


@dataclass(frozen=True, slots=True)
class QueueCapacity:
    """Most choices that wait, and most tokens of their prompts; 0 for no limit."""

    num_requests: int = 0
    num_tokens: int = 0


def queue_capacity(
    config: SchedulerConfig, num_usable_blocks: int, block_size: int
) -> QueueCapacity:
    """The limits of a configuration, those that it leaves open derived from the pool."""
    num_requests, num_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    if num_requests is None:
        num_running = min(config.max_num_seqs, num_usable_blocks)
        num_requests = max(TURNS * num_running, FEWEST_REQUESTS)
    if num_tokens is None:
        num_tokens = max(TURNS * num_usable_blocks * block_size, FEWEST_TOKENS)
    return QueueCapacity(num_requests, num_tokens)


@dataclass(slots=True)
class Share:
    """What waits: of one tenant, or of all."""

    num_requests: int = 0
    num_tokens: int = 0

    def add(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class _Claim:
    """`more` on top of what is `waiting`, of which some is `mine`; a limit of 0 is none."""

    limit: int
    waiting: int
    mine: int
    more: int

    def is_granted(self, num_tenants: int) -> bool:
        """It fits, or others have filled the queue and this tenant has nothing or little in it."""
        if not self.limit or self.waiting + self.more <= self.limit:
            return True
        if self.mine == self.waiting or self.waiting >= 2 * self.limit:
            return False
        return not self.mine or self.mine + self.more <= self.limit // num_tenants


class QueueDrainRate:
    """At what rate requests leave the queue, as long as there are any in it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = math.inf  # somebody waits since then
        self._seconds = 0.0
        self._num_left = 0.0

    def begin(self) -> None:
        """The queue is empty no longer."""
        self._since = self._clock()

    def end(self) -> None:
        """The queue is empty."""
        self._seconds += self._clock() - self._since
        self._since = math.inf

    def note(self) -> None:
        """Somebody leaves the queue."""
        self._num_left += 1
        now = self._clock()
        self._seconds += now - self._since
        self._since = now
        if self._seconds > MEMORY_SECONDS:
            self._seconds /= 2
            self._num_left /= 2

    def seconds_for(self, number: int) -> int:
        """How long so many take to leave, within reason: 1 to `LONGEST_RETRY_SECONDS`."""
        seconds = self._seconds + max(0.0, self._clock() - self._since)
        if self._num_left:
            seconds *= number / self._num_left
        else:
            seconds = max(seconds, FIRST_GUESS_SECONDS)
        return math.ceil(min(max(seconds, 1.0), LONGEST_RETRY_SECONDS))


class QueueLimits:
    """Counts the requests that have not begun, and refuses messages that are too many.

    A listener: a choice is counted until it is admitted or has ended.
    """

    def __init__(self, limits: QueueCapacity, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._all = Share()
        self._shares: dict[int, Share] = {}  # by tenant; none is empty
        self._tokens: dict[int, int] = {}  # that each one counts for, by seq_id
        self._drain_rate = QueueDrainRate(clock)

    def __len__(self) -> int:
        """Choices that wait for their first step."""
        return len(self._tokens)

    @property
    def num_tokens(self) -> int:
        """In their prompts."""
        return self._all.num_tokens

    def check(self, message: EngineCoreRequest) -> None:
        """Raise QueueFullError if a message, with all its choices, is too much.

        A message that meets an empty queue never is, nor one that was accepted before.
        """
        if message.accepted or not self._tokens:
            return
        limits, both = self.limits, self._all
        own = self._shares.get(message.tenant, Share())
        reqs = _Claim(limits.num_requests, both.num_requests, own.num_requests, message.n)
        num_tokens = len(message.prompt_token_ids)
        tokens = _Claim(limits.num_tokens, both.num_tokens, own.num_tokens, num_tokens)
        num_tenants = len(self._shares.keys() | {message.tenant})
        for claim, unit, field in (
            (reqs, "requests", "max_num_queued_reqs"),
            (tokens, "prompt tokens", "max_num_queued_tokens"),
        ):
            if not claim.is_granted(num_tenants):
                error = QueueFullError(
                    f"the queue is full: {claim.waiting} {unit} wait, this would add "
                    f"{claim.more}, and {flag_name(field)} is {claim.limit}",
                    field,
                )
                error.retry_after_seconds = self.seconds_to_empty
                raise error

    def enter(self, request: Request) -> None:
        """A choice is in the queue. The prompt that choices share counts with the first."""
        if not self._tokens:
            self._drain_rate.begin()
        num_tokens = 0 if request.choice else request.num_prompt_tokens
        self._tokens[request.seq_id] = num_tokens
        self._all.add(1, num_tokens)
        self._shares.setdefault(request.tenant, Share()).add(1, num_tokens)

    @property
    def seconds_to_empty(self) -> int:
        """An estimate of when all that wait now will have left, for those who may come again."""
        return self._drain_rate.seconds_for(len(self))

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self._leave(request)

    def on_released(self, request: Request) -> None:
        self._leave(request)

    def _leave(self, request: Request) -> None:
        if request.seq_id not in self._tokens:
            return
        num_tokens = self._tokens.pop(request.seq_id)
        self._all.add(-1, -num_tokens)
        share = self._shares[request.tenant]
        share.add(-1, -num_tokens)
        if not share.num_requests:
            del self._shares[request.tenant]
        self._drain_rate.note()
        if not self._tokens:
            self._drain_rate.end()


# Deadlines are times of the machine's monotonic clock, which the front end computes from the
# arrival of the request, so they survive the death of any process. The caller ends what is overdue.


_SLACK: Final = 64
"""So many left-over moments are never worth a clean-up."""


@dataclass(slots=True)
class _Limited:
    """client_index: whose request it is. num_choices: that are not over.

    queue_deadline: infinite once any choice has begun.
    """

    client_index: int
    arrival: float
    queue_deadline: float
    deadline: float
    num_choices: int = 0


@dataclass(frozen=True, slots=True)
class Overdue:
    """A request whose time is over, all its choices with it."""

    request_id: int
    client_index: int
    error: ErrorInfo


class Deadlines:
    """Deadlines of requests, and which of them are overdue.

    A listener: a request that was admitted has no queue deadline any more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limited: dict[int, _Limited] = {}
        self._moments: list[tuple[float, int]] = []  # a heap; those of requests now over stay

    def enter(self, request: Request, message: EngineCoreRequest) -> None:
        """A choice of a message is in the queue. One that has tokens from before has begun."""
        queue_deadline = inf if any(message.output_token_ids) else message.queue_deadline
        if queue_deadline == message.deadline == inf:
            return
        limited = self._limited.get(request.request_id)
        if limited is None:
            limited = self._limited[request.request_id] = _Limited(
                request.client_index, message.arrival_time, queue_deadline, message.deadline
            )
            for moment in {queue_deadline, message.deadline} - {inf}:
                heappush(self._moments, (moment, request.request_id))
        limited.num_choices += 1

    @property
    def seconds_to_next_end(self) -> float | None:
        """Until it is worth looking for who is overdue; None for never."""
        return max(0.0, self._moments[0][0] - self._clock()) if self._moments else None

    def take_overdue(self) -> list[Overdue]:
        """Those whose time has come since the last call; the caller ends them."""
        overdue: list[Overdue] = []
        while self._moments and self._moments[0][0] <= (now := self._clock()):
            _, request_id = heappop(self._moments)
            limited = self._limited.get(request_id)
            if limited is not None and min(limited.deadline, limited.queue_deadline) <= now:
                del self._limited[request_id]
                error = _error(limited, now)
                overdue.append(Overdue(request_id, limited.client_index, error))
        return overdue

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        limited = self._limited.get(request.request_id)
        if limited is not None:
            limited.queue_deadline = inf

    def on_released(self, request: Request) -> None:
        limited = self._limited.get(request.request_id)
        if limited is None:
            return
        limited.num_choices -= 1
        if not limited.num_choices:
            del self._limited[request.request_id]
            self._clean_up()

    def _clean_up(self) -> None:
        """A request has two moments at most."""
        if len(self._moments) > 4 * len(self._limited) + _SLACK:
            self._moments = [each for each in self._moments if each[1] in self._limited]
            heapify(self._moments)


def _error(limited: _Limited, now: float) -> ErrorInfo:
    if limited.deadline <= now:
        seconds = limited.deadline - limited.arrival
        return ErrorInfo(
            "time_limit", f"the request was not over within {seconds:g} s", "timeout_ms"
        )
    seconds = limited.queue_deadline - limited.arrival
    return ErrorInfo(
        "queue_timeout",
        f"the request had not begun within {seconds:g} s, the longest that it was to wait",
        "queue_timeout_ms",
    )


# Sequences that decode wait for the whole step, so a prompt's chunk delays the next token of each.
# The throttle lets a step take a multiple of the time of a step that only decodes:
#
#   time of a step   |<---- decodes, learnt by their number ---->|<-- tokens * time of a token -->|
#                    |<------------------- at most stretch * decodes ---------------------------->|
#
# It does not limit steps that are short anyway, where small chunks would slow prompts down for no
# gain, nor prompts that pile up: those are computed within PATIENCE_STEPS. The workers report how
# long each step took.


SHORT_SECONDS: Final = 0.02
"""A step of this length is no gap that anybody notices."""
PATIENCE_STEPS: Final = 48
"""So many steps may what waits now take."""
MULTIPLE: Final = 16
"""Kernels take rows in groups of so many."""
WEIGHT: Final = 0.125
"""Of a new measurement in the mean."""
LONGEST_OUTLIER: Final = 2.0
"""What took more than this multiple of its mean, because others had the cores, counts as this."""


class PrefillThrottle:
    """Keeps steps with a part of a prompt below `stretch` times those without; 0 for no limit.

    step_budget: tokens of a step; a step has that many until both times are known.
    """

    def __init__(self, step_budget: int, stretch: float) -> None:
        self._step_budget = step_budget
        self._stretch = stretch
        self._decode_seconds: dict[int, float] = {}  # by number of sequences
        self._token_seconds = 0.0  # 0: not known

    def prompt_tokens(self, num_decoding: int, num_missing: int) -> int:
        """Prompt tokens of a step with so many decodes; num_missing: what all prompts lack."""
        if (
            not self._stretch
            or not num_decoding
            or not self._decode_seconds
            or not self._token_seconds
        ):
            return self._step_budget
        decode = self._decode(num_decoding)
        seconds = max(self._stretch * decode, SHORT_SECONDS) - decode
        paced = int(seconds / self._token_seconds) // MULTIPLE * MULTIPLE
        due = -(-num_missing // (PATIENCE_STEPS * MULTIPLE)) * MULTIPLE
        return min(max(paced, due, MULTIPLE), self._step_budget)

    def learn(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Take in how long a step of so many decodes and prompt tokens took."""
        if not self._stretch or not num_decoding or seconds <= 0.0:
            return
        if not num_prompt_tokens:
            known = self._decode_seconds.get(num_decoding, 0.0)
            self._decode_seconds[num_decoding] = _mean(known, seconds)
        elif num_prompt_tokens >= MULTIPLE and self._decode_seconds:
            token_seconds = (seconds - self._decode(num_decoding)) / num_prompt_tokens
            if token_seconds > 0.0:
                self._token_seconds = _mean(self._token_seconds, token_seconds)

    def _decode(self, num_decoding: int) -> float:
        """Seconds of a step in which so many decode: on the line between numbers that are known."""
        known = self._decode_seconds
        if num_decoding in known:
            return known[num_decoding]
        fewer = max((each for each in known if each < num_decoding), default=min(known))
        more = min((each for each in known if each > num_decoding), default=max(known))
        if fewer >= more:  # nothing is known on one side
            return known[fewer]
        part = (num_decoding - fewer) / (more - fewer)
        return known[fewer] + part * (known[more] - known[fewer])


def _mean(known: float, seconds: float) -> float:
    """The running mean with one more; known: 0 where it is the first."""
    if not known:
        return seconds
    return known + WEIGHT * (min(seconds, LONGEST_OUTLIER * known) - known)


def make_prefill_throttle(step_budget: int, stretch: float, *, chunked: bool) -> PrefillThrottle:
    """The throttle of a setting; it limits nothing where prompts are not cut into chunks."""
    return PrefillThrottle(step_budget, stretch if chunked else 0.0)
