"""What a JSON object calls.

    {"name": "find", "arguments": {"text": "a"}}     also with "parameters", as Llama has it, or
    {"function": {…}}                                  all of that within "function"

The arguments are given as they are written. No object of another form is a call.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

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
