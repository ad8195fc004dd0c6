"""Taking the blocks of a running request away, to compute it again later.

Owns the choice of the victim. Nothing is copied out: tokens and counters stay in
the Request, and what the prefix cache still holds when it comes back is not
computed twice.
"""

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.queues.base import RequestQueue
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.step_plan import StepPlan


class Preemption:
    """First come, first served: the request admitted last is the first to go.

    In one step victims stand behind the request that needs room, or are that
    request itself; none of them has been planned yet.
    """

    def __init__(
        self, waiting: RequestQueue, running: list[Request], kv_cache: KVCacheManager
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._kv_cache = kv_cache

    def evict_one(self, plan: StepPlan) -> Request:
        """Preempt one running request and return it."""
        victim = self._running.pop()
        self._kv_cache.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.preempted_at.append(plan.now)
        self._waiting.restore(victim)
        plan.preempted.append(victim)
        return victim
