"""The second half of a step: requests that wait.

Owns the memory of the last refusal; moves requests from the head of the queue to
the end of the running list. The first one without room ends the pass, so that
nobody overtakes it; one that a gate holds is set aside, and the next one's turn
has come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.manager import ComputedBlocks, KVCacheManager
from engine_core.queues.base import RequestQueue
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.admission_rules import AdmissionRule
from engine_core.scheduler.chunking import ChunkRule
from engine_core.scheduler.gates import Candidate, Gate
from engine_core.scheduler.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The head of the line found no room; how things stood then.

    num_missing, num_new: tokens without KV, and those of them it wanted to begin with.
    last_hit, hit_hash: the last block of its cached prefix and the content of that;
    the null block for none.

    Until the pool is freer, or fewer tokens are wanted, or that prefix is gone (a chunk
    that begins earlier needs fewer blocks), looking again is in vain: a longer cached
    prefix helps only with blocks that someone else holds, and those were free before.
    """

    request: Request
    num_missing: int
    num_new: int
    num_free: int
    last_hit: int
    hit_hash: object


class AdmissionPass:
    """Admits waiting requests while budget, seats and blocks last."""

    def __init__(
        self,
        waiting: RequestQueue,
        running: list[Request],
        kv_cache: KVCacheManager,
        chunks: ChunkRule,
        max_num_seqs: int,
        rules: Sequence[AdmissionRule],
        gates: Sequence[Gate],
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._kv_cache = kv_cache
        self._chunks = chunks
        self._max_num_seqs = max_num_seqs
        self._rules = rules
        self._gates = gates
        self._refusal: _Refusal | None = None

    def run(self, plan: StepPlan) -> None:
        for gate in self._gates:
            gate.begin(plan)
        waiting, running = self._waiting, self._running
        while plan.budget > 0 and waiting.num_ready and len(running) < self._max_num_seqs:
            request = waiting.peek()
            if self._refusal is not None and self._is_refused(request, self._refusal, plan):
                return
            candidate = Candidate(request, self._kv_cache)
            if not self._is_held(candidate) and not self._admit(candidate, plan):
                return

    def _is_refused(self, request: Request, refusal: _Refusal, plan: StepPlan) -> bool:
        return (
            refusal.request is request
            and bool(self._running)
            and self._kv_cache.num_free_blocks <= refusal.num_free
            and self._chunks.first_chunk(refusal.num_missing, plan.budget) >= refusal.num_new
            and self._kv_cache.pool.hashes[refusal.last_hit] == refusal.hit_hash
        )

    def _refuse(self, candidate: Candidate, num_new: int) -> None:
        request, computed, pool = candidate.request, candidate.computed, self._kv_cache.pool
        last_hit = computed.block_ids[0][-1] if computed.num_tokens else NULL_BLOCK
        self._refusal = _Refusal(
            request,
            num_missing=request.num_tokens - computed.num_tokens,
            num_new=num_new,
            num_free=pool.num_free,
            last_hit=last_hit,
            hit_hash=pool.hashes[last_hit],
        )

    def _is_held(self, candidate: Candidate) -> bool:
        for gate in self._gates:
            if gate.holds(candidate):
                candidate.request.status = gate.status
                self._waiting.set_aside(candidate.request)
                return True
        return False

    def _admit(self, candidate: Candidate, plan: StepPlan) -> bool:
        """Take in the head of the queue; False, with nothing changed, if it has to wait.

        0               found                    num_tokens
        |---in cache----|--num_new--|---later steps---|
        """
        request, computed = candidate.request, candidate.computed
        num_missing = request.num_tokens - computed.num_tokens
        num_new = self._chunks.first_chunk(num_missing, plan.budget)
        if num_new == 0:
            return False
        if not self._has_room(request, num_new, computed):
            self._refuse(candidate, num_new)
            return False
        self._refusal = None
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
        for gate in self._gates:
            gate.admitted(request, num_new)
        return True

    def _has_room(self, request: Request, num_new: int, computed: ComputedBlocks) -> bool:
        """Allocates if the rules allow it and there are blocks."""
        if self._running:
            for rule in self._rules:
                if not rule.admits(request, num_new, computed):
                    return False
        return self._kv_cache.allocate_slots(request, num_new, computed) is not None
