"""The first half of a step: requests that are already running.

No request starves. A request is admitted only with budget left after every running request was
planned, no more requests run than a step has tokens, and what a running request needs (the rest of
its prompt, then one token) never grows. So running requests together never need more than a step
has, and the order of admission is also fair. For the same reason fewer requests than --max-num-seqs
run if the token budget is smaller.

Drafts are computed only with what is left when each of these has a token, and no request is
preempted for one (`speculative_decoding.py`). A request whose draft is being verified is left out
until the result says how many tokens it got; others may be planned ahead. A request that waits for
a grammar mask is left out, too.

Requests that defer to another tenant (`fairness.py`) are planned after the second half. They may
get nothing for a while, because requests that were served less are served first.
"""

from collections.abc import Sequence

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.limits import ChunkRule
from engine_core.scheduler.preemption import Preemption
from engine_core.scheduler.step_plan import StepPlan


class RunningPass:
    """Plans tokens and blocks of running requests, in the order of their admission."""

    def __init__(
        self,
        running: list[Request],
        kv_cache: KVCacheManager,
        chunks: ChunkRule,
        preemption: Preemption,
        held: set[int],
    ) -> None:
        """held: sequences that wait for a mask (`TokenConstraints`)."""
        self._held = held
        self._running = running
        self._kv_cache = kv_cache
        self._longest_chunk = chunks.longest_chunk
        self._preemption = preemption

    def plan_running(self, plan: StepPlan, deferred: Sequence[Request]) -> None:
        """Plan the running requests, except the deferred ones at the end of the list."""
        self._plan_range(plan, 0, len(self._running) - len(deferred))

    def plan_deferred(self, plan: StepPlan, deferred: Sequence[Request]) -> None:
        """Plan the deferred requests with what is left of the step.

        They preempt no request if one was admitted, because it may be the one that they deferred
        to.
        """
        deferred = [request for request in deferred if request.status is RequestStatus.RUNNING]
        if deferred and plan.admitted:
            self._plan_without_preemption(plan, deferred)
        elif deferred:
            end = len(self._running)
            self._plan_range(plan, end - len(deferred), end)

    def _plan_range(self, plan: StepPlan, position: int, end: int) -> None:
        """Plan running requests until the budget or the range of the list ends.

        Preemption may remove requests from the list, before the position and behind it. Most of
        the time of schedule() is spent in this loop, so what it reads often is in local variables.
        """
        running, longest_chunk, held = self._running, self._longest_chunk, self._held
        allocate_slots = self._kv_cache.allocate_slots
        budget, prompt_budget = plan.budget, plan.prompt_budget
        while position < end and budget > 0:
            request = running[position]
            position += 1
            if held and request.seq_id in held:
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
            is_prefilling = num_missing > 1 and num_missing > 1 + num_drafts
            if is_prefilling:
                num_new = min(num_new, prompt_budget)
                if num_new <= 0:
                    continue  # decoding requests behind it may still be planned
            blocks = allocate_slots(request, num_new)
            while blocks is None:
                if num_drafts:  # no request is preempted for a draft
                    num_drafts, num_new = 0, 1
                    request.spec_token_ids.clear()
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

    def _plan_without_preemption(self, plan: StepPlan, deferred: Sequence[Request]) -> None:
        for request in deferred:
            if request.num_output_placeholders > 1 or request.seq_id in self._held:
                continue  # a draft is being verified, or a mask computed
            num_missing = request.num_tokens_ahead - request.num_computed_tokens
            num_new = min(num_missing, self._longest_chunk, plan.budget)
            is_prefilling = request.is_prefilling
            if is_prefilling:
                num_new = min(num_new, plan.prompt_budget)
            blocks = self._kv_cache.allocate_slots(request, num_new) if num_new > 0 else None
            if blocks is None and num_new > 1 and request.spec_token_ids:
                num_new = 1
                blocks = self._kv_cache.allocate_slots(request, num_new)
            if blocks is not None:
                if request.spec_token_ids:
                    plan.pack_draft(request, num_new)
                plan.continued.append(request)
                plan.continued_tokens.append(num_new)
                plan.continued_blocks.append(blocks)
                plan.budget -= num_new
                if is_prefilling:
                    plan.prompt_budget -= num_new
                    plan.count_prefilling(1, num_new)
