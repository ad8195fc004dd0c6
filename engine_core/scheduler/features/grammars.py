"""Grammars as the scheduler sees them: requests that wait for one, and rows that need a mask."""

from typing import ClassVar, Protocol

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import Candidate, SchedulerFeature
from engine_core.scheduler.step_plan import StepPlan


class Grammars(Protocol):
    """The grammars of requests: `engine_core/structured_output/manager.py`, which is not compiled.

    awaiting_mask: sequences that no step may sample before their mask is there. The set object
    stays the same, its members change.
    """

    awaiting_mask: set[int]

    def is_blocked(self, request: Request) -> bool:
        """Return whether a request waits for its grammar, or for a mask of a slow one.

        A slow mask that has not been begun is begun, and blocks the request until it is ready. The
        engine's loop unblocks it, with `Scheduler.unblock`.
        """

    def forget_request(self, request: Request) -> None:
        """Forget a request that has ended."""

    def constrained_seq_ids(self, plan: StepPlan) -> list[int]:
        """Return the sequences that sample under a grammar in this step.

        Called before the counters of the requests advance.
        """

    def num_allowed_tokens(self, request: Request, token_ids: list[int]) -> int:
        """Return how many of these tokens, one after the other, may follow the known ones.

        All of them for a request without a grammar, and where the position in the grammar is
        not known yet because steps are in flight.
        """


class GrammarGate(SchedulerFeature):
    """Holds requests back until their grammar is compiled, or the next mask of it computed."""

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_GRAMMAR

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def is_blocked(self, candidate: Candidate) -> bool:
        return self._grammars.is_blocked(candidate.request)

    def on_released(self, request: Request) -> None:
        self._grammars.forget_request(request)
