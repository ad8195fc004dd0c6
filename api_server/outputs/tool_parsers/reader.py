"""What parsers of calls have in common: states that take text from a buffer.

    text ─▶ buffer ─▶ state ─▶ raw: what may become a call ──▶ a call, or content
                       └──────▶ content

Owns what is not understood yet. Which states there are, and what a call looks like, is for each
parser to know.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Final

from api_server.outputs.parts import Part
from api_server.outputs.tool_parsers.writer import NewId, PartsWriter

PIECE: Final = 1024
"""Most characters that are looked at together: what is left of them is copied for each step."""
_BLANKS: Final = re.compile(r"\s*")


class CallsReader:
    """names: of the tools that there are. separators: which, alone behind a call, mean nothing.

    A state takes from the buffer, and says whether there may be more to do before more text comes.
    """

    def __init__(
        self,
        names: Collection[str],
        new_id: NewId,
        *,
        begin: Callable[[], bool],
        text: Callable[[], bool],
        separators: Collection[str],
    ) -> None:
        self._names = names
        self._writer = PartsWriter(new_id)
        self._buffer = ""  # not understood yet; short, except within `feed`
        self._raw: list[str] = []  # of what may become a call
        self._pieces: list[str] = []  # of the value that is read
        self._name = ""  # that stood before it
        self._state = begin
        self._plain = text
        self._separators = separators

    def feed(self, text: str) -> Sequence[Part]:
        for start in range(0, len(text), PIECE):
            self._buffer += text[start : start + PIECE]
            while self._buffer and self._state():
                pass
        return self._writer.take()

    def end(self) -> Sequence[Part]:
        if self._writer.is_behind_call and "".join(self._raw).strip() in self._separators:
            self._raw.clear()  # a list that is not closed, or another call that does not come
        self._give_up()
        self._writer.content(self._buffer)
        self._buffer = ""
        return self._writer.end()

    def _give_up(self) -> None:
        """What is kept is no call."""
        self._writer.content("".join(self._raw))
        self._raw.clear()
        self._pieces.clear()
        self._name = ""
        self._state = self._plain

    def _keep(self, count: int) -> None:
        self._raw.append(self._buffer[:count])
        self._buffer = self._buffer[count:]

    def _skip_blanks(self) -> None:
        found = _BLANKS.match(self._buffer)
        if found and found.end():
            self._keep(found.end())
