"""Text in which special tokens that mean something stand, though the others are left out."""

from collections.abc import Mapping

from api_server.outputs.detokenizer import Detokenizer


class MarkedDetokenizer:
    """`inner`, which leaves out special tokens, but for those that are marks.

    marks: token id to text.
    """

    def __init__(self, inner: Detokenizer, marks: Mapping[int, str]) -> None:
        self._inner = inner
        self._marks = marks

    def feed(self, token_id: int) -> str:
        mark = self._marks.get(token_id)
        if mark is None:
            return self._inner.feed(token_id)
        return self._inner.flush() + mark

    def flush(self) -> str:
        return self._inner.flush()
