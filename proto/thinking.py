"""How the thoughts of an answer are told from the rest of it, for the engine.

Owns the limits that front end and engine both check, and what may stand before thoughts. Which
model has which markers is the front end's to know.
"""

from typing import Final

import msgspec

from proto.errors import InvalidRequestError

MAX_MARKER_BYTES: Final = 64
MAX_MARKER_TOKENS: Final = 64
MAX_BUDGET: Final = 1 << 31
BLANKS: Final = " \t\n\r\v\f"
"""What may stand before a start, each one byte and one character long."""
MAX_BLANKS: Final = 64
"""Of them at the most: what follows more is an answer."""


class ThinkingRule(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The output begins with thoughts, or may.

        prompt | <think> Which city? ... | </think> | What a grammar is for.
                         budget             forced

    begun: the prompt holds the start already, or the model needs none.
    start, end: texts of the markers; start_token_id: of a start that is one token.
    end_token_ids: the end, as tokens; they follow once the budget is used up.
    budget: most tokens between the markers; None for no limit.
    """

    begun: bool
    start: str
    end: str
    end_token_ids: tuple[int, ...]
    start_token_id: int | None = None
    budget: int | None = None

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for what no front end of ours sends."""
        ids = self.end_token_ids
        if not (self.start and self.end and 0 < len(ids) <= MAX_MARKER_TOKENS):
            raise InvalidRequestError("a marker of thinking is empty")
        if max(len(self.start), len(self.end)) > MAX_MARKER_BYTES:
            raise InvalidRequestError("a marker of thinking is too long")
        known = ids if self.start_token_id is None else (*ids, self.start_token_id)
        if not all(0 <= each < vocab_size for each in known):
            raise InvalidRequestError("a marker of thinking is outside the vocabulary")
        if self.budget is not None and not 0 <= self.budget <= MAX_BUDGET:
            raise InvalidRequestError(
                f"must be between 0 and {MAX_BUDGET}, got {self.budget}", "thinking_token_budget"
            )
