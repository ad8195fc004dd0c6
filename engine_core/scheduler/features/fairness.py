"""Fairness among the running requests of several tenants.

Requests of a tenant that was served more defer to a request of a tenant that was served less:

    tokens of a step    prompts being computed go to the end of the step, after requests that it
                        admits, and take what is left; so do decoding requests, while they would
                        delay a prompt by more than one step in all
    sequences, blocks   running requests are preempted one after another, but only for a request
                        whose tenant is behind by more tokens than this request has. This
                        prevents preemption thrashing: what a preempted request computes again
                        is charged to no tenant (`TenantUsage`), so that its tenant stays behind,
                        and the request keeps its blocks, until its loss is made good

A decoding request gets its token in every step, unless it is preempted or defers to a long prompt
of a tenant that is behind by more than all of that prompt's tokens. With requests of one tenant
this costs nothing; without prompts being computed, only a look at the head of the queue.

`TenantUsage` counts what each tenant was served.
"""

from collections.abc import Sequence
from typing import Final

from engine_core.request import Request
from engine_core.scheduler.features.base import SchedulerFeature
from engine_core.scheduler.features.tenant_usage import TenantUsage
from engine_core.scheduler.limits import ChunkRule
from engine_core.scheduler.preemption import Preemption, PreemptionOrder
from engine_core.scheduler.queues.policies import FairSchedulingPolicy
from engine_core.scheduler.request_lifecycle import RequestLifecycle
from engine_core.scheduler.step_plan import StepPlan

STEPS_FOR_DECODES: Final = 1
"""Number of steps by which decoding requests may delay a prompt, compared to an idle server."""


class TenantFairness(SchedulerFeature):
    """Orders prompts among tenants, and preempts for a tenant that was served less."""

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        usage: TenantUsage,
        policy: FairSchedulingPolicy,
        preemption_order: PreemptionOrder,
        preemption: Preemption,
        chunks: ChunkRule,
    ) -> None:
        self._usage = usage
        self._policy = policy
        self._preemption_order = preemption_order
        self._waiting = lifecycle.waiting
        self._running = lifecycle.running
        self._preemption = preemption
        self._chunks = chunks
        self._had_several = False  # several tenants had requests in the last step
        self._deferred: Sequence[Request] = ()
        self._preempted_tenants: set[int] = set()  # in this step, for other tenants

    def order_running(self) -> Sequence[Request]:
        """Order the running list for a step; return the requests at its end that defer.

            | decoding | prompts, least served first | deferred |

        Prompts come after all decoding requests, so a prompt that takes all that is left of a step
        takes it from prompts only. If a prompt would get too few tokens, decoding requests of other
        tenants defer to it:

            | decoding | prompts of its tenant | decoding that defer, prompts | deferred |
            | decoding | prompts, least served first | it, if it waits | decoding that defer, … |
        """
        usage = self._usage
        usage.begin_step()
        self._deferred = ()
        self._preempted_tenants.clear()
        several = usage.num_tenants > 1
        if (usage.prefills or several) and (several or self._had_several):
            self._had_several = several
            prompts = sorted(usage.prefills.values(), key=self._policy.admission_key)
            self._deferred = self._order(prompts)
        return self._deferred

    def waits_for_deferred(self, request: Request) -> bool:
        """Return whether the deferred requests of this step go before this waiting request."""
        if not self._deferred:
            return False
        key = self._policy.admission_key
        return key(request) >= min(map(key, self._deferred))

    def may_preempt_for(self, request: Request) -> bool:
        """Return whether running requests may be preempted for this waiting request."""
        if self._usage.num_tenants == 1 or request.num_output_placeholders:
            return False
        return self._usage.most_served() > self._threshold(request)

    def preempt_for(self, request: Request, plan: StepPlan) -> bool:
        """Preempt one running request for a waiting one; False if none has to defer to it.

        None has to after a request was admitted in this step, because that request may have found
        blocks that the preempted one was to fill in this step.
        """
        if plan.admitted or not self.may_preempt_for(request):
            return False
        victim = self._preemption_order.next_victim(served_above=self._threshold(request))
        if victim is None or self._policy.priority_key(victim) < self._policy.priority_key(request):
            return False
        self._preemption.preempt(victim, plan)
        self._preempted_tenants.add(victim.tenant)
        return True

    def must_wait_after_preemption(self, request: Request, plan: StepPlan) -> bool:
        """Return whether a request waits because one of its tenant was preempted in this step.

        The room was made for another tenant, and stays its own even if that tenant's request cannot
        be admitted yet. If no request runs, none waits.
        """
        return (
            request.tenant in self._preempted_tenants and not plan.admitted and bool(self._running)
        )

    @property
    def num_prefilling(self) -> int:
        """Number of running requests with more than one token to compute."""
        return len(self._usage.prefills)

    # Beginning and end

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self._preemption_order.add_running(request)
        self._usage.begin_running(request, num_new_tokens)

    def on_released(self, request: Request) -> None:
        if self._usage.is_running(request):
            self._preemption_order.remove_running(request)
        self._usage.unregister_request(request)

    # Internals

    def _threshold(self, request: Request) -> float:
        """Return the service above which tenants defer to this waiting request."""
        return self._usage.served(request.tenant) + request.num_tokens

    def _order(self, prompts: list[Request]) -> list[Request]:
        """Order the end of the running list; return those that defer. prompts: by admission key."""
        key = self._policy.admission_key
        deferred: list[Request] = []
        first = prompts[0] if prompts else None
        head = self._waiting.peek_request() if self._waiting.num_ready else None
        if head is not None:
            deferred = [
                prompt
                for prompt in prompts
                if prompt.tenant != head.tenant and key(prompt) > key(head)
            ]
        in_time = [prompt for prompt in prompts if prompt not in deferred]
        if head is not None and (first is None or key(head) < key(first)):
            deferred = [*self._deferring_decodes(head, self._threshold(head)), *deferred]
        elif first is not None:
            decodes = self._deferring_decodes(first, self._usage.served(first.tenant))
            if decodes:
                its = [prompt for prompt in in_time if prompt.tenant == first.tenant]
                others = [prompt for prompt in in_time if prompt.tenant != first.tenant]
                in_time = [*its, *decodes, *others]
        self._move_to_end([*in_time, *deferred])
        return deferred

    def _deferring_decodes(self, request: Request, served_above: float) -> list[Request]:
        """Return decoding requests of more served tenants, if they delay a prompt too much."""
        usage, running = self._usage, self._running
        if usage.most_served() <= served_above:
            return []
        longest = self._chunks.longest_chunk
        num_left = self._chunks.token_budget - (len(running) - len(usage.prefills))
        num_missing = request.num_tokens - request.num_computed_tokens
        if (
            num_left > 0
            and _steps(num_missing, min(longest, num_left))
            <= _steps(num_missing, longest) + STEPS_FOR_DECODES
        ):
            return []
        priority_key = self._policy.priority_key(request)
        return [
            other
            for other in running
            if other.seq_id not in usage.prefills
            and usage.served(other.tenant) > served_above
            and self._policy.priority_key(other) >= priority_key
        ]

    def _move_to_end(self, requests: list[Request]) -> None:
        running = self._running
        if requests and running[-len(requests) :] != requests:
            seq_ids = {other.seq_id for other in requests}
            running[:] = [other for other in running if other.seq_id not in seq_ids] + requests
            self._preemption_order.move_to_end(requests)


def _steps(num_tokens: int, num_in_a_step: int) -> int:
    return -(-num_tokens // num_in_a_step)
