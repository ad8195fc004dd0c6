"""The first half of a step: requests that are already running.

Owns nothing; changes the running list only through preemption.

Why no request starves: a request is admitted only with budget left after every
running request was served, there are no more seats than tokens in a step, and what a
running request asks for (the rest of its prompt, then one token) never grows. So the
running requests together never ask for more than the step has, and the order of
admission is also fair. This is why fewer requests than --max-num-seqs run when the token
budget is smaller.

Those that give way to another tenant (`fairness.py`) are served behind the second
half. They may go without, for a while: what they wait for are requests that were
served less and are served now.
"""

from collections.abc import Sequence

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.limits import ChunkRule
from engine_core.scheduler.preemption import Preemption
from engine_core.scheduler.step_plan import StepPlan


class RunningPass:
    """Lets running requests catch up, in the order in which they were admitted."""

    def __init__(
        self,
        running: list[Request],
        kv_cache: KVCacheManager,
        chunks: ChunkRule,
        preemption: Preemption,
    ) -> None:
        self._running = running
        self._kv_cache = kv_cache
        self._longest_chunk = chunks.longest_chunk
        self._preemption = preemption

    def run(self, plan: StepPlan, late: Sequence[Request]) -> None:
        """Plan the running requests but for those at the end that are to be served late."""
        self._run(plan, 0, len(self._running) - len(late))

    def run_late(self, plan: StepPlan, late: Sequence[Request]) -> None:
        """Plan the rest with what is left.

        Where somebody was admitted they take no blocks from anyone: it may be the
        one that they have given way to.
        """
        late = [each for each in late if each.status is RequestStatus.RUNNING]
        if late and plan.admitted:
            self._run_without_preemption(plan, late)
        elif late:
            end = len(self._running)
            self._run(plan, end - len(late), end)

    def _run(self, plan: StepPlan, position: int, end: int) -> None:
        """Plan running requests until the budget or the range of the list ends.

        The list may lose requests meanwhile, in front of the position and behind it.
        Most of schedule() is this loop; what it reads often is in local names.
        """
        running, longest_chunk = self._running, self._longest_chunk
        allocate_slots = self._kv_cache.allocate_slots
        budget, prompt_budget = plan.budget, plan.prompt_budget
        while position < end and budget > 0:
            request = running[position]
            position += 1
            num_tokens = len(request.all_token_ids)
            if request.spec_token_ids or request.num_output_placeholders:
                num_tokens = request.num_tokens_ahead
            num_missing = num_tokens - request.num_computed_tokens
            if num_missing <= 0:
                continue
            num_new = 1 if num_missing == 1 else min(num_missing, longest_chunk, budget)
            is_prompt = num_missing > 1 and not request.spec_token_ids
            if is_prompt:
                num_new = min(num_new, prompt_budget)
                if num_new <= 0:
                    continue  # decoding requests behind it may still run
            blocks = allocate_slots(request, num_new)
            while blocks is None:
                plan.budget, plan.prompt_budget = budget, prompt_budget
                index = self._preemption.preempt_one(plan, position - 1)
                position -= index < position
                end, budget, prompt_budget = end - (index < end), plan.budget, plan.prompt_budget
                if request.status is not RequestStatus.RUNNING:
                    break  # it gave way itself
                blocks = allocate_slots(request, num_new)
            else:
                plan.continued.append(request)
                plan.continued_tokens.append(num_new)
                plan.continued_blocks.append(blocks)
                budget -= num_new
                if is_prompt:
                    prompt_budget -= num_new
        plan.budget, plan.prompt_budget = budget, prompt_budget

    def _run_without_preemption(self, plan: StepPlan, late: Sequence[Request]) -> None:
        for request in late:
            num_missing = request.num_tokens_ahead - request.num_computed_tokens
            num_new = min(num_missing, self._longest_chunk, plan.budget)
            if num_missing > 1:
                num_new = min(num_new, plan.prompt_budget)
            blocks = self._kv_cache.allocate_slots(request, num_new) if num_new > 0 else None
            if blocks is not None:
                plan.continued.append(request)
                plan.continued_tokens.append(num_new)
                plan.continued_blocks.append(blocks)
                plan.budget -= num_new
                plan.prompt_budget -= num_new if num_missing > 1 else 0
