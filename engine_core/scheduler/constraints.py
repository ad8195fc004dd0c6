"""What the scheduler asks of whoever constrains the tokens of requests.

It is a gate, because a request waits for its grammar, and it says which sequences of a step
are to be held to theirs. It hears of every request that is over, as all gates do.
"""

from typing import ClassVar, Final, Protocol

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.gates import Candidate, Wake
from engine_core.scheduler.step_plan import StepPlan


class Constraints(Protocol):
    """A `Gate` that knows more."""

    status: ClassVar[RequestStatus]

    def attach(self, wake: Wake) -> None: ...

    def begin(self, plan: StepPlan) -> None: ...

    def holds(self, candidate: Candidate) -> bool: ...

    def admitted(self, request: Request, num_new_tokens: int) -> None: ...

    def forget(self, request: Request) -> None: ...

    def handles_of(self, plan: StepPlan) -> list[int]:
        """Constrained sequences that sample in this step; before the counters advance."""
        ...


class NoConstraints:
    """Every token is as good as any other."""

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_GRAMMAR

    def attach(self, wake: Wake) -> None: ...

    def begin(self, plan: StepPlan) -> None: ...

    def holds(self, candidate: Candidate) -> bool:
        return False

    def admitted(self, request: Request, num_new_tokens: int) -> None: ...

    def forget(self, request: Request) -> None: ...

    def handles_of(self, plan: StepPlan) -> list[int]:
        return []


NO_CONSTRAINTS: Final = NoConstraints()
