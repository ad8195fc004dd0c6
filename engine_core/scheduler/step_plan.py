"""What one call of schedule() has decided so far."""

from collections.abc import Collection

from engine_core.kv_cache.block import BlockIds
from engine_core.request import Request


class StepPlan:
    """The passes fill it, the output builder reads it; it lives for one call.

    budget: tokens that may still be given out in this step.
    prompt_budget: of these, how many to sequences that miss more than one.
    continued, continued_tokens, continued_blocks: parallel; running requests with
        the tokens to compute and the new block ids per group.
    admitted, admitted_tokens: parallel; requests that came from the queue. Their
        num_computed_tokens already counts what the prefix cache holds.
    preempted: running requests that lost their blocks in this step.
    """

    __slots__ = (
        "admitted",
        "admitted_tokens",
        "budget",
        "continued",
        "continued_blocks",
        "continued_tokens",
        "now",
        "preempted",
        "prompt_budget",
    )

    def __init__(self, budget: int, now: float, prompt_budget: int) -> None:
        self.budget = budget
        self.prompt_budget = prompt_budget
        self.now = now
        self.continued: list[Request] = []
        self.continued_tokens: list[int] = []
        self.continued_blocks: list[BlockIds] = []
        self.admitted: list[Request] = []
        self.admitted_tokens: list[int] = []
        self.preempted: list[Request] = []

    def num_new_tokens(self, seq_ids: Collection[int]) -> dict[int, int]:
        """Tokens planned, by seq_id, for those that ran before this step; others are left out.

        One look through the plan, from the end, where those are that were admitted last.
        """
        found: dict[int, int] = {}
        for request, num_tokens in zip(
            reversed(self.continued), reversed(self.continued_tokens), strict=True
        ):
            if len(found) == len(seq_ids):
                break
            if request.seq_id in seq_ids:
                found[request.seq_id] = num_tokens
        return found

    def resend_full(self, request: Request) -> None:
        """Tell the workers of a continued request as of one that came from the queue."""
        index = self.continued.index(request)
        del self.continued[index], self.continued_blocks[index]
        self.admitted.append(request)
        self.admitted_tokens.append(self.continued_tokens.pop(index))

    def withdraw(self, request: Request) -> bool:
        """Take a running request out again and its tokens back; False if it was not planned."""
        if request not in self.continued:
            return False
        index = self.continued.index(request)
        del self.continued[index], self.continued_blocks[index]
        num_tokens = self.continued_tokens.pop(index)
        self.budget += num_tokens
        if num_tokens > 1:
            self.prompt_budget += num_tokens
        return True
