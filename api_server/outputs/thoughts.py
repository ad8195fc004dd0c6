"""How many tokens of a choice are thoughts.

Owns the count. It watches the tokens on their way to text, as the engine does that ends thoughts
in time: the markers around them do not count, and may be a token or several.
"""

from collections import deque
from typing import Final, Protocol

from api_server.outputs.detokenizer import Detokenizer
from api_server.outputs.reasoning import Opening, ReasoningStyle
from proto.thinking import BLANKS, MAX_BLANKS

_MOST_STARTS: Final = 256
"""More tokens than a marker has characters, with some that have no text."""


class ThoughtCount(Protocol):
    """num_tokens: of thoughts, so far."""

    @property
    def num_tokens(self) -> int: ...


class CountingDetokenizer:
    """`inner`, whose text it watches from an `opening` that is not OUTSIDE."""

    def __init__(self, inner: Detokenizer, style: ReasoningStyle, opening: Opening) -> None:
        self._inner = inner
        self._style = style
        self._inside = opening is Opening.INSIDE
        self._is_opening = True
        self._tail = ""  # of the text, as much as may hold a part of the marker
        self._num_characters = 0
        self._starts: deque[int] = deque(maxlen=_MOST_STARTS)  # where the last tokens begin
        self._num_tokens = 0
        self._is_over = False

    @property
    def num_tokens(self) -> int:
        return self._num_tokens if self._inside else 0

    def feed(self, token_id: int) -> str:
        text = self._inner.feed(token_id)
        if not self._is_over:
            self._starts.append(self._num_characters)
            self._num_characters += len(text)
            self._num_tokens += 1
            self._tail += text
            self._watch()
        return text

    def flush(self) -> str:
        return self._inner.flush()

    def _watch(self) -> None:
        if self._is_opening and not self._has_opened():
            return
        end = self._style.end
        place = self._tail.find(end)
        if place < 0:
            self._tail = self._tail[-len(end) + 1 :]
            return
        begins = self._num_characters - len(self._tail) + place
        self._num_tokens -= sum(start >= begins for start in self._starts)
        self._is_over = True

    def _has_opened(self) -> bool:
        """Whether it is known by now that there are thoughts, or none."""
        said, start = self._tail.lstrip(BLANKS), self._style.start
        if len(self._tail) - len(said) <= MAX_BLANKS:
            if said.startswith(start):
                self._inside, self._is_opening = True, False
                self._tail = said[len(start) :]
                self._num_tokens = int(bool(self._tail))
                return True
            if start.startswith(said):
                return False
        self._is_opening = False
        self._is_over = not self._inside
        return self._inside
