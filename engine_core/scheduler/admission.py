"""The second half of a step: waiting requests are admitted.

    AdmissionPass    moves requests from the head of the queue to the end of the running list
    AdmissionRule    conditions on free blocks beyond "the next tokens fit"
    Pause            a gate: no new request starts, or nothing is scheduled at all

The first request without room ends the pass, so no later request overtakes it. If it only waits for
prompt tokens, requests whose KV a connector has do not wait behind it. A request that a gate blocks
is parked, and the next one is considered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

from engine_core.kv_cache.manager import NOTHING_COMPUTED, ComputedBlocks, KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.fairness import TenantFairness
from engine_core.scheduler.hooks import AdmissionGate, Candidate, RequestListener, Unblock
from engine_core.scheduler.kv_transfer import KVTransferManager
from engine_core.scheduler.limits import ChunkRule
from engine_core.scheduler.preemption import KVWatermarks, NonRunningBlocks
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.step_plan import StepPlan
from proto.config import SchedulerConfig
from proto.engine_io import EventType, PauseMode


class Pause:
    """A gate that an operator closes.

    In mode finish_running, requests that have not begun are held; others continue to their end,
    with all their choices, also after a preemption or in a new engine. In mode freeze, the
    scheduler plans nothing.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_RESUME

    def __init__(self, choices: Mapping[int, Mapping[int, Request]]) -> None:
        """choices: unfinished choices by request id and number; not changed here."""
        self._choices = choices
        self._begun: set[int] = set()  # ids of requests that have begun with some choice
        self._mode: PauseMode | None = None
        self._held: dict[int, Request] = {}

    @property
    def mode(self) -> PauseMode | None:
        return self._mode

    @property
    def frozen(self) -> bool:
        """Whether nothing is scheduled."""
        return self._mode == "freeze"

    def begin_pause(self, mode: PauseMode) -> None:
        self._mode = mode

    def end_pause(self) -> None:
        """End the pause and unblock all held requests; without a pause do nothing."""
        self._mode = None
        held, self._held = self._held, {}
        for request in held.values():
            self._unblock(request)

    def attach(self, unblock: Unblock) -> None:
        self._unblock = unblock

    def begin_admission(self, plan: StepPlan) -> None:
        """Do nothing: a step changes no pause."""

    def holds(self, request: Request) -> bool:
        """Return whether a request must not begin during the pause."""
        if self._mode is None or request.request_id in self._begun:
            return False
        return not request.num_output_tokens

    def is_blocked(self, candidate: Candidate) -> bool:
        request = candidate.request
        if not self.holds(request):
            return False
        self._held[request.seq_id] = request
        return True

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self._begun.add(request.request_id)

    def on_released(self, request: Request) -> None:
        self._held.pop(request.seq_id, None)
        if len(self._choices[request.request_id]) == 1:
            self._begun.discard(request.request_id)


DEFAULT_HYSTERESIS: Final = 0.9
"""Admission resumes below this fraction of the occupancy at which it stops, by default."""


class AdmissionRule(Protocol):
    """A condition on the pool for admitting the request at the head of the queue.

    A refusal ends admission for this step, so no later request overtakes. Rules are not asked while
    no request runs or loads, so there is always progress.
    """

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        """Return whether a request may start with `num_new_tokens` after its cached blocks.

        Fewer free blocks must never turn a refusal into an admission.
        """
        ...


class Watermark:
    """A rule: a fraction of the blocks stays free at an admission, for requests that run."""

    def __init__(self, kv_cache: KVCacheManager, fraction: float) -> None:
        self._kv_cache = kv_cache
        self._num_reserved = int(fraction * kv_cache.num_usable_blocks)

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        needed = self._kv_cache.num_blocks_needed(request, num_new_tokens, computed)
        return needed + self._num_reserved <= self._kv_cache.num_free_blocks


class WholeSequence:
    """A rule: all tokens of the request must fit, not just the first chunk of them.

    So must the rest of the prompts of running requests.
    """

    def __init__(self, kv_cache: KVCacheManager, running: Sequence[Request]) -> None:
        self._kv_cache = kv_cache
        self._running = running

    def admits(self, request: Request, num_new_tokens: int, computed: ComputedBlocks) -> bool:
        num_missing = request.num_tokens - request.num_computed_tokens - computed.num_tokens
        needed = self._needed(request, num_missing, computed)
        for other in self._running:
            if other.is_prefilling:
                num_missing = other.num_tokens - other.num_computed_tokens
                needed += self._needed(other, num_missing, NOTHING_COMPUTED)
        return needed <= self._kv_cache.num_free_blocks

    def _needed(self, request: Request, num_missing: int, computed: ComputedBlocks) -> int:
        """Return the blocks that the missing tokens need; a window frees some on the way."""
        kv_cache = self._kv_cache
        return min(
            kv_cache.num_blocks_needed(request, num_missing, computed),
            kv_cache.max_blocks(request.num_tokens),
        )


def make_kv_watermarks(config: SchedulerConfig, kv_cache: KVCacheManager) -> KVWatermarks | None:
    """Return the watermarks of a configuration; None if it sets none below the whole pool."""
    stop, preempt = config.stop_admission_above, config.preempt_above
    if stop == preempt == 1.0:
        return None
    resume = config.resume_admission_below
    if resume is None:
        resume = DEFAULT_HYSTERESIS * stop
    return KVWatermarks(kv_cache, resume, stop, preempt)


def rules_of(
    config: SchedulerConfig,
    kv_cache: KVCacheManager,
    running: Sequence[Request],
    watermarks: KVWatermarks | None,
) -> tuple[AdmissionRule, ...]:
    """Return the rules of a configuration; none by default."""
    rules: list[AdmissionRule] = []
    if watermarks is not None:
        rules.append(watermarks)
    if config.scheduler_reserve_full_isl:
        rules.append(WholeSequence(kv_cache, running))
    if config.watermark:
        rules.append(Watermark(kv_cache, config.watermark))
    return tuple(rules)


MAX_LOOKUPS_PER_STEP: Final = 8
"""Requests behind a throttled head that one step looks up in the connector: they may be many."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The first request of the queue found no room, and the conditions of that moment.

    num_missing, num_new: tokens without KV, and how many of them it needed at first. found,
    next_one: hash of the last cached block of its prefix, and of the block after it; empty if there
    is none.

    Another attempt fails until more blocks are free, a resting request holds blocks, a running
    request has to defer, fewer tokens are needed, or that prefix has become longer, or shorter (the
    next chunk then begins, and ends, at an earlier token and needs fewer blocks). A refusal is not
    remembered with rules or a connector, which consider more than this; with windows, where an
    earlier block may be lost or a later one found; and in a step that admitted a request, of which
    this one may be a fork in the next step.
    """

    request: Request
    num_missing: int
    num_new: int
    num_free: int
    found: Sequence[bytes]
    next_one: Sequence[bytes]


class AdmissionPass:
    """Admits waiting requests while tokens, sequences and blocks of the step last.

    max_positions: positions that a step may sample, those of drafts included.
    """

    def __init__(
        self,
        waiting: RequestQueue,
        running: list[Request],
        kv_cache: KVCacheManager,
        chunks: ChunkRule,
        max_num_seqs: int,
        max_positions: int,
        rules: Sequence[AdmissionRule],
        gates: Sequence[AdmissionGate],
        listeners: Sequence[RequestListener],
        non_running_blocks: NonRunningBlocks,
        fairness: TenantFairness,
        kv_transfer: KVTransferManager,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._kv_cache = kv_cache
        self._chunks = chunks
        self._max_running = min(max_num_seqs, chunks.step_budget)  # each needs a token per step
        self._max_positions = max_positions
        self._rules = rules
        self._gates = gates
        self._listeners = listeners
        self._non_running_blocks = non_running_blocks
        self._fairness = fairness
        self._kv_transfer = kv_transfer
        self._refusal: _Refusal | None = None
        self._remembers = not rules and not kv_transfer.connected and kv_cache.is_downward_closed

    @property
    def num_free_seqs(self) -> int:
        return max(0, self._max_running - len(self._running))

    def admit_waiting(self, plan: StepPlan) -> None:
        """Admit requests from the head of the queue, until one has to wait for room."""
        for gate in self._gates:
            gate.begin_admission(plan)
        waiting = self._waiting
        while (
            self._has_budget(plan)
            and self._has_position(plan)
            and waiting.num_ready
            and self._may_run_one_more()
        ):
            request = waiting.peek_request()
            if self._refusal is not None and self._still_refused(request, self._refusal, plan):
                return
            candidate = Candidate(request, self._kv_cache)
            if self._is_blocked(candidate):
                continue
            if (
                plan.prompt_budget <= 0
                and not candidate.loads_async
                and self._needs_prompt_tokens(candidate)
            ):
                self._kv_transfer.note_not_transferred(request)
                self._admit_transferred(plan)
                return
            if not self._admit(candidate, plan):
                return

    def _admit_transferred(self, plan: StepPlan) -> None:
        """Admit requests behind a head that waits for prompt tokens, or begin to load for them.

        Only requests whose KV the connector has, or has loaded: they compute a block at most. They
        cannot starve the head, because they use no prompt tokens, and it is first when there are
        some again.
        """
        kv_transfer = self._kv_transfer
        if self._waiting.num_ready <= kv_transfer.num_not_transferred:
            return
        num_lookups = 0
        for request in self._waiting:
            if request.status.is_blocked or not kv_transfer.may_be_transferred(request):
                continue
            if plan.budget <= 0 or not self._has_position(plan) or not self._can_run_one_more():
                return
            if not kv_transfer.is_loaded(request):
                num_lookups += 1
                if num_lookups > MAX_LOOKUPS_PER_STEP:
                    return
            candidate = Candidate(request, self._kv_cache)
            if self._is_blocked(candidate):
                continue
            if self._needs_prompt_tokens(candidate):
                kv_transfer.note_not_transferred(request)
            elif not self._admit(candidate, plan):
                return

    def _has_budget(self, plan: StepPlan) -> bool:
        """Return whether the step has tokens for the head of the queue.

        With a connector the head may need no prompt tokens of this step.
        """
        return plan.budget > 0 and (plan.prompt_budget > 0 or self._kv_transfer.connected)

    def _has_position(self, plan: StepPlan) -> bool:
        """Return whether drafts leave a position for one more request; True where no seat is free.

        Then a request can only be admitted in place of another one, and takes its position.
        """
        num_running = len(self._running)
        has_seat = num_running < self._max_running
        return not has_seat or num_running + plan.num_draft_grants < self._max_positions

    def _needs_prompt_tokens(self, candidate: Candidate) -> bool:
        """Return whether the tokens that a request computes are prompt tokens of the step.

        They are not if the KV of all tokens but a block at most comes from a connector.
        """
        request = candidate.request
        if not (candidate.num_external_tokens or self._kv_transfer.is_loaded(request)):
            return True
        num_computed = candidate.num_computed_tokens + candidate.num_external_tokens
        return request.num_tokens - num_computed > self._kv_cache.block_size

    def _can_run_one_more(self) -> bool:
        return len(self._running) < self._max_running

    def _may_run_one_more(self) -> bool:
        return self._can_run_one_more() or self._fairness.may_preempt_for(
            self._waiting.peek_request()
        )

    def _still_refused(self, request: Request, refusal: _Refusal, plan: StepPlan) -> bool:
        kv_cache = self._kv_cache
        return (
            refusal.request is request
            and bool(self._running)
            and not self._non_running_blocks.any_resting
            and not self._fairness.may_preempt_for(request)
            and kv_cache.num_free_blocks <= refusal.num_free
            and self._first_chunk(refusal.num_missing, plan) >= refusal.num_new
            and all(map(kv_cache.is_cached, refusal.found))
            and not any(map(kv_cache.is_cached, refusal.next_one))
        )

    def _first_chunk(self, num_missing: int, plan: StepPlan) -> int:
        return self._chunks.first_chunk(num_missing, min(plan.budget, plan.prompt_budget))

    def _remember_refusal(self, candidate: Candidate, num_new: int, plan: StepPlan) -> None:
        if not self._remembers or plan.admitted:
            return
        request, num_computed = candidate.request, candidate.num_computed_tokens
        num_found = num_computed // self._kv_cache.block_size
        num_dropped = 0 if request.num_computed_tokens else self._kv_cache.num_dropped_blocks
        end = num_found + num_dropped  # of the blocks that were cached
        self._refusal = _Refusal(
            request,
            num_missing=request.num_tokens - num_computed,
            num_new=num_new,
            num_free=self._kv_cache.num_free_blocks,
            found=request.block_hashes[end - 1 : end] if num_found else (),
            next_one=request.block_hashes[end : end + 1],
        )

    def _is_blocked(self, candidate: Candidate) -> bool:
        for gate in self._gates:
            if gate.is_blocked(candidate):
                candidate.request.status = gate.status
                self._waiting.park_request(candidate.request)
                self._kv_transfer.on_parked(candidate.request)
                return True
        return False

    def _admit(self, candidate: Candidate, plan: StepPlan) -> bool:
        """Admit the head of the queue; False, changing nothing, if it has to wait.

        Also returns True if a running request was preempted for it: then it is considered again,
        because the prefix that it found in the cache may be gone.

        0                       num_computed                  num_tokens
        |---its own-or--|            |           |                 |
        |---in cache----|--external--|--num_new--|---later steps---|
        """
        request = candidate.request
        num_computed = candidate.num_computed_tokens + candidate.num_external_tokens
        num_computed = min(num_computed, request.num_tokens - 1)
        if request.num_output_placeholders:
            return False  # preempted; its next input is unknown until the token in flight arrives
        if request in plan.preempted:
            return False  # preempted in this pass, in which it must not take the room back
        if self._fairness.is_behind(request):
            return False
        if candidate.loads_async:
            return self._load(candidate, plan)
        needs_prompt_tokens = self._needs_prompt_tokens(candidate)
        prompt_budget = plan.prompt_budget if needs_prompt_tokens else plan.budget
        if prompt_budget <= 0:
            return False
        if not self._can_run_one_more():
            return self._fairness.preempt_for(request, plan)
        num_missing = request.num_tokens - num_computed
        num_new = self._chunks.first_chunk(num_missing, min(plan.budget, prompt_budget))
        if num_new == 0:
            return False
        if not self._has_room(request, num_new, candidate):
            if self._fairness.preempt_for(request, plan):
                return True
            if candidate.num_external_tokens and not self._running:
                return self._admit(candidate.without_external(), plan)
            self._remember_refusal(candidate, num_new, plan)
            return False
        self._refusal = None
        if request is self._waiting.peek_request():
            self._waiting.pop_request()
        else:
            self._waiting.remove_request(request)
        self._running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed
        if request.scheduled_at is None:
            request.num_cached_tokens = num_computed
        request.record_event(EventType.SCHEDULED, plan.now)
        self._kv_transfer.on_blocks_allocated(candidate)
        plan.admitted.append(request)
        plan.admitted_tokens.append(num_new)
        plan.budget -= num_new
        if needs_prompt_tokens:
            plan.prompt_budget -= num_new
        if num_missing > 1:
            plan.count_prefilling(1, num_new)
        for listener in self._listeners:
            listener.on_admitted(request, num_new)
        return True

    def _load(self, candidate: Candidate, plan: StepPlan) -> bool:
        """Park the head of the queue with blocks for KV to be loaded; False if it has to wait.

        The admission rules apply as to a request that runs at once, because its blocks are taken
        now. If no request runs or loads, whose end would free blocks, queued requests lose their
        blocks: otherwise each might wait for the others' blocks. If even that is not enough, the
        request computes everything, which may need fewer blocks at a time.
        """
        kv_transfer, non_running_blocks = self._kv_transfer, self._non_running_blocks
        others = bool(self._running) or kv_transfer.is_loading
        while not (
            kv_transfer.has_room_to_load(candidate)
            and (not others or self._rules_admit(candidate, 0))
            and self._allocate_blocks(candidate, 0)
        ):
            if non_running_blocks.free_resting():
                continue
            if others:
                return False
            if not non_running_blocks.free_queued(candidate.request):
                return self._admit(candidate.without_external(), plan)
        kv_transfer.begin_load(candidate)
        return True

    def _has_room(self, request: Request, num_new: int, candidate: Candidate) -> bool:
        """Allocate blocks, if the rules admit the request and enough are free or reclaimable."""
        non_running_blocks = self._non_running_blocks
        while not self._fits(num_new, candidate):
            if non_running_blocks.free_resting():
                continue
            if self._running or not non_running_blocks.free_queued(request):
                return False
        return True

    def _fits(self, num_new: int, candidate: Candidate) -> bool:
        if self._running and not self._rules_admit(candidate, num_new):
            return False
        return self._allocate_blocks(candidate, num_new)

    def _rules_admit(self, candidate: Candidate, num_new: int) -> bool:
        """Return whether every rule admits the external tokens and `num_new` tokens after them."""
        num_wanted = candidate.num_external_tokens + num_new
        for rule in self._rules:
            if not rule.admits(candidate.request, num_wanted, candidate.computed):
                return False
        return True

    def _allocate_blocks(self, candidate: Candidate, num_new: int) -> bool:
        request, num_external = candidate.request, candidate.num_external_tokens
        # External tokens may include the last token, which is computed anyway.
        num_with_kv = candidate.num_computed_tokens + num_external
        num_new = min(num_new, request.num_tokens - num_with_kv)
        blocks = self._kv_cache.allocate_slots(
            request, num_new, candidate.computed, num_external_tokens=num_external
        )
        return blocks is not None
