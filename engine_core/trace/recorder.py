"""What a scheduler does, as lines of a trace.

Owns what the lines need to be remembered: who is in the queue, who has no token yet, and which
contents of blocks were seen. Puts the lines somewhere; knows no file.
"""

import time
from collections.abc import Callable, Collection
from itertools import islice
from typing import Final

import msgspec

from engine_core.kv_cache.events import ReusableBlockCounter
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.retention.retained_prefixes import RetainedPrefix
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.step_plan import StepPlan
from engine_core.trace.contents import Contents
from proto.model_runner_output import ModelRunnerOutput
from proto.sched_trace import (
    MAX_PINS,
    Arrival,
    Decision,
    Event,
    Finish,
    PinBegin,
    PinEnd,
    PinUse,
    PoolUse,
    PrefixHit,
    Result,
    Snapshot,
    Step,
    TurnEnd,
)

_BLOCKED: Final = {
    each: each.name.removeprefix("WAITING_FOR_").lower()
    for each in RequestStatus
    if each.is_blocked
}


class Recorder:
    """Watches a scheduler, and through `census` its pool.

    put: takes each line. clock: seconds, the scheduler's; started: that time_us counts from.
    num_seats: sequences that may run at once.
    """

    def __init__(
        self,
        put: Callable[[msgspec.Struct], None],
        *,
        started: float,
        num_seats: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.census = ReusableBlockCounter()
        self._put = put
        self._clock = clock
        self._started = started
        self._num_seats = num_seats
        self._contents = Contents()
        self._waiting: dict[int, Request] = {}
        self._num_preempted = 0
        self._is_stale = False
        self._tokenless: set[int] = set()
        self._elsewhere: dict[int, tuple[int, str, bool]] = {}
        self._snapshot: Snapshot | None = None
        self._retained_prefixes: dict[str, RetainedPrefix] = {}

    def watch(
        self, waiting: RequestQueue, running: Collection[Request], kv_cache: KVCacheManager
    ) -> None:
        self._queue, self._running, self._kv_cache = waiting, running, kv_cache

    def added(self, request: Request) -> None:
        self._waiting[request.seq_id] = request
        self._tokenless.add(request.seq_id)
        self._put(
            Arrival(
                time_us=self._now(),
                seq_id=request.seq_id,
                request_id=request.request_id,
                choice=request.choice,
                arrived_us=self._micros(request.arrival_time),
                tenant=request.tenant,
                priority=request.priority,
                job=request.agent.job,
                is_last_step=request.agent.is_last_step,
                ttl_ms=request.agent.ttl_ms,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                max_tokens=request.max_tokens,
                blocks=self._contents.take(request.block_hashes),
                reads_cache=not request.skip_reading_prefix_cache,
            )
        )

    def step_begins(self, plan: StepPlan) -> None:
        kv_cache, queue = self._kv_cache, self._queue
        if self._is_stale:
            self._look_again()
        num_free, num_pinned = kv_cache.pool.num_free, kv_cache.pool.pinned.num_reclaimable
        num_cached, num_held = self.census.num_cached, kv_cache.transfer_refs.num_alone
        blocked: dict[str, int] = {}
        num_ready = queue.num_ready
        if num_ready < len(self._waiting):
            for request in self._waiting.values():
                status = request.status
                if status.is_blocked:
                    blocked[_BLOCKED[status]] = blocked.get(_BLOCKED[status], 0) + 1
        self._snapshot = Snapshot(
            waiting=num_ready,
            preempted=self._num_preempted,
            blocked=blocked,
            running=len(self._running),
            pool=PoolUse(
                free=num_free - num_cached,
                cached=num_cached,
                requests=kv_cache.num_usable_blocks - num_free - num_held - num_pinned,
                held=num_held,
                pinned=num_pinned,
            ),
            pins=[
                PinUse(each.job, len(each.blocks))
                for each in islice(reversed(self._retained_prefixes.values()), MAX_PINS)
            ],
            num_pins=len(self._retained_prefixes),
            token_budget=plan.budget,
            seats=self._num_seats,
        )

    def step_decided(self, step: int, plan: StepPlan) -> None:
        assert self._snapshot is not None, "a step begins before it is decided"
        self._put(
            Step(
                time_us=self._micros(plan.now),
                step=step,
                snapshot=self._snapshot,
                decision=self._decision(plan),
            )
        )

    def found_elsewhere(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None:
        self._elsewhere[request.seq_id] = num_tokens, connector, is_async

    def step_done(self, result: ModelRunnerOutput) -> None:
        first: list[int] = []
        if self._tokenless:
            first = [
                seq_id
                for seq_id, tokens in zip(result.seq_ids, result.sampled_token_ids, strict=True)
                if tokens and seq_id in self._tokenless
            ]
            self._tokenless.difference_update(first)
        self._put(
            Result(
                time_us=self._now(),
                step=result.step,
                num_tokens=sum(map(len, result.sampled_token_ids)),
                first=first,
                compute_seconds=result.compute_seconds,
            )
        )

    def finished(self, request: Request) -> None:
        self._left(request)
        self._tokenless.discard(request.seq_id)
        self._elsewhere.pop(request.seq_id, None)
        self._put(
            Finish(
                time_us=self._now(),
                seq_id=request.seq_id,
                reason=str(request.status.finish_reason),
                num_output_tokens=request.num_output_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_preemptions=request.num_preemptions,
                blocks=self._contents.take(request.block_hashes),
            )
        )

    def turn_ended(self, request_id: int, job: str, tool: str) -> None:
        self._put(TurnEnd(time_us=self._now(), request_id=request_id, job=job, tool=tool))

    def pinned(self, pin: RetainedPrefix, ttl: float) -> None:
        self._retained_prefixes.pop(pin.job, None)
        self._retained_prefixes[pin.job] = pin  # those that were granted last are at the end
        self._put(
            PinBegin(
                time_us=self._now(),
                job=pin.job,
                seq_id=pin.seq_id,
                num_blocks=len(pin.blocks),
                ttl_us=round(ttl * 1e6),
            )
        )

    def unpinned(self, pin: RetainedPrefix, reason: str) -> None:
        self._retained_prefixes.pop(pin.job, None)
        self._put(PinEnd(time_us=self._now(), job=pin.job, reason=reason))

    def happened(self, what: str, detail: str) -> None:
        self._is_stale = True
        self._put(Event(time_us=self._now(), what=what, detail=detail))

    def _decision(self, plan: StepPlan) -> Decision:
        new: list[int] = []
        new_tokens: list[int] = []
        resumed: list[int] = []
        resumed_tokens: list[int] = []
        hits: list[PrefixHit] = []
        num_tokens = sum(plan.continued_tokens)
        context = num_tokens + sum([each.num_computed_tokens for each in plan.continued])
        for request, number in zip(plan.admitted, plan.admitted_tokens, strict=True):
            context += request.num_computed_tokens + number
            num_tokens += number
            if request.num_preemptions:
                resumed.append(request.seq_id)
                resumed_tokens.append(number)
            else:
                new.append(request.seq_id)
                new_tokens.append(number)
            self._left(request)
            hits.append(self._hit(request))
        for request in plan.preempted:
            self._waiting[request.seq_id] = request
        self._num_preempted += len(plan.preempted)
        all_one = num_tokens - sum(plan.admitted_tokens) == len(plan.continued)
        return Decision(
            new=new,
            new_tokens=new_tokens,
            resumed=resumed,
            resumed_tokens=resumed_tokens,
            running=[each.seq_id for each in plan.continued],
            running_tokens=[] if all_one else plan.continued_tokens,
            preempted=[each.seq_id for each in plan.preempted],
            hits=hits,
            num_tokens=num_tokens,
            context_tokens=context,
        )

    def _hit(self, request: Request) -> PrefixHit:
        """Of one that is admitted; what was to be loaded and failed has not been found."""
        number, connector, is_async = self._elsewhere.pop(request.seq_id, (0, "", False))
        external = min(number, request.num_computed_tokens)
        return PrefixHit(
            seq_id=request.seq_id,
            num_tokens=request.num_tokens,
            local_tokens=request.num_computed_tokens - external,
            external_tokens=external,
            connector=connector,
            asynchronous=is_async,
        )

    def _look_again(self) -> None:
        """Requests may have gone back to the queue between two steps."""
        self._is_stale = False
        self._waiting = {each.seq_id: each for each in self._queue}
        self._num_preempted = sum(each.num_preemptions > 0 for each in self._queue)

    def _left(self, request: Request) -> None:
        """The queue, if it was there."""
        if self._waiting.pop(request.seq_id, None) is not None and request.num_preemptions:
            self._num_preempted -= 1

    def _now(self) -> int:
        return self._micros(self._clock())

    def _micros(self, seconds: float) -> int:
        return round((seconds - self._started) * 1e6)
