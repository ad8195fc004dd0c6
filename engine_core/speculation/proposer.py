"""A draft, and the interface of what proposes one.

A draft is what the next tokens of a request may be. The worker computes them together with the last
verified one, draws a token at every position with the draw that belongs to that position, and the
scheduler accepts the draft as far as it agrees with what was drawn. A wrong draft costs time. It
does not change an answer where a token has the same bits in any step
(`LoadedModel.is_batch_invariant`); elsewhere near ties may differ, so there is none by default.

    proposer    makes drafts in the engine: one for each method of --speculative-config
    drafter     a model in the workers that makes drafts (worker/speculation/drafter.py)
    proposal    a draft that came from there; its proposer in the engine is `WorkerProposer`
    acceptance probability
                of a token: the probability that it and all before it in the draft are accepted.
                Papers use the word for one token given the tokens before; this is the product
"""

from typing import Final, Protocol

from engine_core.request import Request


class Draft:
    """A draft of one request.

    token_ids: in order; at least one.
    acceptance_probs: of each of them, estimated; it does not grow along the draft.
    source: the name of the proposer.
    key: what acceptance is recorded by besides source and position, such as the length of the
        match that the draft continues. A source has few keys, so that each is seen often.
    is_forced: whether other tokens are impossible, so that a draft that differs is wrong.
    """

    __slots__ = ("acceptance_probs", "is_forced", "key", "source", "token_ids")

    def __init__(
        self,
        token_ids: list[int],
        acceptance_probs: list[float],
        source: str,
        key: int = 0,
        *,
        is_forced: bool = False,
    ) -> None:
        assert len(token_ids) == len(acceptance_probs) > 0
        self.token_ids: Final = token_ids
        self.acceptance_probs: Final = acceptance_probs
        self.source: Final = source
        self.key: Final = key
        self.is_forced: Final = is_forced


def expected_tokens(acceptance_probs: list[float]) -> float:
    """Return how many tokens of a draft are likely to be accepted."""
    result = 0.0  # the sum() of compiled code takes whole numbers only
    for value in acceptance_probs:
        result += value
    return result


class Proposer(Protocol):
    """Proposes the next tokens of requests from what the engine knows of them.

    `Drafting` calls `begin_request` when a request has blocks for the first time, `add_outputs`
    after every step that gave it tokens, `propose` when a draft may be verified, and `end_request`
    when it has ended. A preemption changes nothing: the tokens stay. A method that raises
    MemoryError ends the drafts of this proposer for the request: only `end_request` follows.
    """

    name: str
    """As in `--speculative-config`, in metrics and in the trace."""

    def begin_step(self) -> None:
        """Do a part of work that would be too long for one step."""

    def begin_request(self, request: Request) -> bool:
        """Learn the prompt and the outputs so far; `request.all_token_ids` has both.

        Return whether there may be drafts for it; if not, its other methods are not called.
        """

    def add_outputs(self, request: Request, num_new: int) -> None:
        """Learn the last `num_new` tokens of `request.all_token_ids`, which are verified."""

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        """Return a draft of 1 to `max_tokens` tokens to follow `request.all_token_ids`.

        The acceptance probabilities are what the proposer expects before it is known how often it
        was right.
        """

    def end_request(self, request: Request) -> None:
        """Forget what is kept of a request alone; its status says whether it has finished."""

    def forget_outputs(self) -> None:
        """Forget what was learnt from requests that have ended."""
