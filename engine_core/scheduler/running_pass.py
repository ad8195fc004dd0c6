"""The first half of a step: requests that are already running.

Owns nothing; changes the running list only through preemption.

Why nobody starves: a request is admitted only with budget left after every
running request was served, and what a running request asks for (the rest of its
prompt, then one token) never grows. So the running requests together never ask
for more than the step has, and the order of admission is also fair. This is why
fewer requests than --max-num-seqs run when the token budget is smaller.
"""

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.chunking import ChunkRule
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

    def run(self, plan: StepPlan) -> None:
        """Plan the running requests until the budget or the list ends.

        The list may lose requests meanwhile, in front of the position and behind it.
        Most of schedule() is this loop; what it reads often is in local names.
        """
        running, longest_chunk = self._running, self._longest_chunk
        allocate_slots = self._kv_cache.allocate_slots
        position, end, budget = 0, len(running), plan.budget
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
            blocks = allocate_slots(request, num_new)
            while blocks is None:
                plan.budget = budget
                if self._preemption.evict_one(plan, position - 1) < position:
                    position -= 1
                end, budget = len(running), plan.budget
                if request.status is not RequestStatus.RUNNING:
                    break  # it gave way itself
                blocks = allocate_slots(request, num_new)
            else:
                plan.continued.append(request)
                plan.continued_tokens.append(num_new)
                plan.continued_blocks.append(blocks)
                budget -= num_new
        plan.budget = budget
