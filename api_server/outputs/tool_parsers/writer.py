"""Puts together the parts that a parser of calls finds.

Owns the numbers of the calls, and the blanks beside them: those separate and mean nothing, so they
are left out; elsewhere they stay.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Final

from api_server.outputs.parts import CallArguments, CallBegins, Content, Part
from api_server.outputs.tool_parsers.json_calls import Call

NewId = Callable[[], str]
_ID_BYTES: Final = 12


def new_call_id() -> str:
    """As OpenAI's look."""
    return f"call_{secrets.token_hex(_ID_BYTES)}"


class PartsWriter:
    """new_id: for each call.

    is_behind_call: nothing but blanks came after the last one.
    """

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._parts: list[Part] = []
        self._blanks: list[str] = []  # at the end of the content, until it is known what follows
        self.is_behind_call = False
        self._num_calls = 0

    def content(self, text: str) -> None:
        """Text for the reader."""
        if self.is_behind_call:
            text = text.lstrip()
            self.is_behind_call = not text
        shown = text.rstrip()
        if shown:
            self._parts.append(Content("".join([*self._blanks, shown])))
            self._blanks.clear()
        if len(shown) < len(text):
            self._blanks.append(text[len(shown) :])

    def call(self, call: Call) -> None:
        """A call that is complete."""
        self._blanks.clear()
        self.is_behind_call = True
        self._parts.append(CallBegins(self._num_calls, self._new_id(), call.name))
        self._parts.append(CallArguments(self._num_calls, call.arguments))
        self._num_calls += 1

    def take(self) -> Sequence[Part]:
        """What there is by now."""
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> Sequence[Part]:
        """There is no more."""
        if self._blanks:
            self._parts.append(Content("".join(self._blanks)))
            self._blanks.clear()
        return self.take()
