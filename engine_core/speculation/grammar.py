"""Drafts of the tokens that a grammar forces: keys of objects, constants, the end of reasoning.

    outputs   {"city":"Paris"      the model chose: forced until the next choice:
                             └── ,"           draft: country ":"

The grammar allows one token at each of these positions, so the sampler takes it. One step verifies
the whole run as a draft.
"""

from typing import Final, Protocol

from engine_core.request import Request
from engine_core.speculation.proposer import Draft


class ForcedTokenSource(Protocol):
    """What knows the grammars of requests: `StructuredOutputManager`."""

    def has_grammar(self, request: Request) -> bool:
        """Return whether tokens may be forced; the same for all of the request's life."""

    def forced_tokens(self, request: Request) -> list[int]:
        """Return the only tokens that can follow `request.all_token_ids`; empty at a choice."""


_CERTAINTY: Final = 0.999
"""Not 1, because other parameters of a request may forbid all that its grammar allows."""


class GrammarProposer:
    """Drafts what the grammars of a source force."""

    def __init__(self, source: ForcedTokenSource) -> None:
        self.name = "grammar"
        self._source = source

    def begin_step(self) -> None: ...

    def begin_request(self, request: Request) -> bool:
        return self._source.has_grammar(request)

    def add_outputs(self, request: Request, num_new: int) -> None: ...

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        token_ids = self._source.forced_tokens(request)[:max_tokens]
        if not token_ids:
            return None
        acceptance_probs = [_CERTAINTY ** (position + 1) for position in range(len(token_ids))]
        return Draft(token_ids, acceptance_probs, self.name, is_forced=True)

    def end_request(self, request: Request) -> None: ...

    def forget_outputs(self) -> None: ...
