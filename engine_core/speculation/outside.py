"""What a proposer of drafts from outside extends: an interpreted class."""

from typing import TYPE_CHECKING

from engine_core.request import Request

if TYPE_CHECKING:
    from engine_core.speculation.proposer import Draft


class DraftProposer:
    """Proposes the next tokens of requests; `Proposer` in proposer.py says when each is called.

    Constructed with its name in --speculative-config, which its drafts have as `source`, and with
    the most tokens of a draft.
    """

    def __init__(self, name: str, max_tokens: int) -> None:
        self.name = name
        self.max_tokens = max_tokens

    def propose(self, request: Request, max_tokens: int) -> "Draft | None":
        """Return a draft of 1 to `max_tokens` tokens to follow `request.all_token_ids`."""
        raise NotImplementedError

    def begin_step(self) -> None:
        """Do a part of work that would be too long for one step."""

    def begin_request(self, request: Request) -> bool:
        """Learn the prompt and the outputs so far; return whether there may be drafts."""
        return True

    def add_outputs(self, request: Request, num_new: int) -> None:
        """Learn the last `num_new` tokens of `request.all_token_ids`, which are verified."""

    def end_request(self, request: Request) -> None:
        """Forget what is kept of a request alone."""

    def forget_outputs(self) -> None:
        """Forget what was learnt from requests that have ended."""
