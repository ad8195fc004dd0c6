"""The second half of a step: requests that wait.

Owns nothing; moves requests from the head of the queue to the end of the running
list. The first one that does not fit ends the pass, so that nobody overtakes.
"""

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.queues.base import RequestQueue
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.chunking import ChunkRule
from engine_core.scheduler.step_plan import StepPlan


class AdmissionPass:
    """Admits waiting requests while budget, seats and blocks last."""

    def __init__(
        self,
        waiting: RequestQueue,
        running: list[Request],
        kv_cache: KVCacheManager,
        chunks: ChunkRule,
        max_num_seqs: int,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._kv_cache = kv_cache
        self._chunks = chunks
        self._max_num_seqs = max_num_seqs

    def run(self, plan: StepPlan) -> None:
        while plan.budget > 0 and self._waiting and len(self._running) < self._max_num_seqs:
            if not self._admit(self._waiting.peek(), plan):
                return

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Take in the head of the queue; False, with nothing changed, if it has to wait.

        0               found                    num_tokens
        |---in cache----|--num_new--|---later steps---|
        """
        computed = self._kv_cache.get_computed_blocks(request)
        num_missing = request.num_tokens - computed.num_tokens
        num_new = self._chunks.first_chunk(num_missing, plan.budget)
        if num_new == 0:
            return False
        if self._kv_cache.allocate_slots(request, num_new, computed) is None:
            return False
        self._waiting.pop()
        self._running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = computed.num_tokens
        if request.scheduled_at is None:
            request.scheduled_at = plan.now
            request.num_cached_tokens = computed.num_tokens
        plan.admitted.append(request)
        plan.admitted_tokens.append(num_new)
        plan.budget -= num_new
        return True
