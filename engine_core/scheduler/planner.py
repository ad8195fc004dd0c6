"""The plan of a step: what running requests compute, and which waiting ones are admitted.

Start with `StepPlanner.plan_requests`.

No request starves. A request is admitted only with budget left after every running request was
planned (but for those that defer to it, see below), no more requests run than a step has tokens,
and what a running request needs (the rest of its prompt, then one token) never grows. So running
requests together never need more than a step has, and the order of admission is also fair. For the
same reason fewer requests than --max-num-seqs run if the token budget is smaller.

Drafts are computed only with what is left when each of these has a token, and no request is
preempted for one (`features/speculative_decoding.py`). A request whose draft is being verified is
left out until the result says how many tokens it got; others may be planned ahead. A request that
waits for a grammar mask is left out, too. Requests that defer to another tenant
(`features/fairness.py`) may get nothing for a while, because requests that were served less are
served first. So may one that stands before an image without encoder output
(`features/encoder_inputs.py`), which the workers encode then; those admitted meanwhile keep a token
in each step.

The first waiting request without room ends admission, so no later request overtakes it. If all that
it lacks is prompt tokens of this step, requests whose KV a connector has may pass it, because they
compute none. A request that a feature holds back is parked, and the next one is considered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.admission_rules import rules_of
from engine_core.scheduler.features.base import Candidate, SchedulerFeature, features_with
from engine_core.scheduler.features.encoder_inputs import EncoderInputs
from engine_core.scheduler.features.fairness import TenantFairness
from engine_core.scheduler.features.speculative_decoding import SpeculativeDecoding
from engine_core.scheduler.kv_transfer import KVTransferManager
from engine_core.scheduler.limits import ChunkRule, PrefillThrottle
from engine_core.scheduler.preemption import Preemption
from engine_core.scheduler.request_lifecycle import RequestLifecycle
from engine_core.scheduler.step_plan import Lookup, StepPlan
from proto.messages.engine_io import EventType
from proto.settings.config import SchedulerConfig

MAX_LOOKUPS_PER_STEP: Final = 8
"""Requests after a throttled head that one step looks up in the connector: they may be many."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The first request of the queue found no room, and the conditions of that moment.

    num_missing, num_new: tokens without KV, and how many of them it needed at first. found,
    next_one: hash of the last cached block of its prefix, and of the block after it; empty if there
    is none.

    Another attempt is made once one of these holds:

        no request runs, or an idle one holds blocks
        a running request may be preempted for it (`TenantFairness`)
        more blocks are free, or its first chunk is shorter
        its cached prefix is longer, or shorter: the first chunk then ends at an earlier token

    A refusal is not remembered in four cases: with rules or a connector, which consider more than
    this; with windows, where an earlier block may be lost or a later one found; with images, whose
    outputs decide on the first chunk, too; and in a step that admitted a request, because this one
    may share that request's blocks as a fork in the next step.
    """

    request: Request
    num_missing: int
    num_new: int
    num_free: int
    found: Sequence[bytes]
    next_one: Sequence[bytes]


class StepPlanner:
    """Fills the plan of a step while its tokens, sequences, positions and blocks last.

    awaiting_mask: see `Grammars`. encoder_inputs: None for a model without images.
    """

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        kv_cache: KVCacheManager,
        config: SchedulerConfig,
        chunks: ChunkRule,
        features: Sequence[SchedulerFeature],
        preemption: Preemption,
        fairness: TenantFairness,
        throttle: PrefillThrottle,
        speculation: SpeculativeDecoding,
        kv_transfer: KVTransferManager,
        awaiting_mask: set[int],
        encoder_inputs: EncoderInputs | None,
    ) -> None:
        self._waiting = lifecycle.waiting
        self._running = lifecycle.running
        self._kv_cache = kv_cache
        self._preparing = features_with("begin_admission", features)
        self._blocking = features_with("is_blocked", features)
        self._admitting = features_with("on_admitted", features)
        self._chunks = chunks
        self._max_num_seqs = config.max_num_seqs
        # An image that cannot be cut needs all of its tokens in one step.
        num_whole = 1 if encoder_inputs is None else encoder_inputs.num_whole_tokens
        self._max_running = chunks.max_running(config.max_num_seqs, num_whole)
        self._encoder_inputs = encoder_inputs
        self._rules = rules_of(config, kv_cache, self._running, preemption.watermarks)
        self._awaiting_mask = awaiting_mask
        self._preemption = preemption
        self._waiting_block_holders = preemption.waiting_block_holders
        self._fairness = fairness
        self._throttle = throttle
        self._speculation = speculation
        self._kv_transfer = kv_transfer
        self._refusal: _Refusal | None = None
        self._remembers = (
            not self._rules and not kv_transfer.connected and kv_cache.caches_all_prefixes
        )

    def plan_requests(self, plan: StepPlan) -> None:
        """Plan running requests, then admit waiting ones, if no request was preempted until then.

        Preemptions within `_admit_waiting` do not end it: for another tenant (`preempt_for`), for
        the trial of a suspect (`CrashIsolation`), or for a row of a beam search (`BeamGroups`).
        """
        self._preemption.preempt_above_watermark(plan)
        deferred = self._fairness.order_running()
        if self._encoder_inputs is None:
            plan.prompt_budget = self._prompt_budget(0.0)
        else:
            self._begin_encoding(plan, self._encoder_inputs)
        speculation = self._speculation
        if speculation.is_active:
            speculation.fill_drafts(plan)
        self._plan_running(plan, 0, len(self._running) - len(deferred))
        if not plan.preempted:
            self._admit_waiting(plan)
        self._plan_deferred(plan, deferred)
        if speculation.is_active:
            speculation.clear_drafts()
            speculation.plan_lookahead(plan)
        plan.limit = self.step_limit(plan)

    def step_limit(self, plan: StepPlan) -> str:
        """Return what made a planned step shorter than its token budget; "" if it is full.

        The first of these that applies, in this order:

        preemption     requests were preempted and none was admitted (`plan_requests`,
                       `TenantFairness.must_wait_after_preemption`)
        prompt tokens  decoding requests would wait too long with more of them
                       (`PrefillThrottle.prompt_tokens`, `_plan_running`, `_admit`)

        if a request waits that no feature holds back:

        sequences      --max-num-seqs requests run, or as many as a step has tokens for, beside
                       an image that cannot be cut (`_can_run_one_more`)
        drafts         they take the positions (rows that a step samples) of another request
                       (`_has_position`)
        results        it waits for the result of a step in flight (`_admit`)
        tenants        it waits for others that were served less
                       (`TenantFairness.waits_for_deferred`)
        chunks         its prompt fits in no chunk (--no-enable-chunked-prefill,
                       `ChunkRule.first_chunk`), or an image that cannot be cut does not
                       (`EncoderInputs.cut_chunk`)
        blocks         the pool has no block, or no slot for a recurrent state, for it, or a rule
                       keeps it (`_has_room`, `_load`, admission_rules.py:rules_of)

        if none does:

        chunks         a prompt has as many tokens as one may (--long-prefill-token-threshold,
                       `_plan_running`)
        blocks         a running request lacks them and may preempt none (`_plan_running`)
        encoder        a request stands before an image whose encoder output is not complete
                       (`EncoderInputs.cut_chunk`)
        blocked        features hold all waiting requests back (`_is_blocked`): for each
                       RequestStatus.WAITING_FOR_… one
        results        running requests wait for the result of a step in flight, or for a mask
                       (`_plan_running`)
        requests       all have their tokens, or end before an image, and none waits

        While the engine is paused nothing is planned, and `Scheduler.schedule` says "pause". What
        else shortens a step has no word: a draft is dropped for lack of blocks (`_plan_running`),
        only MAX_LOOKUPS_PER_STEP transferred requests are looked at (`_admit_transferred`), a
        request that this step has preempted is not admitted by it (`_admit`), a prompt leaves
        tokens to requests that need none in the end (`EncoderInputs.leaves_room`), and a row is
        taken out after planning because its mask is late (`Scheduler.rewind_rows`).
        """
        waiting, chunks = self._waiting, self._chunks
        if plan.budget <= 0:
            return ""
        if plan.preempted and not plan.admitted:
            return "preemption"
        if plan.prompt_budget <= 0 and self._lacks_prompt_tokens(plan):
            return "prompt tokens"
        if waiting.num_ready:
            head = waiting.peek_request()
            if not self._can_run_one_more():
                return "sequences"
            if not self._has_position(plan):
                return "drafts"
            if head.num_output_placeholders:
                return "results"
            if self._fairness.waits_for_deferred(head):
                return "tenants"
            return "chunks" if plan.lacks_tokens else "blocks"
        if (
            plan.num_prefilling
            and chunks.longest_chunk < chunks.token_budget
            and chunks.longest_chunk in chain(plan.continued_tokens, plan.admitted_tokens)
        ):
            return "chunks"
        if plan.lacks_blocks:
            return "blocks"
        if self._encoder_inputs is not None and self._encoder_inputs.holds_any:
            return "encoder"
        if len(waiting):
            return "blocked"
        num_planned = len(plan.continued) + len(plan.admitted)
        return "results" if num_planned < len(self._running) else "requests"

    def _lacks_prompt_tokens(self, plan: StepPlan) -> bool:
        """Whether a request has prompt tokens that the step does not compute."""
        if self._waiting.num_ready:
            return True
        planned = {
            request.seq_id: num_tokens
            for request, num_tokens in chain(
                zip(plan.continued, plan.continued_tokens, strict=True),
                zip(plan.admitted, plan.admitted_tokens, strict=True),
            )
        }
        return any(
            request.is_prefilling
            and request.num_tokens - request.num_computed_tokens > planned.get(request.seq_id, 0)
            for request in self._running
        )

    def check_plan(self, plan: StepPlan) -> None:
        """Assert that a complete plan is within the limits of a step."""
        num_scheduled = len(plan.continued) + len(plan.admitted)
        assert num_scheduled <= len(self._running), "more is scheduled than runs"
        assert len(self._running) <= self._max_num_seqs, "more runs than may"
        assert num_scheduled + plan.num_draft_tokens <= self._speculation.max_positions, (
            "more positions are sampled than the workers have memory for"
        )
        assert plan.budget >= 0, "more tokens are scheduled than a step has"
        num_tokens = sum(plan.continued_tokens) + sum(plan.admitted_tokens)
        assert num_tokens == self._chunks.token_budget - plan.budget, "the budget was not kept"

    def _prompt_budget(self, encoder_seconds: float) -> int:
        """Return how many prompt tokens the step may have, with decoding requests or without."""
        num_running, num_prefilling = len(self._running), self._fairness.num_prefilling
        num_startable = min(self._waiting.num_ready, max(0, self._max_running - num_running))
        return self._throttle.prompt_tokens(
            num_running - num_prefilling, num_running + num_startable, encoder_seconds
        )

    def _begin_encoding(self, plan: StepPlan, encoder_inputs: EncoderInputs) -> None:
        """Begin the encoder work of the step, and make room for an image that cannot be cut.

        Prompts have the time that it leaves.
        """
        num_decoding = len(self._running) - self._fairness.num_prefilling
        seconds = encoder_inputs.begin_step(
            self._throttle.spare_seconds(num_decoding), self._fairness.num_prefilling
        )
        least = min(encoder_inputs.least_prompt_tokens, plan.budget)
        plan.prompt_budget = max(self._prompt_budget(seconds), least)

    # Running requests

    def _plan_running(
        self, plan: StepPlan, position: int, end: int, *, may_preempt: bool = True
    ) -> None:
        """Plan running requests until the budget or the range of the list ends.

        Preemption may remove requests from the list, before the position and after it. Most of
        the time of schedule() is spent in this loop, so what it reads often is in local variables.
        """
        running, longest_chunk = self._running, self._chunks.longest_chunk
        awaiting_mask = self._awaiting_mask
        allocate_slots, encoder_inputs = self._kv_cache.allocate_slots, self._encoder_inputs
        budget, prompt_budget = plan.budget, plan.prompt_budget
        while position < end and budget > 0:
            request = running[position]
            position += 1
            if awaiting_mask and request.seq_id in awaiting_mask:
                continue
            num_tokens = len(request.all_token_ids)
            num_drafts = len(request.spec_token_ids)
            if num_drafts or request.num_output_placeholders:
                if request.num_output_placeholders > 1:
                    continue  # a draft is being verified
                num_tokens = request.num_tokens_ahead
            num_missing = num_tokens - request.num_computed_tokens
            if num_missing <= 0:
                continue
            num_new = 1 if num_missing == 1 else min(num_missing, longest_chunk, budget)
            is_prefilling = num_missing > 1 + num_drafts
            if is_prefilling:
                num_new = min(num_new, prompt_budget)
                if num_new <= 0:
                    continue  # decoding requests after it may still be planned
            if encoder_inputs is not None and (request.mm_end or encoder_inputs.leaves_room):
                num_after = end - position if encoder_inputs.leaves_room else 0
                num_new = self._image_chunk(request, num_new, budget - num_after)
                if num_new == 0:
                    continue
            blocks = allocate_slots(request, num_new)
            while blocks is None:
                if num_drafts:  # no request is preempted for a draft
                    num_drafts, num_new = 0, 1
                    request.spec_token_ids.clear()
                elif not may_preempt:
                    plan.lacks_blocks = True
                    break
                else:
                    plan.budget, plan.prompt_budget = budget, prompt_budget
                    index = self._preemption.preempt_one(plan, position - 1)
                    position -= index < position
                    end -= index < end
                    budget, prompt_budget = plan.budget, plan.prompt_budget
                    if request.status is not RequestStatus.RUNNING:
                        break  # it was preempted itself
                blocks = allocate_slots(request, num_new)
            else:
                if num_drafts:
                    plan.pack_draft(request, num_new)
                plan.continued.append(request)
                plan.continued_tokens.append(num_new)
                plan.continued_blocks.append(blocks)
                budget -= num_new
                if is_prefilling:
                    prompt_budget -= num_new
                    plan.count_prefilling(1, num_new)
        plan.budget, plan.prompt_budget = budget, prompt_budget

    def _image_chunk(self, request: Request, num_new: int, room: int) -> int:
        """Return how many of `num_new` tokens a running request computes; 0 for none.

        room: tokens that its prompt may have (`EncoderInputs.leaves_room`).
        """
        assert self._encoder_inputs is not None
        num_computed = request.num_computed_tokens
        if request.is_prefilling:
            num_new = max(0, min(num_new, room))
        if num_new and num_computed < request.mm_end:
            most = min(self._chunks.longest_chunk, room)
            num_new = self._encoder_inputs.cut_chunk(request, num_computed, num_new, most)
        return num_new

    def _plan_deferred(self, plan: StepPlan, deferred: Sequence[Request]) -> None:
        """Plan the deferred requests with what is left of the step.

        They preempt no request if one was admitted, because it may be the one that they deferred
        to. They are next to the admitted ones, which are last in the running list.
        """
        num_deferred = sum(request.status is RequestStatus.RUNNING for request in deferred)
        if num_deferred:
            end = len(self._running) - len(plan.admitted)
            self._plan_running(plan, end - num_deferred, end, may_preempt=not plan.admitted)

    # Waiting requests

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Admit requests from the head of the queue, until one has to wait for room."""
        for feature in self._preparing:
            feature.begin_admission(plan)
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
            if self._is_blocked(candidate, plan):
                continue
            if (
                plan.prompt_budget <= 0
                and not candidate.loads_async
                and self._needs_prompt_tokens(candidate)
            ):
                self._kv_transfer.note_without_kv(request)
                _note_lookup(candidate, plan)
                self._admit_transferred(plan)
                return
            if not self._admit(candidate, plan):
                _note_lookup(candidate, plan)
                return

    def _admit_transferred(self, plan: StepPlan) -> None:
        """Admit requests after a head that waits for prompt tokens, or begin to load for them.

        Only requests whose KV the connector has, or has loaded: they compute a block at most. They
        cannot starve the head, because they use no prompt tokens, and it is first when there are
        some again.
        """
        kv_transfer = self._kv_transfer
        if self._waiting.num_ready <= kv_transfer.num_without_kv:
            return
        num_lookups = 0
        for request in self._waiting:
            if request.status.is_blocked or kv_transfer.is_without_kv(request):
                continue
            if plan.budget <= 0 or not self._has_position(plan) or not self._can_run_one_more():
                return
            if not kv_transfer.is_loaded(request):
                num_lookups += 1
                if num_lookups > MAX_LOOKUPS_PER_STEP:
                    return
            candidate = Candidate(request, self._kv_cache)
            if self._is_blocked(candidate, plan):
                continue
            if self._needs_prompt_tokens(candidate):
                kv_transfer.note_without_kv(request)
                _note_lookup(candidate, plan)
            elif not self._admit(candidate, plan):
                _note_lookup(candidate, plan)
                return

    def _has_budget(self, plan: StepPlan) -> bool:
        """Return whether the step has tokens for the head of the queue.

        With a connector the head may need no prompt tokens of this step.
        """
        return plan.budget > 0 and (plan.prompt_budget > 0 or self._kv_transfer.connected)

    def _has_position(self, plan: StepPlan) -> bool:
        """Return whether drafts leave a position for one more request.

        True also if no more may run: one is then admitted only in place of another, and takes its
        position.
        """
        num_running = len(self._running)
        return num_running >= self._max_running or (
            num_running + plan.max_draft_tokens < self._speculation.max_positions
        )

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
            and not self._waiting_block_holders.any_idle
            and not self._fairness.may_preempt_for(request)
            and kv_cache.num_available_blocks <= refusal.num_free
            and self._first_chunk(refusal.num_missing, plan) >= refusal.num_new
            and all(map(kv_cache.is_cached, refusal.found))
            and not any(map(kv_cache.is_cached, refusal.next_one))
        )

    def _first_chunk(self, num_missing: int, plan: StepPlan) -> int:
        return self._chunks.first_chunk(num_missing, min(plan.budget, plan.prompt_budget))

    def _remember_refusal(self, candidate: Candidate, num_new: int, plan: StepPlan) -> None:
        request, num_computed = candidate.request, candidate.num_computed_tokens
        if not self._remembers or plan.admitted or num_computed < request.mm_end:
            return
        num_found = num_computed // self._kv_cache.block_size
        num_dropped = 0 if request.num_computed_tokens else self._kv_cache.num_dropped_blocks
        end = num_found + num_dropped  # of the blocks that were cached
        self._refusal = _Refusal(
            request,
            num_missing=request.num_tokens - num_computed,
            num_new=num_new,
            num_free=self._kv_cache.num_available_blocks,
            found=request.block_hashes[end - 1 : end] if num_found else (),
            next_one=request.block_hashes[end : end + 1],
        )

    def _is_blocked(self, candidate: Candidate, plan: StepPlan) -> bool:
        for feature in self._blocking:
            if feature.is_blocked(candidate):
                self._park(candidate, feature.status, plan)
                return True
        return False

    def _park(self, candidate: Candidate, status: RequestStatus, plan: StepPlan) -> None:
        candidate.request.status = status
        self._waiting.park_request(candidate.request)
        self._kv_transfer.on_parked(candidate.request)
        _note_lookup(candidate, plan)

    def _admit(self, candidate: Candidate, plan: StepPlan) -> bool:
        """Admit a waiting request, most often the head of the queue; False if it has to wait.

        Also returns True if a running request was preempted for it: then it is considered again,
        because the prefix that it found in the cache may be gone. And if it was parked, because all
        that it could compute now is an image without encoder output.

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
        if self._fairness.waits_for_deferred(request):
            return False
        if self._fairness.must_wait_after_preemption(request, plan):
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
            plan.lacks_tokens = True
            return False
        encoder_inputs = self._encoder_inputs
        if encoder_inputs is not None and num_computed < request.mm_end:
            longest = min(self._chunks.longest_chunk, plan.budget)
            num_new = encoder_inputs.first_chunk(request, num_computed, num_new, longest)
            if encoder_inputs.is_parked(request):
                self._park(candidate, encoder_inputs.status, plan)
                return True
            if num_new == 0:
                plan.lacks_tokens = True
                return False
        if not self._has_room(request, num_new, candidate):
            if self._fairness.preempt_for(request, plan):
                return True
            if candidate.num_external_tokens and not self._running:
                candidate.drop_external()
                return self._admit(candidate, plan)
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
        for feature in self._admitting:
            feature.on_admitted(request, num_new)
        return True

    def _load(self, candidate: Candidate, plan: StepPlan) -> bool:
        """Park a waiting request with blocks for KV to be loaded; False if it has to wait.

        The admission rules apply as to a request that runs at once, because its blocks are taken
        now. If no request runs or loads, whose end would free blocks, pending requests lose their
        blocks: otherwise each might wait for the others' blocks. If even that is not enough, the
        request computes everything, which may need fewer blocks at a time.
        """
        kv_transfer, waiting_block_holders = self._kv_transfer, self._waiting_block_holders
        others = bool(self._running) or kv_transfer.is_loading
        while not (
            kv_transfer.has_room_to_load(candidate)
            and (not others or self._rules_admit(candidate, 0))
            and self._allocate_blocks(candidate, 0)
        ):
            if waiting_block_holders.free_idle():
                continue
            if others:
                return False
            if not waiting_block_holders.free_pending(candidate.request):
                candidate.drop_external()
                return self._admit(candidate, plan)
        _note_lookup(candidate, plan)
        kv_transfer.begin_load(candidate)
        return True

    def _has_room(self, request: Request, num_new: int, candidate: Candidate) -> bool:
        """Allocate blocks, if the rules admit the request and enough are free or reclaimable."""
        waiting_block_holders = self._waiting_block_holders
        while not (
            (not self._running or self._rules_admit(candidate, num_new))
            and self._allocate_blocks(candidate, num_new)
        ):
            if waiting_block_holders.free_idle():
                continue
            if self._running or not waiting_block_holders.free_pending(request):
                return False
        return True

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


def _note_lookup(candidate: Candidate, plan: StepPlan) -> None:
    """Note what was found for a request that this step does not admit."""
    if candidate.is_looked_up:
        plan.lookups.append(
            Lookup(
                candidate.request,
                candidate.num_computed_tokens,
                candidate.num_external_tokens,
                candidate.loads_async,
            )
        )
