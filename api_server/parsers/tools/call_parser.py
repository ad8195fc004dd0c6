"""What the parsers of all tool-call formats share. Start reading at `CallParser`.

    text ─▶ buffer ─▶ state ─▶ candidate: text that may become a call ──▶ a call, or content
                        └────▶ content

A parser derived from `CallParser` adds the states of its format. `ValueScanner` finds the end of
an argument value that arrives in pieces, and `read_json_call` reads a call that is a JSON object.
"""

import json
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api_server.parsers.output import ContentText, OutputPart, ToolCallArguments, ToolCallStart

MAX_CHUNK_CHARACTERS: Final = 1024
"""Most characters added to the buffer at once. Each step copies the rest of the buffer, so a
larger buffer would make long texts slow."""
_WHITESPACE: Final = re.compile(r"\s*")
_CALL_ID_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call. arguments: a JSON object, as the model wrote it."""

    name: str
    arguments: str


class CallParser:
    """State machine that finds tool calls in the text of one choice.

    tool_names: names of the tools that the request offers. separators: what may stand alone
    between the last call and the end of the output without being content.

    A state is a method without arguments that consumes characters of the buffer. It returns
    False if it needs more text. The first state is `_read_start`; `_read_text` is the state
    outside calls.
    """

    def __init__(self, tool_names: Collection[str], separators: Collection[str]) -> None:
        self._tool_names = tool_names
        self._separators = separators
        self._parts = PartsBuilder()
        self._buffer = ""  # text that no state has consumed; short except within `parse_delta`
        self._candidate: list[str] = []  # consumed text that becomes content if it is no call
        self._value: list[str] = []  # of the value that the scanner is reading
        self._name = ""  # of the call, if it stands before its arguments
        self._state = self._read_start

    def parse_delta(self, text: str) -> Sequence[OutputPart]:
        self._read(text)
        return self._parts.pop_parts()

    def _read(self, text: str) -> None:
        for start in range(0, len(text), MAX_CHUNK_CHARACTERS):
            self._buffer += text[start : start + MAX_CHUNK_CHARACTERS]
            while self._buffer and self._state():
                pass

    def parse_end(self, *, is_cut: bool = False) -> Sequence[OutputPart]:
        candidate = "".join(self._candidate)
        held = f"{candidate}{self._buffer}".strip()
        if is_cut and held and self._may_become_call(held):
            self._drop_held_text()
        elif self._parts.is_after_call and candidate.strip() in self._separators:
            self._candidate.clear()  # an unclosed list, or a further call that does not come
        self._reject_candidate()
        self._parts.add_content(self._buffer)
        self._buffer = ""
        return self._parts.pop_last_parts()

    def _may_become_call(self, held: str) -> bool:
        """Return whether a call, or the rest of one, may begin with this text.

        held: all text that is held back, which is not empty.
        """
        return True

    def _drop_held_text(self) -> None:
        self._candidate.clear()
        self._buffer = ""
        self._parts.drop_whitespace()

    def _read_start(self) -> bool:
        """State at the beginning of the output."""
        raise NotImplementedError

    def _read_text(self) -> bool:
        """State outside calls."""
        raise NotImplementedError

    def _reject_candidate(self) -> None:
        """Treat the candidate as content and continue outside calls."""
        self._parts.add_content("".join(self._candidate))
        self._candidate.clear()
        self._value.clear()
        self._name = ""
        self._state = self._read_text

    def _accept_call(self, call: ToolCall) -> None:
        """Return the candidate as a call."""
        self._candidate.clear()
        self._value.clear()
        self._name = ""
        self._parts.add_call(call)

    def _consume(self, count: int) -> None:
        """Move characters from the buffer to the candidate."""
        self._candidate.append(self._buffer[:count])
        self._buffer = self._buffer[count:]

    def _consume_whitespace(self) -> None:
        found = _WHITESPACE.match(self._buffer)
        if found and found.end():
            self._consume(found.end())


class PartsBuilder:
    """Collects output parts, numbers the calls and drops whitespace beside calls.

    Whitespace next to a call only separates; anywhere else it is content.
    """

    def __init__(self) -> None:
        self._parts: list[OutputPart] = []
        self._whitespace: list[str] = []  # at the end of the content; dropped if a call follows
        self._num_calls = 0
        self.is_after_call = False

    def add_content(self, text: str) -> None:
        if self.is_after_call:
            text = text.lstrip()
            self.is_after_call = not text
        visible = text.rstrip()
        if visible:
            self._parts.append(ContentText("".join([*self._whitespace, visible])))
            self._whitespace.clear()
        if len(visible) < len(text):
            self._whitespace.append(text[len(visible) :])

    def add_call(self, call: ToolCall) -> None:
        self.drop_whitespace()
        self.is_after_call = True
        self._parts.append(ToolCallStart(self._num_calls, new_call_id(), call.name))
        self._parts.append(ToolCallArguments(self._num_calls, call.arguments))
        self._num_calls += 1

    def drop_whitespace(self) -> None:
        """Drop whitespace at the end of the content: the start of a call follows."""
        self._whitespace.clear()

    def pop_parts(self) -> Sequence[OutputPart]:
        parts, self._parts = self._parts, []
        return parts

    def pop_last_parts(self) -> Sequence[OutputPart]:
        """Return the remaining parts at the end of the output, with trailing whitespace."""
        if self._whitespace:
            self._parts.append(ContentText("".join(self._whitespace)))
            self._whitespace.clear()
        return self.pop_parts()


def new_call_id() -> str:
    """Return a random id of a tool call in the form that OpenAI uses."""
    return f"call_{secrets.token_hex(_CALL_ID_BYTES)}"


# The end of a value that arrives in pieces: a JSON object, or the arguments of a Python call.
#
#     {"name": "find", "arguments": {"text": "a } b"}} and more text
#                                                    └ end of the value


MAX_DEPTH: Final = 128
_CLOSING: Final = {"{": "}", "[": "]", "(": ")"}
_JSON_LITERALS: Final = re.compile(r"[ \t\r\n0-9+\-.eEtrufalsn:,]*")
_PYTHON_LITERALS: Final = re.compile(r"[ \t\r\n\w+\-.:,=]*")
_IN_STRING: Final = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
"""Quote → characters that do not end a string; models write line breaks without an escape."""


class ValueScanner:
    """Finds the end of a bracketed value without parsing it.

    brackets: opening brackets of the syntax. quotes: characters that open a string.
    literals: matches everything else. complete: the last bracket is closed. invalid: the text is
    no such value.
    """

    def __init__(self, brackets: str, quotes: str, literals: re.Pattern[str]) -> None:
        self._brackets = brackets
        self._quotes = quotes
        self._literals = literals
        self._expected: list[str] = []  # closing brackets, innermost last
        self._quote = ""
        self._escaped = False
        self.invalid = False
        self.complete = False

    @property
    def is_in_string(self) -> bool:
        """The text continues within a string."""
        return bool(self._quote) and not self.invalid

    @property
    def depth(self) -> int:
        """Number of brackets that are open."""
        return len(self._expected)

    def scan_text(self, text: str) -> int:
        """Return how many characters of `text` belong to the value; all if it continues."""
        position, end = 0, len(text)
        while position < end:
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            pattern = _IN_STRING[self._quote] if self._quote else self._literals
            found = pattern.match(text, position)
            position = found.end() if found else position
            if position == end:
                break
            if not self._accept_delimiter(text[position]):
                self.invalid = True
                return position
            position += 1
            if not self._expected:
                self.complete = True
                return position
        return position

    def _accept_delimiter(self, character: str) -> bool:
        """Process a bracket, quote or backslash; return False where the syntax forbids it."""
        if self._quote:
            if character == self._quote:
                self._quote = ""
            self._escaped = character == "\\"
            return self._escaped or not self._quote
        if character in self._quotes and self._expected:
            self._quote = character
        elif character in self._brackets and len(self._expected) < MAX_DEPTH:
            self._expected.append(_CLOSING[character])
        elif self._expected and character == self._expected[-1]:
            self._expected.pop()
        else:
            return False
        return True


def json_scanner() -> ValueScanner:
    """Return a scanner of a JSON object or list."""
    return ValueScanner("{[", '"', _JSON_LITERALS)


def python_scanner() -> ValueScanner:
    """Return a scanner of the parenthesised arguments of a Python call."""
    return ValueScanner("{[(", "\"'", _PYTHON_LITERALS)


# A call written as a JSON object:
#
#     {"name": "find", "arguments": {"text": "a"}}     or "parameters" (Llama), or all of this as
#                                                      the value of "function"


TOOL_NAME_PATTERN: Final = r"[A-Za-z0-9_.:/-]{1,128}"
_IS_TOOL_NAME: Final = re.compile(TOOL_NAME_PATTERN)
_FEW_BLANKS: Final = re.compile(r"\s{0,64}")
_JSON_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()
_NO_ARGUMENTS: Final = "{}"
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.S)
_FUNCTIONS: Final = re.compile(r"^functions?[.:_/-]?")
_NUMBER: Final = re.compile(r"[.:_#-]?[0-9]+$")
_MAX_OPENING: Final = 512
"""Characters of an object that hold its first name and a tool's name."""


def read_json_call(text: str) -> ToolCall | None:
    """Return the call that a JSON object describes, or None if it describes none."""
    try:
        members = _members(with_escapes(text))
        function = members.get("function")
        if function is not None and isinstance(function[0], dict) and "name" not in members:
            members = _members(function[1])
        name, _ = members.get("name") or members.get("function") or (None, "")
        if not isinstance(name, str) or not _IS_TOOL_NAME.fullmatch(name):
            return None
        if "arguments" in members and "parameters" in members:
            return None
        given = members.get("arguments") or members.get("parameters")
        arguments = _NO_ARGUMENTS if given is None else _arguments(*given)
    except (ValueError, RecursionError):
        return None
    return None if arguments is None else ToolCall(name, arguments)


def may_become_json_call(text: str, tool_names: Collection[str]) -> bool:
    """Return whether an object that begins with this text may be a call of one of these tools."""
    start = "".join(text[:_MAX_OPENING].split())
    openings = [f'{{"name":"{name}"' for name in tool_names]
    openings += ['{"type":"function"', '{"function":{', '{"arguments":', '{"parameters":']
    return any(start.startswith(opening[: len(start)]) for opening in openings)


def read_arguments(text: str) -> str | None:
    """Return the JSON object that a text is, with the escapes that it lacks; None for other text.

    Models write line breaks into strings.
    """
    text = with_escapes(text)
    try:
        return text if isinstance(json.loads(text), dict) else None
    except (ValueError, RecursionError):
        return None


def with_escapes(text: str) -> str:
    """Return JSON with an escape for each control character in a string."""
    if not _CONTROL.search(text):
        return text
    return _STRING.sub(lambda string: _CONTROL.sub(_escaped, string[0]), text)


def _escaped(character: re.Match[str]) -> str:
    return json.dumps(character[0])[1:-1]


def offered_name(text: str, tool_names: Collection[str]) -> str:
    """Return the tool that is named with what models add to a name; "" for none of the request.

    functions.find:0, functions_find_0, functionsfind0, find:0, find:call_5c    find
    """
    bare = _FUNCTIONS.sub("", text)
    numbered = [_NUMBER.sub("", name) for name in (bare, text)]
    forms = (text, bare, *numbered, bare.partition(":")[0])
    return next((name for name in forms if name in tool_names), "")


def _arguments(value: Any, source: str) -> str | None:
    """Return arguments as JSON, None if invalid. Some models write the JSON into a string."""
    if isinstance(value, dict):
        return source
    if value is None:
        return _NO_ARGUMENTS
    return read_arguments(value.strip()) if isinstance(value, str) else None


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """Return name → (value, source text of the value) of a JSON object.

    Raises ValueError for anything else, and for a repeated name.
    """
    members: dict[str, tuple[Any, str]] = {}
    position = _after(text, 0, "{")
    if text[position : position + 1] == "}":
        return members
    while True:
        name, position = _DECODER.raw_decode(text, position)
        start = _after(text, _after_blanks(text, position), ":")
        value, position = _DECODER.raw_decode(text, start)
        if not isinstance(name, str) or name in members:
            raise ValueError("a name is no string, or is repeated")
        members[name] = value, text[start:position]
        position = _after_blanks(text, position)
        if text[position : position + 1] == "}":
            return members
        position = _after(text, position, ",")


def after_whitespace(text: str, position: int) -> int:
    """Return where the whitespace ends that begins at a position, 64 characters at most."""
    found = _FEW_BLANKS.match(text, position)
    return found.end() if found else position


def _after_blanks(text: str, position: int) -> int:
    found = _JSON_BLANKS.match(text, position)
    return found.end() if found else position


def _after(text: str, position: int, delimiter: str) -> int:
    """Return the position after a delimiter and blanks; raise ValueError if it is missing."""
    if text[position : position + 1] != delimiter:
        raise ValueError(f"no {delimiter}")
    return _after_blanks(text, position + 1)
