"""Running requests, to be asked which of them gives way first.

    tenant 7   served 900   ▸ ▸ ▸ ▸        the first of each tenant is known;
    tenant 3   served 340   ▸ ▸            among those the policy's rank decides

Owns who runs, by tenant, and `Request.place`, which grows along the running list. So a victim
costs a look at each tenant that runs, however many requests it has.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Any, Final, Protocol

from engine_core.kv_cache.manager import ComputedBlocks, KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.step_plan import StepPlan
from proto.config import PreemptionMode

_SLACK: Final = 64
"""So many left-over entries are never worth a clean-up."""

_place: Final = attrgetter("place")


class PreemptionQueue(Protocol):
    """The running requests of one tenant."""

    def add(self, request: Request) -> None:
        """Its place is behind those of all that are here."""
        ...

    def remove(self, request: Request) -> None:
        """Raises KeyError for one that is not here."""
        ...

    def first(self) -> Request:
        """Who gives way before all others; there must be one."""
        ...

    def __len__(self) -> int: ...


class LastAdmittedFirst:
    """The one that stands last in the running list gives way first."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        self._requests[request.handle] = request

    def remove(self, request: Request) -> None:
        del self._requests[request.handle]

    def first(self) -> Request:
        return next(reversed(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)


class LowestKeyFirst:
    """The one that would be admitted last gives way first, wherever it stands.

    reversed_order: a key that never changes; the lowest gives way first. A request that leaves
    stays in the heap as a left-over.
    """

    def __init__(self, reversed_order: Callable[[Request], Any]) -> None:
        self._key = reversed_order
        self._heap: list[tuple[Any, Request]] = []
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        self._requests[request.handle] = request
        heappush(self._heap, (self._key(request), request))

    def remove(self, request: Request) -> None:
        del self._requests[request.handle]
        if len(self._heap) > 2 * len(self._requests) + _SLACK:
            self._heap = [(self._key(each), each) for each in self._requests.values()]
            heapify(self._heap)

    def first(self) -> Request:
        heap = self._heap
        while heap[0][1].handle not in self._requests:
            heappop(heap)
        return heap[0][1]

    def __len__(self) -> int:
        return len(self._requests)


class PreemptionPolicy(Protocol):
    """What the policy says of preemption_order."""

    def make_preemption_queue(self) -> PreemptionQueue:
        """An empty one."""
        ...

    def served(self, tenant: int) -> float:
        """What this tenant was given."""
        ...

    def preemption_rank(self, request: Request) -> Any:
        """Of two that are the first of their tenants, the higher gives way."""
        ...


class PreemptionOrder:
    """Told who begins to run, who ends, and who is put behind the others."""

    def __init__(self, policy: PreemptionPolicy) -> None:
        self._policy = policy
        self._tenants: dict[int, PreemptionQueue] = {}
        self._last_place = 0

    def admit(self, request: Request) -> None:
        """It stands at the end of the running list."""
        self._last_place += 1
        request.place = self._last_place
        order = self._tenants.get(request.tenant)
        if order is None:
            order = self._tenants[request.tenant] = self._policy.make_preemption_queue()
        order.add(request)

    def leave(self, request: Request) -> None:
        """It does not run any more."""
        order = self._tenants[request.tenant]
        order.remove(request)
        if not len(order):
            del self._tenants[request.tenant]

    def move_to_end(self, requests: Iterable[Request]) -> None:
        """They were put to the end of the running list, in this order."""
        for request in requests:
            self.leave(request)
            self.admit(request)

    def first(self, served_above: float = -math.inf) -> Request | None:
        """Who gives way, of the tenants that were served more than this; None for nobody."""
        if len(self._tenants) == 1 and served_above == -math.inf:
            return next(iter(self._tenants.values())).first()
        served = self._policy.served
        candidates = [
            order.first()
            for tenant, order in self._tenants.items()
            if served(tenant) > served_above
        ]
        return max(candidates, key=self._policy.preemption_rank, default=None)


def index_of(running: Sequence[Request], request: Request) -> int:
    """Where it stands in the running list; it must be there."""
    index = bisect_left(running, request.place, key=_place)
    assert running[index] is request, f"{request!r} does not run"
    return index


# How full the pool may get: when to stop admitting, when to go on, when to preempt.
#
# Owns one bit, whether the doors are open. Two thresholds with a gap between them
# keep the scheduler from admitting and preempting the same request in turns.
#
#     in use   0 ───── resume ────── stop ────── preempt ── all
#                 open   |  as it was  |  closed    |  closed, and someone gives way


class Pressure(Protocol):
    """What the occupancy of the pool asks for."""

    def too_high(self) -> bool:
        """Whether a running request should give way.

        To be asked in every step, also where one runs, or none: the occupancy may fall below a
        threshold then, and be between the two again when somebody wants to come in.
        """
        ...

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        """Whether this request may come in, to compute so many tokens."""
        ...


class NoPressure:
    """Only the end of the pool counts."""

    def too_high(self) -> bool:
        return False

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        return True


class KVWatermarks:
    """Fractions of the usable blocks, 0 < resume_below <= stop_above <= preempt_above <= 1."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        resume_below: float,
        stop_above: float,
        preempt_above: float,
    ) -> None:
        self._kv_cache = kv_cache
        self._num_usable = kv_cache.num_usable_blocks
        self._resume_below = resume_below * self._num_usable
        self._stop_above = stop_above * self._num_usable
        self._preempt_above = preempt_above * self._num_usable
        self._open = True

    def too_high(self) -> bool:
        return self._in_use() > self._preempt_above

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        in_use = self._in_use()
        needed = self._kv_cache.num_blocks_needed(request, num_new_tokens, computed)
        return self._open and in_use + needed <= self._preempt_above

    def _in_use(self) -> int:
        """Blocks in use; moves the doors."""
        in_use = self._num_usable - self._kv_cache.num_free_blocks
        if in_use > self._stop_above:
            self._open = False
        elif in_use < self._resume_below:
            self._open = True
        return in_use


# Blocks of requests that do not run: sessions between two turns.
#
# Owns the order in which they lose them; a request that has lost its blocks is computed
# again when its turn comes, over what the prefix cache still holds.
#
#     at rest     no input has come: whoever lacks room takes the blocks, those of the one
#                 that has rested longest first
#     in line     the next turn has its input: it is about to run, so the blocks are taken
#                 only where nobody runs but who lacks them, lest nobody ever does; the last
#                 in line first


class NonRunningBlocks:
    """Requests, by handle, that hold blocks and are not in the running list."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._at_rest: dict[int, Request] = {}
        self._in_line: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._at_rest) + len(self._in_line)

    @property
    def any_at_rest(self) -> bool:
        """Whether `take_from_rest` would find any."""
        return bool(self._at_rest)

    def rest(self, request: Request) -> None:
        """A request has come to rest, with blocks if anything of it is computed."""
        if request.num_computed_tokens:
            self._at_rest[request.handle] = request

    def line_up(self, request: Request) -> None:
        """A request at rest has been given its input."""
        if self._at_rest.pop(request.handle, None) is not None:
            self._in_line[request.handle] = request

    def forget(self, request: Request) -> None:
        """A request runs, or is over."""
        self._at_rest.pop(request.handle, None)
        self._in_line.pop(request.handle, None)

    def take_from_rest(self) -> bool:
        """Free the blocks of one request at rest; False if none has any."""
        if not self._at_rest:
            return False
        self._take(next(iter(self._at_rest.values())))
        return True

    def take_from_line(self, spared: Request) -> bool:
        """Free the blocks of one request in line, but not of `spared`; False if none has any."""
        for request in reversed(self._in_line.values()):
            if request is not spared:
                self._take(request)
                return True
        return False

    def take_all(self) -> None:
        """Free the blocks of all of them."""
        for request in [*self._at_rest.values(), *self._in_line.values()]:
            self._take(request)

    def _take(self, request: Request) -> None:
        self.forget(request)
        self._kv_cache.free(request)
        request.num_computed_tokens = 0


# Taking the blocks of a running request away, to compute it again later.
#
# Owns the way back into the queue; who gives way say the `PreemptionOrder`. Nothing is copied
# out: tokens and counters stay in the Request, and what the prefix cache still
# holds when it comes back is not computed twice.


class Preemption:
    """Makes room: first with blocks that nobody uses now, then one running request at a time."""

    def __init__(
        self,
        preemption_order: PreemptionOrder,
        waiting: RequestQueue,
        running: list[Request],
        kv_cache: KVCacheManager,
        pressure: Pressure,
        non_running_blocks: NonRunningBlocks,
    ) -> None:
        self._preemption_order = preemption_order
        self._waiting = waiting
        self._running = running
        self._kv_cache = kv_cache
        self._pressure = pressure
        self._non_running_blocks = non_running_blocks

    def relieve(self, plan: StepPlan) -> None:
        """Before anyone is planned: make room while the pool is too full, but keep the last."""
        non_running_blocks = self._non_running_blocks
        while self._pressure.too_high() and (
            len(self._running) > 1 or non_running_blocks.any_at_rest
        ):
            self.preempt_one(plan, 0)

    def preempt_one(self, plan: StepPlan, num_visited: int) -> int:
        """Preempt one running request; returns the index at which it stood.

        Where blocks are idle their holder loses them, and all that run stay: then the
        index is that behind the last. The only one that runs gives way to nobody.

        num_visited: running requests that the plan may have served, from the first on.
        A victim that the plan has already served is taken out of it: its tokens go
        back to the budget, and blocks that only this step would have filled are no
        longer findable.
        """
        num_running = len(self._running)
        if self._non_running_blocks.take_from_rest():
            return num_running
        if num_running == 1 and self._non_running_blocks.take_from_line(self._running[0]):
            return num_running
        victim = self._preemption_order.first()
        assert victim is not None, "nobody runs"
        index = index_of(self._running, victim)
        del self._running[index]
        if index < num_visited and plan.withdraw(victim):
            self._kv_cache.withdraw(victim, victim.num_computed_tokens)
        self._send_back(victim, plan.now)
        plan.preempted.append(victim)
        return index

    def evict(self, victim: Request, plan: StepPlan) -> None:
        """Preempt this running request, which may be in the plan already."""
        del self._running[index_of(self._running, victim)]
        if plan.withdraw(victim):
            self._kv_cache.withdraw(victim, victim.num_computed_tokens)
        self._send_back(victim, plan.now)
        plan.preempted.append(victim)

    def preempt_running(self, plan: StepPlan) -> None:
        """Preempt everyone, the last one first."""
        for victim in self._running[::-1]:
            self.evict(victim, plan)

    def preempt_all(self, now: float) -> list[Request]:
        """Between two steps: nobody keeps a block. Returns those that ran, the last one first."""
        self._non_running_blocks.take_all()
        preemption_order = self._running[::-1]
        self._running.clear()
        for victim in preemption_order:
            self._send_back(victim, now)
        return preemption_order

    def _send_back(self, victim: Request, now: float) -> None:
        self._preemption_order.leave(victim)
        self._kv_cache.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.spec_token_ids.clear()
        victim.num_preemptions += 1
        victim.preempted_at.append(now)
        self._waiting.restore(victim)


# Starting over after the workers have lost everything.
#
# Owns nothing. What a worker holds follows from token ids, and those are all here: so
# every request stands in the queue again, in its order, and nothing of it is computed.


def start_over(
    requests: Iterable[Request], preemption: Preemption, kv_cache: KVCacheManager, now: float
) -> None:
    """Take all blocks back, forget their contents, and what was to come of steps in flight.

    requests: all that are not over. now: monotonic seconds.
    """
    preemption.preempt_all(now)
    for request in requests:
        request.num_output_placeholders = 0
        request.spec_token_ids.clear()
    kv_cache.take_block_copies()  # of steps that will not be computed
    forgotten = kv_cache.reset_prefix_cache()
    assert forgotten, "somebody who neither runs nor rests holds blocks"


# Whether who was preempted gets its KV back from where the connector has kept it.
#
# Blocks are kept as they become full, so a preemption moves nothing: the choice is made when the
# request is admitted again, with what is missing on the device by then.
#
#     recompute   num_tokens at the rate of prompts        seconds a token, from steps
#     swap        a load of num_tokens                      setup + seconds a token, from loads
#
# auto takes what is less (where the two cross is the break-even of swapping), by what steps and
# loads have taken so far. While either is not known it loads, and so learns. Knows no requests.
# The same means say what it costs that the KV of tokens is not on the device (`seconds`).


_WEIGHT: Final = 0.25
"""Of a new measurement in the mean."""
_MOST: Final = 4.0
"""A measurement counts as at most this multiple of the mean: others may have had the cores."""
_FEW_TOKENS: Final = 16
"""Steps with fewer of a prompt say little about the rate of prompts."""


class SwapRule(Protocol):
    """Decides for requests that were preempted; is told what loads and steps have taken."""

    def loads(self, num_tokens: int) -> bool:
        """Whether so many tokens are to be loaded, and not computed."""
        ...

    def seconds(self, num_tokens: int) -> float:
        """How long it takes until the KV of so many tokens is back; 0 while that is not known."""
        ...

    def learn_load(self, num_tokens: int, seconds: float) -> None:
        """A load of so many tokens took this long, its time in a queue included."""
        ...

    def learn_step(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts took this long."""
        ...


class ByRates:
    """Takes what is faster by the means of what was measured."""

    def __init__(self) -> None:
        self._setup = 0.0  # the least that any load has taken; 0: none yet
        self._load_seconds = 0.0
        self._compute_seconds = 0.0  # of a token; 0: not known

    def loads(self, num_tokens: int) -> bool:
        if not self._setup or not self._compute_seconds:
            return True
        return self._seconds_to_load(num_tokens) < num_tokens * self._compute_seconds

    def seconds(self, num_tokens: int) -> float:
        computed = num_tokens * self._compute_seconds
        if not self._setup:
            return computed
        loaded = self._seconds_to_load(num_tokens)
        return min(computed, loaded) if computed else loaded

    def learn_load(self, num_tokens: int, seconds: float) -> None:
        if num_tokens <= 0 or seconds <= 0.0:
            return
        self._setup = min(self._setup, seconds) if self._setup else seconds
        self._load_seconds = _mean(self._load_seconds, (seconds - self._setup) / num_tokens)

    def learn_step(self, num_prompt_tokens: int, seconds: float) -> None:
        if num_prompt_tokens >= _FEW_TOKENS and seconds > 0.0:
            self._compute_seconds = _mean(self._compute_seconds, seconds / num_prompt_tokens)

    def _seconds_to_load(self, num_tokens: int) -> float:
        return self._setup + num_tokens * self._load_seconds


class Always(ByRates):
    """The setting has decided for those that were preempted."""

    def __init__(self, loads: bool) -> None:
        super().__init__()
        self._loads = loads

    def loads(self, num_tokens: int) -> bool:
        return self._loads


def make_swap_rule(mode: PreemptionMode) -> SwapRule:
    """The rule of --preemption."""
    return ByRates() if mode == "auto" else Always(mode == "swap")


def _mean(known: float, measured: float) -> float:
    if not known:
        return measured
    return known + _WEIGHT * (min(measured, _MOST * known) - known)
