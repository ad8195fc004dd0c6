"""Puts together the parts that a parser of calls finds.

Owns the numbers of the calls, and the blanks beside them: those separate and mean nothing, so they
are left out; elsewhere they stay.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api_server.parsers.parts import CallArguments, CallBegins, Content, Part

# What a JSON object calls.
#
#     {"name": "find", "arguments": {"text": "a"}}     also with "parameters", as Llama has it, or
#     {"function": {…}}                                  all of that within "function"


NAME: Final = r"[A-Za-z0-9_.:/-]{1,128}"
_IS_NAME: Final = re.compile(NAME)
_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()
_NO_ARGUMENTS: Final = "{}"


@dataclass(frozen=True, slots=True)
class Call:
    """arguments: a JSON object."""

    name: str
    arguments: str


def read_call(text: str) -> Call | None:
    """The call that an object is; None for one that is none, and for what is no JSON."""
    try:
        members = _members(text)
        function = members.get("function")
        if function is not None and isinstance(function[0], dict) and "name" not in members:
            members = _members(function[1])
        name, _ = members.get("name", (None, ""))
        if not isinstance(name, str) or not _IS_NAME.fullmatch(name):
            return None
        if "arguments" in members and "parameters" in members:
            return None
        given = members.get("arguments") or members.get("parameters")
        arguments = _NO_ARGUMENTS if given is None else _arguments(*given)
    except (ValueError, RecursionError):
        return None
    return None if arguments is None else Call(name, arguments)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _arguments(value: Any, text: str) -> str | None:
    """As JSON; some models write that into a string."""
    if isinstance(value, dict):
        return text
    if value is None:
        return _NO_ARGUMENTS
    if isinstance(value, str) and is_object(value):
        return value.strip()
    return None


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """Name → (value, how it is written); raises ValueError for what is no JSON object."""
    members: dict[str, tuple[Any, str]] = {}
    place = _after(text, 0, "{")
    if text[place : place + 1] == "}":
        return members
    while True:
        name, place = _DECODER.raw_decode(text, place)
        begin = _after(text, _blank(text, place), ":")
        value, place = _DECODER.raw_decode(text, begin)
        if not isinstance(name, str) or name in members:
            raise ValueError("a name that is none, or is there twice")
        members[name] = value, text[begin:place]
        place = _blank(text, place)
        if text[place : place + 1] == "}":
            return members
        place = _after(text, place, ",")


def _blank(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    return found.end() if found else place


def _after(text: str, place: int, mark: str) -> int:
    if text[place : place + 1] != mark:
        raise ValueError(f"no {mark}")
    return _blank(text, place + 1)


# Where a value ends that arrives in pieces: an object of JSON, the arguments of a Python call.
#
#     {"name": "find", "arguments": {"text": "a } b"}} and so on
#                                                    └ the end


MAX_DEPTH: Final = 128
_CLOSERS: Final = {"{": "}", "[": "]", "(": ")"}
_JSON_BETWEEN: Final = re.compile(r"[ \t\r\n0-9+\-.eEtrufalsn:,]*")
_PYTHON_BETWEEN: Final = re.compile(r"[ \t\r\n0-9A-Za-z_+\-.:,=]*")
_INSIDE: Final = {
    '"': re.compile(r'[^"\\\x00-\x1f]*'),
    "'": re.compile(r"[^'\\\x00-\x1f]*"),
}
"""By the quote that ends a string."""


class Scanner:
    """openers: brackets that there may be. quotes: around strings. between: all the rest.

    invalid: it is no such value; `feed` returned the position.
    """

    def __init__(self, openers: str, quotes: str, between: re.Pattern[str]) -> None:
        self._openers = openers
        self._quotes = quotes
        self._between = between
        self._open: list[str] = []  # the brackets that are to close
        self._quote = ""
        self._escaped = False
        self.broken = False
        self.complete = False

    def feed(self, text: str) -> int:
        """Characters of `text` that belong to the value, all of them if it goes on."""
        place, end = 0, len(text)
        while place < end:
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            pattern = _INSIDE[self._quote] if self._quote else self._between
            found = pattern.match(text, place)
            place = found.end() if found else place
            if place == end:
                break
            if not self._take(text[place]):
                self.broken = True
                return place
            place += 1
            if not self._open:
                self.complete = True
                return place
        return place

    def _take(self, character: str) -> bool:
        """A character that changes something; False where it has no place."""
        if self._quote:
            if character == self._quote:
                self._quote = ""
            self._escaped = character == "\\"
            return self._escaped or not self._quote
        if character in self._quotes and self._open:
            self._quote = character
        elif character in self._openers and len(self._open) < MAX_DEPTH:
            self._open.append(_CLOSERS[character])
        elif self._open and character == self._open[-1]:
            self._open.pop()
        else:
            return False
        return True


def json_scanner() -> Scanner:
    """Of an object or a list."""
    return Scanner("{[", '"', _JSON_BETWEEN)


def python_scanner() -> Scanner:
    """Of what stands in the brackets of a call, with them."""
    return Scanner("{[(", "\"'", _PYTHON_BETWEEN)


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


# What parsers of calls have in common: states that take text from a buffer.
#
#     text ─▶ buffer ─▶ state ─▶ raw: what may become a call ──▶ a call, or content
#                        └──────▶ content


PIECE: Final = 1024
"""Most characters that are looked at together: what is left of them is copied for each step."""
_WHITESPACE: Final = re.compile(r"\s*")


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
        found = _WHITESPACE.match(self._buffer)
        if found and found.end():
            self._keep(found.end())
