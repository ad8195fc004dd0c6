"""Where one tenant's requests fill the engine, they make way for those of another.

Requests of the tenant that was served more give way to one of a tenant that was served
less, each with what it can give:

    a step's tokens     prompts being computed go to the end of the step, behind those who
                        are admitted in it, and take what is left; those who decode as well,
                        while they would cost a prompt more than one step in all
    seats, blocks       one running request after another is preempted, but only for who is
                        behind by more than all its own tokens: so that nobody takes the
                        room back before as much was done with it as its loss had cost

A request that decodes keeps its token in every step, unless it is preempted or makes way for
a long prompt of a tenant that is behind by more than all that prompt's tokens. Nothing here
costs a step anything in which one tenant has requests; nor in which nobody computes a prompt,
but for a look at the head of the line.

Owns the order of prompts in the running list; `TenantUsage` counts what each tenant was served.
"""

from collections.abc import Sequence
from typing import Final

from engine_core.request import Request
from engine_core.scheduler.limits import ChunkRule
from engine_core.scheduler.preemption import Preemption, PreemptionOrder
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.queues.fair import FairShares
from engine_core.scheduler.step_plan import StepPlan
from engine_core.scheduler.tenant_usage import TenantUsage

STEPS_FOR_DECODES: Final = 1
"""So many steps more than on an idle server may a prompt take because others decode."""


class TenantFairness:
    """SupervisorCommands prompts among tenants, and preempts for a tenant that was served less.

    A listener: it learns which requests run and which have ended.
    """

    def __init__(
        self,
        usage: TenantUsage,
        policy: FairShares,
        preemption_order: PreemptionOrder,
        waiting: RequestQueue,
        running: list[Request],
        preemption: Preemption,
        chunks: ChunkRule,
    ) -> None:
        self._usage = usage
        self._policy = policy
        self._preemption_order = preemption_order
        self._waiting = waiting
        self._running = running
        self._preemption = preemption
        self._chunks = chunks
        self._mixed = False  # more than one tenant was here in the last step
        self._late: Sequence[Request] = ()

    def line_up(self) -> Sequence[Request]:
        """A step begins: put the prompts that give way in it to the end of the running list.

            | who decodes | prompts, least served first | those that give way |

        Returns the latter. As all prompts stand behind whoever decodes, one that takes
        all that is left of a step takes it from prompts only; but for one that is short of
        tokens, and to which decodes of others make way:

            | who decodes | prompts of its tenant | who makes way, prompts | those that give way |
            | who decodes | prompts, least served first | it, if it waits | who makes way, … |
        """
        usage = self._usage
        usage.begin_step()
        self._late = ()
        several = usage.num_tenants > 1
        if (usage.prefills or several) and (several or self._mixed):
            self._mixed = several
            self._late = self._order(sorted(usage.prefills.values(), key=self._policy.rank))
        return self._late

    def is_behind(self, request: Request) -> bool:
        """Whether those that give way in this step do not give way to this waiting request."""
        if not self._late:
            return False
        return self._policy.rank(request) >= min(map(self._policy.rank, self._late))

    def may_claim(self, request: Request) -> bool:
        """Whether a waiting request may take the room of somebody who runs."""
        if self._usage.num_tenants == 1 or request.num_output_placeholders:
            return False
        return self._usage.most_served() > self._least(request)

    def claim(self, request: Request, plan: StepPlan) -> bool:
        """Preempt somebody for a waiting request; False if nobody has to give way to it.

        Nobody has once a request was admitted in this step: it may have found blocks that a
        victim was to fill in this very step.
        """
        if plan.admitted or not self.may_claim(request):
            return False
        victim = self._preemption_order.first(served_above=self._least(request))
        if victim is None or self._policy.priority_key(victim) < self._policy.priority_key(request):
            return False
        self._preemption.preempt(victim, plan)
        return True

    # As a listener

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self._preemption_order.admit(request)
        self._usage.admit(request, num_new_tokens)

    def on_released(self, request: Request) -> None:
        if self._usage.runs(request):
            self._preemption_order.leave(request)
        self._usage.leave(request)

    # Parts of the above

    def _least(self, request: Request) -> float:
        """Who is to give way to a waiting request was served more than this."""
        return self._usage.served(request.tenant) + request.num_tokens

    def _order(self, prompts: list[Request]) -> list[Request]:
        """Order the end of the running list; returns those that give way. prompts: by rank."""
        rank = self._policy.rank
        late: list[Request] = []
        first = prompts[0] if prompts else None
        head = self._waiting.peek() if self._waiting.num_ready else None
        if head is not None:
            late = [
                each for each in prompts if each.tenant != head.tenant and rank(each) > rank(head)
            ]
        in_time = [each for each in prompts if each not in late]
        if head is not None and (first is None or rank(head) < rank(first)):
            late = [*self._that_make_way(head, self._least(head)), *late]
        elif first is not None:
            makes_way = self._that_make_way(first, self._usage.served(first.tenant))
            if makes_way:
                its = [each for each in in_time if each.tenant == first.tenant]
                others = [each for each in in_time if each.tenant != first.tenant]
                in_time = [*its, *makes_way, *others]
        self._put_last([*in_time, *late])
        return late

    def _that_make_way(self, request: Request, least: float) -> list[Request]:
        """Decodes of tenants that were served more than that, where they cost it too many steps."""
        usage, running = self._usage, self._running
        if usage.most_served() <= least:
            return []
        longest = self._chunks.longest_chunk
        num_left = self._chunks.step_budget - (len(running) - len(usage.prefills))
        num_missing = request.num_tokens - request.num_computed_tokens
        if (
            num_left > 0
            and _steps(num_missing, min(longest, num_left))
            <= _steps(num_missing, longest) + STEPS_FOR_DECODES
        ):
            return []
        priority_key = self._policy.priority_key(request)
        return [
            each
            for each in running
            if each.seq_id not in usage.prefills
            and usage.served(each.tenant) > least
            and self._policy.priority_key(each) >= priority_key
        ]

    def _put_last(self, requests: list[Request]) -> None:
        running = self._running
        if requests and running[-len(requests) :] != requests:
            seq_ids = {each.seq_id for each in requests}
            running[:] = [each for each in running if each.seq_id not in seq_ids] + requests
            self._preemption_order.move_to_end(requests)


def _steps(num_tokens: int, num_in_a_step: int) -> int:
    return -(-num_tokens // num_in_a_step)
