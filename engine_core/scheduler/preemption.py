"""Preemption: which running request loses its KV cache blocks, and how it returns.

PreemptionOrder     the order in which running requests are preempted
WaitingBlockHolders requests that hold blocks and do not run, which lose them before running ones
Preemption          frees the blocks and puts the request back into the queue
SwapRule            whether the KV of a preempted request is loaded or recomputed
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.admission_rules import KVWatermarks
from engine_core.scheduler.features.encoder_inputs import EncoderInputs
from engine_core.scheduler.keyed_heap import KeyedHeap
from engine_core.scheduler.queues.policies import FairSchedulingPolicy
from engine_core.scheduler.request_lifecycle import RequestLifecycle
from engine_core.scheduler.step_plan import StepPlan
from proto.messages.engine_io import EventType
from proto.settings.config import PreemptionMode

_running_index: Final = attrgetter("running_index")


class PreemptionOrder:
    """Which running request is preempted next.

        tenant 7   served 900   ▸ ▸ ▸ ▸
        tenant 3   served 340   ▸ ▸         by the key of the policy

    Within a tenant the request with the policy's lowest `preemption_key` would go first. Among
    these, one of each tenant, the least urgent one is preempted; of equally urgent ones that of the
    tenant that was served most; of those again the one with the lowest key. So a preemption takes
    time in proportion to the tenants, not to the requests. Also assigns
    `Request.running_index`, which grows along the running list.
    """

    def __init__(self, policy: FairSchedulingPolicy) -> None:
        self._policy = policy
        self._tenants: dict[int, KeyedHeap[Request]] = {}
        self._last_index = 0

    def add_running(self, request: Request) -> None:
        self._last_index += 1
        request.running_index = self._last_index
        victims = self._tenants.get(request.tenant)
        if victims is None:
            victims = self._tenants[request.tenant] = KeyedHeap()
        victims.set_key(request.seq_id, self._policy.preemption_key(request), request)

    def remove_running(self, request: Request) -> None:
        victims = self._tenants[request.tenant]
        victims.remove(request.seq_id)
        if not len(victims):
            del self._tenants[request.tenant]

    def move_to_end(self, requests: Iterable[Request]) -> None:
        """Follow requests that were moved to the end of the running list, in this order."""
        for request in requests:
            self.remove_running(request)
            self.add_running(request)

    def next_victim(self, served_above: float = -math.inf) -> Request | None:
        """Return the next request to preempt, of tenants served more than this; None if none."""
        if len(self._tenants) == 1 and served_above == -math.inf:
            victim = next(iter(self._tenants.values())).first()
            return None if victim is None else victim[2]
        policy, first = self._policy, None
        least: Any = None
        for tenant, victims in self._tenants.items():
            served = policy.served(tenant)
            victim = victims.first()
            if served > served_above and victim is not None:
                key, _, request = victim
                urgency = (-policy.priority_key(request), -served, key)
                if first is None or urgency < least:
                    first, least = request, urgency
        return first


def index_of(running: Sequence[Request], request: Request) -> int:
    """Return the index of a request in the running list; it must be there."""
    index = bisect_left(running, request.running_index, key=_running_index)
    assert running[index] is request, f"{request!r} does not run"
    return index


class WaitingBlockHolders:
    """Requests that hold blocks and do not run: sessions between turns, forks, and loaded ones.

        idle      waits for input: its blocks are freed for any request that needs some; the one
                  that has been idle longest first
        pending   has its input, a sibling's prompt or loaded KV, and will run soon: its blocks are
                  freed only if no other request runs than the one that needs some, to guarantee
                  progress; the one that became pending last goes first

    A request that has lost its blocks is recomputed when it runs, except for what the prefix cache
    still holds.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._idle: dict[int, Request] = {}
        self._pending: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._idle) + len(self._pending)

    @property
    def any_idle(self) -> bool:
        return bool(self._idle)

    def add_idle(self, request: Request) -> None:
        if request.num_computed_tokens:
            self._idle[request.seq_id] = request

    def add_pending(self, request: Request) -> None:
        """Note that a request will run soon; an idle one is not idle any more."""
        self._idle.pop(request.seq_id, None)
        if request.num_computed_tokens:
            self._pending[request.seq_id] = request

    def forget_request(self, request: Request) -> None:
        self._idle.pop(request.seq_id, None)
        self._pending.pop(request.seq_id, None)

    def free_idle(self) -> bool:
        """Free the blocks of one idle request; False if none has any."""
        if not self._idle:
            return False
        self._free(next(iter(self._idle.values())))
        return True

    def free_pending(self, spared: Request) -> bool:
        """Free the blocks of one pending request other than `spared`; False if none has any."""
        for request in reversed(self._pending.values()):
            if request is not spared:
                self._free(request)
                return True
        return False

    def free_all(self) -> None:
        for request in [*self._idle.values(), *self._pending.values()]:
            self._free(request)

    def _free(self, request: Request) -> None:
        self.forget_request(request)
        self._kv_cache.free(request)
        request.num_computed_tokens = 0


class Preemption:
    """Frees blocks, of one request at a time: an idle, a pending or a running one (`preempt_one`).

    watermarks: None without any. The planner reads the watermarks and `waiting_block_holders`, too.
    Nothing is copied: the tokens of a preempted request stay in the Request. What the prefix cache
    does not hold any more is recomputed, or loaded by a connector (`SwapRule`).
    """

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        preemption_order: PreemptionOrder,
        kv_cache: KVCacheManager,
        watermarks: KVWatermarks | None,
        waiting_block_holders: WaitingBlockHolders,
        encoder_inputs: EncoderInputs | None,
    ) -> None:
        self._encoder_inputs = encoder_inputs
        self._preemption_order = preemption_order
        self._requests = lifecycle.requests
        self._waiting = lifecycle.waiting
        self._running = lifecycle.running
        self._kv_cache = kv_cache
        self.watermarks = watermarks
        self.waiting_block_holders = waiting_block_holders

    def preempt_above_watermark(self, plan: StepPlan) -> None:
        """Preempt while the pool is above its watermark, except the last running request."""
        if self.watermarks is None:
            return
        while self.watermarks.too_high() and (
            len(self._running) > 1 or self.waiting_block_holders.any_idle
        ):
            self.preempt_one(plan, 0)

    def preempt_one(self, plan: StepPlan, num_planned: int) -> int:
        """Free the blocks of one request: an idle one, else a running one, which is preempted.

        If only one request runs, a pending one loses its blocks instead. Returns the index of the
        preempted request in the running list, or the length of the list if none was preempted.

        num_planned: leading requests of the running list that the plan may include. If the plan
        includes the preempted request, it is removed: its tokens return to the budget, and blocks
        that only this step would have filled become unfindable.
        """
        num_running = len(self._running)
        if self.waiting_block_holders.free_idle():
            return num_running
        if num_running == 1 and self.waiting_block_holders.free_pending(self._running[0]):
            return num_running
        victim = self._preemption_order.next_victim()
        assert victim is not None, "nothing runs"
        index = index_of(self._running, victim)
        self.preempt(victim, plan, may_be_planned=index < num_planned)
        return index

    def preempt(self, victim: Request, plan: StepPlan, *, may_be_planned: bool = True) -> None:
        """Preempt this running request, and remove it from the plan if that may include it."""
        del self._running[index_of(self._running, victim)]
        if may_be_planned and plan.remove_request(victim):
            self._kv_cache.uncache_after(victim, victim.num_computed_tokens)
        self._requeue(victim, plan.now)
        plan.preempted.append(victim)

    def preempt_running(self, plan: StepPlan) -> None:
        """Preempt all running requests, the last one first."""
        for victim in self._running[::-1]:
            self.preempt(victim, plan)

    def preempt_all(self, now: float) -> list[Request]:
        """Free all blocks, between two steps; return the requests that ran, the last one first."""
        self.waiting_block_holders.free_all()
        preempted = self._running[::-1]
        self._running.clear()
        for victim in preempted:
            self._requeue(victim, now)
        return preempted

    def requeue_all(self, now: float) -> None:
        """Put all requests back into the queue, in their order: the workers have lost their KV.

        Nothing else is lost, because all token ids are in the engine. Frees all blocks, forgets the
        prefix cache, and drops placeholders of steps in flight. now: monotonic seconds.
        """
        self.preempt_all(now)
        for request in self._requests.values():
            request.num_output_placeholders = 0
            request.spec_token_ids.clear()
        self._kv_cache.pop_copies()  # of steps that will not be computed
        forgotten = self._kv_cache.reset_prefix_cache()
        assert forgotten, "a request that is not idle, pending or running holds blocks"

    def _requeue(self, victim: Request, now: float) -> None:
        self._preemption_order.remove_running(victim)
        self._kv_cache.free(victim)
        if self._encoder_inputs is not None:
            self._encoder_inputs.on_preempted(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.spec_token_ids.clear()
        victim.record_event(EventType.PREEMPTED, now)
        self._waiting.requeue_preempted(victim)


_WEIGHT: Final = 0.25
"""Weight of a new measurement in the running mean."""
_MOST: Final = 4.0
"""A measurement counts as at most this multiple of the mean, because cores may be shared."""
_FEW_TOKENS: Final = 16
"""Steps with fewer prompt tokens say little about the time per prompt token."""


class SwapRule:
    """Chooses between loading and recomputing the KV of a preempted request, by measured times.

        recompute   num_tokens · seconds per prompt token, from steps
        swap        setup + num_tokens · seconds per loaded token, from loads

    Connectors store blocks as they become full, so preemption itself copies nothing: the choice is
    made when the request is admitted again. While a time is unknown, KV is loaded to measure it.
    mode: a setting other than auto is the choice; times are learnt for `seconds` all the same.
    """

    def __init__(self, mode: PreemptionMode) -> None:
        self._mode = mode
        self._setup = 0.0  # the shortest load; 0: none yet
        self._load_seconds = 0.0
        self._compute_seconds = 0.0  # per token; 0: unknown

    @property
    def token_seconds(self) -> float:
        """Seconds in which a prompt token is computed; 0 while unknown."""
        return self._compute_seconds

    def loads(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` tokens of a preempted request are loaded."""
        if self._mode != "auto":
            return self._mode == "swap"
        if not self._setup or not self._compute_seconds:
            return True
        return self._seconds_to_load(num_tokens) < num_tokens * self._compute_seconds

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds until the KV of tokens is back on the device; 0 while unknown."""
        computed = num_tokens * self._compute_seconds
        if not self._setup:
            return computed
        loaded = self._seconds_to_load(num_tokens)
        return min(computed, loaded) if computed else loaded

    def learn_load(self, num_tokens: int, seconds: float) -> None:
        """Learn from a load of `num_tokens` tokens, whose time includes that in a queue."""
        if num_tokens <= 0 or seconds <= 0.0:
            return
        self._setup = min(self._setup, seconds) if self._setup else seconds
        self._load_seconds = _mean(self._load_seconds, (seconds - self._setup) / num_tokens)

    def learn_step(self, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step with `num_prompt_tokens` prompt tokens."""
        if num_prompt_tokens >= _FEW_TOKENS and seconds > 0.0:
            self._compute_seconds = _mean(self._compute_seconds, seconds / num_prompt_tokens)

    def _seconds_to_load(self, num_tokens: int) -> float:
        return self._setup + num_tokens * self._load_seconds


def _mean(known: float, measured: float) -> float:
    if not known:
        return measured
    return known + _WEIGHT * (min(measured, _MOST * known) - known)
