"""Taking the blocks of a running request away, to compute it again later.

Owns the way back into the queue; who gives way say the `Victims`. Nothing is copied
out: tokens and counters stay in the Request, and what the prefix cache still
holds when it comes back is not computed twice.
"""

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.queues.base import RequestQueue
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.idle_blocks import IdleBlocks
from engine_core.scheduler.pressure import Pressure
from engine_core.scheduler.step_plan import StepPlan
from engine_core.scheduler.victims import Victims, index_of


class Preemption:
    """Makes room: first with blocks that nobody uses now, then one running request at a time."""

    def __init__(
        self,
        victims: Victims,
        waiting: RequestQueue,
        running: list[Request],
        kv_cache: KVCacheManager,
        pressure: Pressure,
        idle_blocks: IdleBlocks,
    ) -> None:
        self._victims = victims
        self._waiting = waiting
        self._running = running
        self._kv_cache = kv_cache
        self._pressure = pressure
        self._idle_blocks = idle_blocks

    def relieve(self, plan: StepPlan) -> None:
        """Before anyone is planned: make room while the pool is too full, but keep the last."""
        idle_blocks = self._idle_blocks
        while self._pressure.too_high() and (len(self._running) > 1 or idle_blocks.any_at_rest):
            self.evict_one(plan, 0)

    def evict_one(self, plan: StepPlan, num_visited: int) -> int:
        """Preempt one running request; returns the index at which it stood.

        Where blocks are idle their holder loses them, and all that run stay: then the
        index is that behind the last. The only one that runs gives way to nobody.

        num_visited: running requests that the plan may have served, from the first on.
        A victim that the plan has already served is taken out of it: its tokens go
        back to the budget, and blocks that only this step would have filled are no
        longer findable.
        """
        num_running = len(self._running)
        if self._idle_blocks.take_from_rest():
            return num_running
        if num_running == 1 and self._idle_blocks.take_from_line(self._running[0]):
            return num_running
        victim = self._victims.first()
        assert victim is not None, "nobody runs"
        index = index_of(self._running, victim)
        del self._running[index]
        if index < num_visited and plan.withdraw(victim):
            self._kv_cache.withdraw(victim, victim.num_computed_tokens)
        self._send_back(victim, plan.now)
        plan.preempted.append(victim)
        return index

    def evict(self, victim: Request, plan: StepPlan) -> None:
        """Preempt this running request, which may be in the plan already."""
        del self._running[index_of(self._running, victim)]
        if plan.withdraw(victim):
            self._kv_cache.withdraw(victim, victim.num_computed_tokens)
        self._send_back(victim, plan.now)
        plan.preempted.append(victim)

    def evict_running(self, plan: StepPlan) -> None:
        """Preempt everyone, the last one first."""
        for victim in self._running[::-1]:
            self.evict(victim, plan)

    def evict_all(self, now: float) -> list[Request]:
        """Between two steps: nobody keeps a block. Returns those that ran, the last one first."""
        self._idle_blocks.take_all()
        victims = self._running[::-1]
        self._running.clear()
        for victim in victims:
            self._send_back(victim, now)
        return victims

    def _send_back(self, victim: Request, now: float) -> None:
        self._victims.leave(victim)
        self._kv_cache.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.spec_token_ids.clear()
        victim.num_preemptions += 1
        victim.preempted_at.append(now)
        self._waiting.restore(victim)
