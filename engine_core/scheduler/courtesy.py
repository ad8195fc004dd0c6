"""Where one tenant's requests fill the engine, they make way for those of another.

Requests of the tenant that was served more give way to one of a tenant that was served
less, each with what it can give:

    a step's tokens     prompts being computed go to the end of the step, behind those who
                        are admitted in it, and take what is left
    seats, blocks       one running request after another is preempted, but only for who is
                        behind by more than all its own tokens: so that nobody takes the
                        room back before as much was done with it as its loss had cost

A request that decodes keeps its token in every step, unless it is preempted. Nothing here
costs a step anything in which one tenant has requests, or nobody computes a prompt.

Owns the order of prompts in the running list. Who was served how much says the ledger.
"""

from collections.abc import Sequence
from typing import ClassVar

from engine_core.queues.base import RequestQueue
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.gates import Candidate, Wake
from engine_core.scheduler.policies import FairShares
from engine_core.scheduler.preemption import Preemption
from engine_core.scheduler.step_plan import StepPlan
from engine_core.scheduler.tenants import TenantLedger


class Courtesy:
    """A gate that holds nobody, so that it hears who begins and who is over."""

    status: ClassVar[RequestStatus] = RequestStatus.WAITING

    def __init__(
        self,
        ledger: TenantLedger,
        policy: FairShares,
        waiting: RequestQueue,
        running: list[Request],
        preemption: Preemption,
    ) -> None:
        self._ledger = ledger
        self._policy = policy
        self._waiting = waiting
        self._running = running
        self._preemption = preemption
        self._mixed = False  # more than one tenant was here in the last step
        self._late: Sequence[Request] = ()

    def line_up(self) -> Sequence[Request]:
        """A step begins: put the prompts that give way in it to the end of the running list.

            | who decodes | prompts, least served first | those that give way |

        Returns the latter. As all prompts stand behind whoever decodes, one that takes
        all that is left of a step takes it from prompts only.
        """
        ledger = self._ledger
        ledger.begin_step()
        self._late = ()
        several = ledger.num_tenants > 1
        if ledger.prefills and (several or self._mixed):
            self._mixed = several
            prompts = sorted(ledger.prefills.values(), key=self._policy.rank)
            self._late = self._that_give_way(prompts)
            in_time = [each for each in prompts if each not in self._late]
            self._reorder([*in_time, *self._late])
        return self._late

    def is_behind(self, request: Request) -> bool:
        """Whether prompts that give way in this step do not give way to this waiting request."""
        if not self._late:
            return False
        return self._policy.rank(request) >= self._policy.rank(self._late[0])

    def may_claim(self, request: Request) -> bool:
        """Whether a waiting request may take the room of somebody who runs."""
        if self._ledger.num_tenants == 1 or request.num_output_placeholders:
            return False
        return self._ledger.most_served() > self._least(request)

    def claim(self, request: Request, plan: StepPlan) -> bool:
        """Preempt somebody for a waiting request; False if nobody has to give way to it.

        Nobody has once a request was admitted in this step: it may have found blocks that a
        victim was to fill in this very step.
        """
        if plan.admitted or not self.may_claim(request):
            return False
        served, least = self._ledger.served, self._least(request)
        urgency = self._policy.urgency
        candidates = [
            each
            for each in self._running
            if served(each.tenant) > least and urgency(each) >= urgency(request)
        ]
        if not candidates:
            return False
        self._preemption.evict(candidates[self._policy.victim(candidates)], plan)
        return True

    # As a gate

    def attach(self, wake: Wake) -> None:
        """Nobody is ever held."""

    def begin(self, plan: StepPlan) -> None:
        """All was done before running requests were planned."""

    def holds(self, candidate: Candidate) -> bool:
        return False

    def admitted(self, request: Request, num_new_tokens: int) -> None:
        self._ledger.admit(request, num_new_tokens)

    def forget(self, request: Request) -> None:
        self._ledger.leave(request)

    # Parts of the above

    def _least(self, request: Request) -> float:
        """Who is to give way to a waiting request was served more than this."""
        return self._ledger.served(request.tenant) + request.num_tokens

    def _that_give_way(self, prompts: list[Request]) -> list[Request]:
        """Those behind the head of the line, if that is another tenant's."""
        if not self._waiting.num_ready:
            return []
        head, rank = self._waiting.peek(), self._policy.rank
        first = rank(head)
        return [each for each in prompts if each.tenant != head.tenant and rank(each) > first]

    def _reorder(self, prompts: list[Request]) -> None:
        running = self._running
        if running[-len(prompts) :] != prompts:
            handles = self._ledger.prefills
            running[:] = [each for each in running if each.handle not in handles] + prompts
