"""Requests that have not begun: how many there are, how many there may be.

Owns the count of choices that wait for their first step and of the tokens of their
prompts, and knows at what rate they have left of late. Whoever has begun is out of it
for ever, also when it is preempted or computed anew after a crash.

    a message ─▶ check ─▶ enter ─▶ admitted, or forgotten ─▶ (out)
                   └▶ QueueFullError: all its choices, or none

A tenant that has little in a full queue is taken in all the same, or the flood of another one
would shut it out:

    |<----------- limit ----------->|<- others up to their share ->|  some twice the limit
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.gates import Candidate, Wake
from engine_core.scheduler.step_plan import StepPlan
from proto.config import SchedulerConfig, flag_name
from proto.engine_io import EngineCoreRequest
from proto.errors import QueueFullError

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
class QueueLimits:
    """Most choices that wait, and most tokens of their prompts; 0 for no limit."""

    num_requests: int = 0
    num_tokens: int = 0


def queue_limits(config: SchedulerConfig, num_usable_blocks: int, block_size: int) -> QueueLimits:
    """The limits of a configuration, those that it leaves open derived from the pool."""
    num_requests, num_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    if num_requests is None:
        num_running = min(config.max_num_seqs, num_usable_blocks)
        num_requests = max(TURNS * num_running, FEWEST_REQUESTS)
    if num_tokens is None:
        num_tokens = max(TURNS * num_usable_blocks * block_size, FEWEST_TOKENS)
    return QueueLimits(num_requests, num_tokens)


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


class Pace:
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


class Backlog:
    """A gate that holds nobody, so that it hears who begins and who is over."""

    status: ClassVar[RequestStatus] = RequestStatus.WAITING

    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._all = Share()
        self._shares: dict[int, Share] = {}  # by tenant; none is empty
        self._tokens: dict[int, int] = {}  # that each one counts for, by handle
        self._pace = Pace(clock)

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
            self._pace.begin()
        num_tokens = 0 if request.choice else request.num_prompt_tokens
        self._tokens[request.handle] = num_tokens
        self._all.add(1, num_tokens)
        self._shares.setdefault(request.tenant, Share()).add(1, num_tokens)

    @property
    def seconds_to_empty(self) -> int:
        """An estimate of when all that wait now will have left, for those who may come again."""
        return self._pace.seconds_for(len(self))

    def attach(self, wake: Wake) -> None:
        """Nobody is held, so nobody is woken."""

    def begin(self, plan: StepPlan) -> None:
        """Nothing changes by a step."""

    def holds(self, candidate: Candidate) -> bool:
        return False

    def admitted(self, request: Request, num_new_tokens: int) -> None:
        self._leave(request)

    def forget(self, request: Request) -> None:
        self._leave(request)

    def _leave(self, request: Request) -> None:
        if request.handle not in self._tokens:
            return
        num_tokens = self._tokens.pop(request.handle)
        self._all.add(-1, -num_tokens)
        share = self._shares[request.tenant]
        share.add(-1, -num_tokens)
        if not share.num_requests:
            del self._shares[request.tenant]
        self._pace.note()
        if not self._tokens:
            self._pace.end()
