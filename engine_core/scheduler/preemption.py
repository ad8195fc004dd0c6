"""Preemption: which running request loses its KV cache blocks, and how it comes back.

    PreemptionOrder     the order in which running requests are preempted, tenant by tenant
    KVWatermarks        occupancies at which admission stops and preemption begins
    NonRunningBlocks    blocks of requests that do not run, which are taken before a running one's
    Preemption          takes the blocks and puts the request back into the queue
    start_over          the same for all requests, after the workers have died
    SwapRule            whether the KV of a preempted request is loaded or computed again

The first request of each tenant in preemption order is known, and the policy's rank decides among
those: a preemption costs a look at each tenant, however many requests it has.

    tenant 7   served 900   ▸ ▸ ▸ ▸
    tenant 3   served 340   ▸ ▸
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

from engine_core.kv_cache.manager import ComputedBlocks, KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.queues.base import PreemptionQueue, RequestQueue
from engine_core.scheduler.queues.fair import FairShares
from engine_core.scheduler.step_plan import StepPlan
from proto.config import PreemptionMode

_place: Final = attrgetter("place")


class PreemptionOrder:
    """Running requests by tenant, and `Request.place`, which grows along the running list."""

    def __init__(self, policy: FairShares) -> None:
        self._policy = policy
        self._tenants: dict[int, PreemptionQueue] = {}
        self._last_place = 0

    def admit(self, request: Request) -> None:
        """Add a request that was appended to the running list."""
        self._last_place += 1
        request.place = self._last_place
        order = self._tenants.get(request.tenant)
        if order is None:
            order = self._tenants[request.tenant] = self._policy.make_preemption_queue()
        order.add(request)

    def leave(self, request: Request) -> None:
        """Remove a request that does not run any more."""
        order = self._tenants[request.tenant]
        order.remove(request)
        if not len(order):
            del self._tenants[request.tenant]

    def move_to_end(self, requests: Iterable[Request]) -> None:
        """Follow requests that were moved to the end of the running list, in this order."""
        for request in requests:
            self.leave(request)
            self.admit(request)

    def first(self, served_above: float = -math.inf) -> Request | None:
        """The next request to preempt, of tenants served more than this; None if there is none."""
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
    """The index of a request in the running list; it must be there."""
    index = bisect_left(running, request.place, key=_place)
    assert running[index] is request, f"{request!r} does not run"
    return index


# KV watermarks: at which occupancy admission stops, when it goes on, when requests are preempted.
# The gap between two of them keeps one request from being admitted and preempted in turns.
#
#     in use   0 ───── resume ────── stop ────── preempt ── all
#                admit  |  as before  |  stopped   |  stopped, and requests are preempted


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
        """Whether a running request has to be preempted.

        To be asked in every step, even when few requests run: the occupancy may fall below a
        watermark between two steps and be above it again when the next request is admitted.
        """
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


# Blocks of requests that do not run: sessions between two turns, and requests whose KV was loaded
# and that were not admitted yet. A request that has lost its blocks is computed again when it runs,
# except for what the prefix cache still holds.
#
#     resting   waits for input: its blocks go to any request that lacks some, those of the
#               request that has rested longest first
#     queued    has its input, or its KV was loaded, and is about to run: its blocks are taken only
#               where nothing runs besides the request that lacks some, to guarantee progress;
#               the last one in the queue first


class NonRunningBlocks:
    """Requests, by seq_id, that hold blocks and are not in the running list."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._resting: dict[int, Request] = {}
        self._queued: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._resting) + len(self._queued)

    @property
    def any_resting(self) -> bool:
        """Whether `free_resting` would find any."""
        return bool(self._resting)

    def add_resting(self, request: Request) -> None:
        """Add a request that waits for input; it has blocks if anything of it is computed."""
        if request.num_computed_tokens:
            self._resting[request.seq_id] = request

    def move_to_queued(self, request: Request) -> None:
        """A resting request has been given its input."""
        if self._resting.pop(request.seq_id, None) is not None:
            self._queued[request.seq_id] = request

    def forget(self, request: Request) -> None:
        """A request runs or has ended."""
        self._resting.pop(request.seq_id, None)
        self._queued.pop(request.seq_id, None)

    def free_resting(self) -> bool:
        """Free the blocks of one resting request; False if none has any."""
        if not self._resting:
            return False
        self._free(next(iter(self._resting.values())))
        return True

    def free_queued(self, spared: Request) -> bool:
        """Free the blocks of one queued request, but not of `spared`; False if none has any."""
        for request in reversed(self._queued.values()):
            if request is not spared:
                self._free(request)
                return True
        return False

    def free_all(self) -> None:
        """Free the blocks of all of them."""
        for request in [*self._resting.values(), *self._queued.values()]:
            self._free(request)

    def _free(self, request: Request) -> None:
        self.forget(request)
        self._kv_cache.free(request)
        request.num_computed_tokens = 0


# Nothing is copied out: tokens and counters stay in the Request, and what the prefix cache still
# holds when the request runs again is not computed twice.


class Preemption:
    """Frees blocks: first of requests that do not run, then of one running request at a time."""

    def __init__(
        self,
        preemption_order: PreemptionOrder,
        waiting: RequestQueue,
        running: list[Request],
        kv_cache: KVCacheManager,
        watermarks: KVWatermarks | None,
        non_running_blocks: NonRunningBlocks,
    ) -> None:
        self._preemption_order = preemption_order
        self._waiting = waiting
        self._running = running
        self._kv_cache = kv_cache
        self._watermarks = watermarks
        self._non_running_blocks = non_running_blocks

    def preempt_above_watermark(self, plan: StepPlan) -> None:
        """Preempt while the pool is above its watermark; the last running request stays."""
        non_running_blocks = self._non_running_blocks
        watermarks = self._watermarks
        if watermarks is None:
            return
        while watermarks.too_high() and (len(self._running) > 1 or non_running_blocks.any_resting):
            self.preempt_one(plan, 0)

    def preempt_one(self, plan: StepPlan, num_visited: int) -> int:
        """Preempt one running request; returns the index at which it stood.

        Where a request that does not run holds blocks, it loses them and all running requests
        stay: then the index is that behind the last. The only running request is not preempted.

        num_visited: running requests that the plan may have served, from the first on.
        A victim that the plan has already served is taken out of it: its tokens go
        back to the budget, and blocks that only this step would have filled are no
        longer findable.
        """
        num_running = len(self._running)
        if self._non_running_blocks.free_resting():
            return num_running
        if num_running == 1 and self._non_running_blocks.free_queued(self._running[0]):
            return num_running
        victim = self._preemption_order.first()
        assert victim is not None, "nothing runs"
        index = index_of(self._running, victim)
        del self._running[index]
        if index < num_visited and plan.withdraw(victim):
            self._kv_cache.uncache_after(victim, victim.num_computed_tokens)
        self._requeue(victim, plan.now)
        plan.preempted.append(victim)
        return index

    def preempt(self, victim: Request, plan: StepPlan) -> None:
        """Preempt this running request, which may be in the plan already."""
        del self._running[index_of(self._running, victim)]
        if plan.withdraw(victim):
            self._kv_cache.uncache_after(victim, victim.num_computed_tokens)
        self._requeue(victim, plan.now)
        plan.preempted.append(victim)

    def preempt_running(self, plan: StepPlan) -> None:
        """Preempt all running requests, the last one first."""
        for victim in self._running[::-1]:
            self.preempt(victim, plan)

    def preempt_all(self, now: float) -> list[Request]:
        """Take all blocks back, between two steps; returns those that ran, the last one first."""
        self._non_running_blocks.free_all()
        preemption_order = self._running[::-1]
        self._running.clear()
        for victim in preemption_order:
            self._requeue(victim, now)
        return preemption_order

    def _requeue(self, victim: Request, now: float) -> None:
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
    kv_cache.pop_block_copies()  # of steps that will not be computed
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


class SwapRule:
    """Chooses between loading and computing KV again, by the mean of what either has taken."""

    def __init__(self) -> None:
        self._setup = 0.0  # the least that any load has taken; 0: none yet
        self._load_seconds = 0.0
        self._compute_seconds = 0.0  # of a token; 0: not known

    def loads(self, num_tokens: int) -> bool:
        """Whether so many tokens of a preempted request are loaded, and not computed again."""
        if not self._setup or not self._compute_seconds:
            return True
        return self._seconds_to_load(num_tokens) < num_tokens * self._compute_seconds

    def seconds(self, num_tokens: int) -> float:
        """How long it takes until the KV of so many tokens is back; 0 while that is not known."""
        computed = num_tokens * self._compute_seconds
        if not self._setup:
            return computed
        loaded = self._seconds_to_load(num_tokens)
        return min(computed, loaded) if computed else loaded

    def learn_load(self, num_tokens: int, seconds: float) -> None:
        """A load of so many tokens took this long, its time in a queue included."""
        if num_tokens <= 0 or seconds <= 0.0:
            return
        self._setup = min(self._setup, seconds) if self._setup else seconds
        self._load_seconds = _mean(self._load_seconds, (seconds - self._setup) / num_tokens)

    def learn_step(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens took this long."""
        if num_prompt_tokens >= _FEW_TOKENS and seconds > 0.0:
            self._compute_seconds = _mean(self._compute_seconds, seconds / num_prompt_tokens)

    def _seconds_to_load(self, num_tokens: int) -> float:
        return self._setup + num_tokens * self._load_seconds


class FixedSwapRule(SwapRule):
    """The setting decides for preempted requests; times are learnt all the same."""

    def __init__(self, loads: bool) -> None:
        super().__init__()
        self._loads = loads

    def loads(self, num_tokens: int) -> bool:
        return self._loads


def make_swap_rule(mode: PreemptionMode) -> SwapRule:
    """The rule of --preemption."""
    return SwapRule() if mode == "auto" else FixedSwapRule(mode == "swap")


def _mean(known: float, measured: float) -> float:
    if not known:
        return measured
    return known + _WEIGHT * (min(measured, _MOST * known) - known)
