"""What the engine asks of a library of grammars.

GrammarSource ─▶ GrammarBackend.compile ─▶ Matcher, one for each grammar
                                              └ copy ─▶ Matcher, one for each choice
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from proto.errors import InvalidRequestError
from proto.grammar import GrammarSource

MaskRow = npt.NDArray[np.int32]
"""int32 [ceil(vocab_size / 32)], a bit for each token, the first in the lowest."""


class GrammarError(InvalidRequestError):
    """A grammar that cannot be compiled, or is too much work; the message is the client's."""


class Matcher(Protocol):
    """Where the text of one choice stands in its grammar."""

    def copy(self) -> "Matcher":
        """Another one that stands there."""
        ...

    def consume(self, token_ids: Sequence[int]) -> None:
        """The text goes on; a token that the grammar does not allow is an error from then on."""
        ...

    @property
    def is_free(self) -> bool:
        """Every token is allowed, for now."""
        ...

    @property
    def error(self) -> str:
        """Why it is of no use any more; empty as long as it is."""
        ...


class GrammarBackend(Protocol):
    """Compiles, and fills masks. Any thread, but a matcher is one thread's at a time."""

    @property
    def vocab_size(self) -> int:
        """Tokens that a mask has bits for."""
        ...

    def compile(self, source: GrammarSource) -> Matcher:
        """Raises GrammarError."""
        ...

    def text_of(self, token_id: int) -> bytes:
        """Of an ordinary token; of one that stands for no text, none."""
        ...

    def tokens_of(self, text: bytes) -> list[int]:
        """Some tokens that make up this text."""
        ...

    def fill(self, matchers: Sequence[Matcher], masks: npt.NDArray[np.int32]) -> None:
        """A row of `masks` [len(matchers), ceil(vocab_size / 32)] for each, free ones too."""
        ...


def mask_words(vocab_size: int) -> int:
    """Words of a row."""
    return -(-vocab_size // 32)
