"""What the engine chose itself and a worker therefore does not know.

A worker appends the tokens that it sampled. Where the engine picks the next token,
or gives a sequence the tokens and blocks of another, it has to be told. Owns what
was not told yet.
"""

from engine_core.request import Request
from engine_core.scheduler.step_plan import StepPlan


class Dictation:
    """One token, or a whole new row, for sequences that a worker knows."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._replaced: set[int] = set()

    def append(self, request: Request, token_id: int) -> None:
        """The last token of a request was not sampled."""
        self._tokens[request.handle] = token_id

    def replace(self, request: Request) -> None:
        """Tokens and block table of a request are other ones now."""
        self._replaced.add(request.handle)

    def forget(self, handle: int) -> None:
        """A sequence is over."""
        self._tokens.pop(handle, None)
        self._replaced.discard(handle)

    def take(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """What this step has to tell: handles, and the token of each.

        A row that was replaced is described like one that comes back; what comes
        back is told everything anyway. What the step does not compute waits.
        """
        if not self._tokens and not self._replaced:
            return [], []
        for request in [each for each in plan.continued if each.handle in self._replaced]:
            plan.describe_anew(request)
        for request in plan.admitted:
            self.forget(request.handle)
        handles = [each.handle for each in plan.continued if each.handle in self._tokens]
        return handles, [self._tokens.pop(handle) for handle in handles]
