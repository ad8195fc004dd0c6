"""Records what a scheduler does as lines of a trace; format: `proto/messages/sched_trace.py`.

Start with `TraceRecorder`; `TraceFile` in `file.py` writes the lines.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

import msgspec

from engine_core.kv_cache.events import ReusableBlockCounter
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_connector.base import SchedulerConnector
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.retention.retained_prefixes import RetainedPrefix
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.step_plan import Lookup, StepPlan
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.sched_trace import (
    MAX_PINS,
    Arrival,
    Content,
    Decision,
    EncodedPart,
    Event,
    Finish,
    ImagePlace,
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

MAX_KNOWN_CONTENTS: Final = 1 << 19
"""Limit of numbered block contents, about 100 bytes each; beyond it all are forgotten."""
MAX_KNOWN_IMAGES: Final = 1 << 16
"""Limit of numbered images; beyond it all are forgotten."""
_KEY_BYTES: Final = 8
"""Bytes of a block hash that identify the content of a block."""

_BLOCKED_REASONS: Final = {
    status: status.name.removeprefix("WAITING_FOR_").lower()
    for status in RequestStatus
    if status.is_blocked
}


class TraceRecorder:
    """Observes a scheduler, and with `block_counter` its block pool, and writes trace lines.

    write_line: called with each line. clock: seconds, that of the scheduler. started_at: the
    second at which time_us is 0. num_seats: maximum number of running sequences. image_token_id: of
    a model that reads images.
    """

    def __init__(
        self,
        write_line: Callable[[msgspec.Struct], None],
        *,
        started_at: float,
        num_seats: int,
        clock: Callable[[], float] = time.monotonic,
        image_token_id: int = -1,
    ) -> None:
        self._image_token_id = image_token_id
        self._images: dict[bytes, int] = {}  # numbers of their contents, by hash
        self._num_images = 0
        self.block_counter = ReusableBlockCounter()
        self._write_line = write_line
        self._clock = clock
        self._started_at = started_at
        self._num_seats = num_seats
        self._contents = ContentNumbers()
        self._waiting: dict[int, Request] = {}
        self._num_preempted = 0  # of the waiting ones
        self._queue_has_changed = False  # between two steps
        self._tokenless: set[int] = set()  # sequences without a first token
        self._external_hits: dict[int, tuple[int, str, bool]] = {}
        self._drafted: dict[int, list[int]] = {}  # by step, sequences with drafts
        self._snapshot: Snapshot | None = None
        self._connector = ""
        self._retained_prefixes: dict[str, RetainedPrefix] = {}

    def on_request_added(self, request: Request) -> None:
        lora = request.lora_request
        self._waiting[request.seq_id] = request
        self._tokenless.add(request.seq_id)
        self._write_line(
            Arrival(
                time_us=self._now(),
                seq_id=request.seq_id,
                request_id=request.request_id,
                choice=request.choice,
                arrived_us=self._microseconds(request.arrival_time),
                tenant=request.tenant,
                priority=request.priority,
                job=request.agent.session,
                is_last_step=request.agent.is_last_step,
                ttl_ms=request.agent.ttl_ms,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                max_tokens=request.max_tokens,
                blocks=self._contents.content_of(request.block_hashes),
                reads_cache=not request.skip_reading_prefix_cache,
                extra_keys=request.extra_keys.kinds,
                adapter="" if lora is None else lora.lora_name,
                images=self._images_of(request) if request.mm_features else [],
            )
        )

    def on_step_begin(
        self,
        plan: StepPlan,
        waiting: RequestQueue,
        running: Sequence[Request],
        kv_cache: KVCacheManager,
        connector: SchedulerConnector,
    ) -> None:
        if self._queue_has_changed:
            self._count_waiting(waiting)
        num_free, num_retained = kv_cache.pool.num_free, kv_cache.pool.retained.num_reclaimable
        num_cached, num_held = self.block_counter.num_cached, kv_cache.transfer_refs.num_alone
        blocked: dict[str, int] = {}
        num_ready = waiting.num_ready
        if num_ready < len(self._waiting):
            for request in self._waiting.values():
                status = request.status
                if status.is_blocked:
                    blocked[_BLOCKED_REASONS[status]] = blocked.get(_BLOCKED_REASONS[status], 0) + 1
        self._snapshot = Snapshot(
            waiting=num_ready,
            preempted=self._num_preempted,
            blocked=blocked,
            running=len(running),
            pool=PoolUse(
                free=num_free - num_cached,
                cached=num_cached,
                requests=kv_cache.num_usable_blocks - num_free - num_held - num_retained,
                held=num_held,
                pinned=num_retained,
            ),
            pins=[
                PinUse(prefix.agent_session, len(prefix.blocks))
                for prefix in islice(reversed(self._retained_prefixes.values()), MAX_PINS)
            ],
            num_pins=len(self._retained_prefixes),
            token_budget=plan.budget,
            seats=self._num_seats,
            tiers=connector.tiers(),
        )
        self._connector = type(connector).__name__

    def on_step_scheduled(self, step: int, plan: StepPlan) -> None:
        assert self._snapshot is not None, "a step begins before it is decided"
        if plan.drafts:
            self._drafted[step] = list(plan.drafts)
        self._write_line(
            Step(
                time_us=self._microseconds(plan.now),
                step=step,
                snapshot=self._snapshot,
                decision=self._decision(plan),
            )
        )

    def on_external_hit(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None:
        self._external_hits[request.seq_id] = num_tokens, connector, is_async

    def on_step_result(self, result: ModelRunnerOutput) -> None:
        first: list[int] = []
        if self._tokenless:
            first = [
                seq_id
                for seq_id, tokens in zip(result.seq_ids, result.sampled_token_ids, strict=True)
                if tokens and seq_id in self._tokenless
            ]
            self._tokenless.difference_update(first)
        self._write_line(
            Result(
                time_us=self._now(),
                step=result.step,
                num_tokens=sum(map(len, result.sampled_token_ids)),
                first=first,
                compute_seconds=result.compute_seconds,
                accepted=self._accepted(result),
                encoder_seconds=result.encoder_seconds,
            )
        )

    def on_request_finished(self, request: Request) -> None:
        self._remove_waiting(request)
        self._tokenless.discard(request.seq_id)
        self._external_hits.pop(request.seq_id, None)
        self._write_line(
            Finish(
                time_us=self._now(),
                seq_id=request.seq_id,
                reason=str(request.status.finish_reason),
                num_output_tokens=request.num_output_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_preemptions=request.num_preemptions,
                blocks=self._contents.content_of(request.block_hashes),
            )
        )

    def on_turn_ended(self, request_id: int, agent_session: str, tool: str) -> None:
        self._write_line(
            TurnEnd(time_us=self._now(), request_id=request_id, job=agent_session, tool=tool)
        )

    def on_prefix_retained(self, prefix: RetainedPrefix, ttl: float) -> None:
        self._retained_prefixes.pop(prefix.agent_session, None)
        self._retained_prefixes[prefix.agent_session] = prefix  # the newest is last
        self._write_line(
            PinBegin(
                time_us=self._now(),
                job=prefix.agent_session,
                seq_id=prefix.seq_id,
                num_blocks=len(prefix.blocks),
                ttl_us=round(ttl * 1e6),
            )
        )

    def on_prefix_released(self, prefix: RetainedPrefix, reason: str) -> None:
        self._retained_prefixes.pop(prefix.agent_session, None)
        self._write_line(PinEnd(time_us=self._now(), job=prefix.agent_session, reason=reason))

    def on_event(self, what: str, detail: str) -> None:
        self._queue_has_changed = True
        if what == "restart":
            self._drafted.clear()  # the steps in flight get no result
        self._write_line(Event(time_us=self._now(), what=what, detail=detail))

    def _accepted(self, result: ModelRunnerOutput) -> list[int]:
        """Return how many tokens of each draft of a step were accepted."""
        drafted = self._drafted.pop(result.step, [])
        if not drafted:
            return []
        numbers = dict(zip(result.seq_ids, map(len, result.sampled_token_ids), strict=True))
        return [max(0, numbers.get(seq_id, 0) - 1) for seq_id in drafted]

    def _decision(self, plan: StepPlan) -> Decision:
        new: list[int] = []
        new_tokens: list[int] = []
        resumed: list[int] = []
        resumed_tokens: list[int] = []
        hits: list[PrefixHit] = []
        num_tokens = sum(plan.continued_tokens)
        context = num_tokens + sum([request.num_computed_tokens for request in plan.continued])
        for request, number in zip(plan.admitted, plan.admitted_tokens, strict=True):
            context += request.num_computed_tokens + number
            num_tokens += number
            if request.num_preemptions:
                resumed.append(request.seq_id)
                resumed_tokens.append(number)
            else:
                new.append(request.seq_id)
                new_tokens.append(number)
            self._remove_waiting(request)
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
            running=[request.seq_id for request in plan.continued],
            running_tokens=[] if all_one else plan.continued_tokens,
            preempted=[request.seq_id for request in plan.preempted],
            hits=hits,
            num_tokens=num_tokens,
            context_tokens=context,
            drafted=list(plan.drafts),
            draft_tokens=list(map(len, plan.drafts.values())),
            lookahead=list(plan.lookahead),
            lookahead_tokens=list(plan.lookahead.values()),
            limit=plan.limit,
            lookups=list(map(self._lookup, plan.lookups)),
            encoded=[
                EncodedPart(piece.seq_id, piece.index, piece.start, piece.end)
                for piece in plan.encoder_slices
            ],
        )

    def _images_of(self, request: Request) -> list[ImagePlace]:
        """Return the images of a prompt, and number new contents."""
        if len(self._images) > MAX_KNOWN_IMAGES:
            self._images.clear()
        places = []
        for feature in request.mm_features:
            number = self._images.setdefault(feature.mm_hash, self._num_images + 1)
            self._num_images = max(self._num_images, number)
            first = request.prompt_token_ids.index(self._image_token_id, feature.offset)
            places.append(
                ImagePlace(feature.offset, feature.length, feature.num_embeds, first, number)
            )
        return places

    def _lookup(self, lookup: Lookup) -> PrefixHit:
        request, external = lookup.request, lookup.external_tokens
        return PrefixHit(
            seq_id=request.seq_id,
            num_tokens=request.num_tokens,
            local_tokens=lookup.local_tokens,
            external_tokens=external,
            connector=self._connector if external else "",
            asynchronous=lookup.loads_async,
            waits_for=_BLOCKED_REASONS.get(request.status, "room"),
        )

    def _hit(self, request: Request) -> PrefixHit:
        """Return the hit of an admitted request; KV that could not be loaded does not count."""
        number, connector, is_async = self._external_hits.pop(request.seq_id, (0, "", False))
        external = min(number, request.num_computed_tokens)
        return PrefixHit(
            seq_id=request.seq_id,
            num_tokens=request.num_tokens,
            local_tokens=request.num_computed_tokens - external,
            external_tokens=external,
            connector=connector,
            asynchronous=is_async,
        )

    def _count_waiting(self, waiting: RequestQueue) -> None:
        """Read the queue again, to which requests may have returned between two steps."""
        self._queue_has_changed = False
        self._waiting = {request.seq_id: request for request in waiting}
        self._num_preempted = sum(request.num_preemptions > 0 for request in waiting)

    def _remove_waiting(self, request: Request) -> None:
        if self._waiting.pop(request.seq_id, None) is not None and request.num_preemptions:
            self._num_preempted -= 1

    def _now(self) -> int:
        return self._microseconds(self._clock())

    def _microseconds(self, seconds: float) -> int:
        return round((seconds - self._started_at) * 1e6)


class ContentNumbers:
    """Numbers for the contents of blocks, so that a trace tells which are equal, but no content.

    A block hash covers all tokens before the block, so the blocks of a sequence that were seen
    before are always its first ones. max_contents: numbers to remember.
    """

    def __init__(self, max_contents: int = MAX_KNOWN_CONTENTS) -> None:
        self._max_contents = max_contents
        self._numbers: dict[bytes, int] = {}
        self._last = 0

    def content_of(self, block_hashes: Sequence[bytes]) -> Content:
        """Return the content of a sequence, and number its new blocks."""
        keys = [block_hash[:_KEY_BYTES] for block_hash in block_hashes]
        numbers = self._numbers
        num_known = self._num_known(keys)
        parent = numbers[keys[num_known - 1]] if num_known else 0
        new = keys[num_known:]
        if not new:
            return Content(parent, num_known)
        if len(numbers) + len(new) > self._max_contents:
            numbers.clear()
            parent, num_known, new = 0, 0, keys
        first = self._last + 1
        self._last += len(new)
        numbers.update(zip(new, range(first, self._last + 1), strict=True))
        return Content(parent, num_known, first, len(new))

    def _num_known(self, keys: Sequence[bytes]) -> int:
        """Find the end of the known blocks by binary search.

        known known known | new new
        0                 low=high   len(keys)
        """
        numbers = self._numbers
        if not keys or keys[-1] in numbers:
            return len(keys)
        low, high = 0, len(keys) - 1
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in numbers:
                low = middle + 1
            else:
                high = middle
        return low
