"""Tool calls whose arguments are JSON: `JsonCallFormat`, and the parser of all its formats.

    text ──opening──▶ expect call ──{──▶ object ──}──▶ after call ──closing──▶ text
                         ▲   └── header ──▶ ┘              │  └──── other text ──▶ text
                         └─── separator, call opening ─────┘

    {"name": "find", "arguments": {"text": "a"}}     an object with the name
    find[ARGS]{"text": "a"}                          a header with the name, and an object

A call is returned when its object is complete and valid; until then its text is held back. If it
turns out not to be a call, the text from the marker on is content, and no character is read twice.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api_server.parsers.output import OutputParser, find_marker
from api_server.parsers.tools.base import (
    NAME,
    ToolCallFormat,
    ToolSchemas,
    described_properties,
    required_names,
)
from api_server.parsers.tools.call_parser import (
    CallParser,
    ToolCall,
    after_whitespace,
    json_scanner,
    may_become_json_call,
    offered_name,
    read_arguments,
    read_json_call,
)

CALL_ID: Final = "{call id}"
TOOL_ID: Final = "{tool id}"
"""Stands for the name of a tool with what models add to it, or for the id of a call."""
_SEPARATORS: Final = ("", ",", ";")
_WORDS: Final = {
    NAME: re.compile(r"[A-Za-z0-9_./-]{0,129}"),
    TOOL_ID: re.compile(r"[^\s<{]{0,160}"),
    CALL_ID: re.compile(r"[A-Za-z0-9_-]{0,64}"),
}
"""What stands for a varying part of a header → its characters."""
_MAX_NAME: Final = 128
_IS_CALL_ID: Final = re.compile(r"(?:call|toolu|chatcmpl-tool|tool)[_-][A-Za-z0-9_-]*|:?[0-9]+")
"""All whitespace within a header: the header stays in the buffer until it is complete."""

HeaderPart = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class JsonCallFormat(ToolCallFormat):
    """A format whose calls have JSON arguments.

    openings: markers of which each begins a call, or a block of calls. closings: markers of which
    each ends the block. call_closings: markers after a call within a block. call_opening: marker
    of a further call in a block. header: what stands between the opening and the arguments if the
    name is no member of the object: NAME, TOOL_ID, CALL_ID and texts; a tuple of them may be left
    out. start: text that is an opening where the answer begins. may_start_answer: an answer that
    begins with an object is a call without an opening, if the object names a tool of the request.
    """

    openings: Sequence[str]
    closings: Sequence[str] = ()
    call_closings: Sequence[str] = ()
    call_opening: str = ""
    header: Sequence[HeaderPart] = ()
    start: str = ""
    may_start_answer: bool = False

    def new_parser(self, tools: ToolSchemas) -> OutputParser:
        return JsonCallParser(self, tools)

    @property
    def call_markers(self) -> Sequence[str]:
        return self.openings

    @property
    def all_closings(self) -> Sequence[str]:
        return (*self.call_closings, *self.closings)


class JsonCallParser(CallParser):
    """Parser of all formats whose arguments are JSON."""

    def __init__(self, call_format: JsonCallFormat, tools: ToolSchemas) -> None:
        super().__init__(tools, _SEPARATORS)
        self._format = call_format
        self._tools = tools
        self._named_text = ("", "")  # the name in the header of the last call, and its object
        self._scanner = json_scanner()
        self._in_list = False
        self._is_bare = call_format.may_start_answer  # no opening marker has come
        if not call_format.may_start_answer and not call_format.start:
            self._state = self._read_text

    def _read_start(self) -> bool:
        self._consume_whitespace()
        if not self._buffer:
            return False
        start = self._format.start
        if self._is_bare and self._buffer[0] == "{":
            self._state = self._expect_call
        elif start and self._buffer.startswith(start):
            self._consume(len(start))
            self._state = self._expect_call
        elif start.startswith(self._buffer):
            return False
        else:
            self._is_bare = False
            self._reject_candidate()
        return True

    def _read_text(self) -> bool:
        position, marker = find_marker(self._buffer, self._format.openings)
        self._parts.add_content(self._buffer[:position])
        self._buffer = self._buffer[position:]
        if not marker:
            return False
        self._consume(len(marker))
        self._is_bare = False
        is_call = marker == self._format.call_opening
        self._state = self._read_header if is_call else self._expect_call
        return True

    def _expect_call(self) -> bool:
        """State after an opening marker, the start of a list or a separator."""
        self._consume_whitespace()
        if not self._buffer:
            return False
        call_opening = self._format.call_opening
        if self._buffer[0] == "{":
            self._scanner = json_scanner()
            self._state = self._read_object
        elif self._buffer[0] == "[" and not self._in_list and not self._is_bare:
            self._in_list = True
            self._consume(1)
        elif call_opening and self._buffer.startswith(call_opening):
            self._consume(len(call_opening))
            self._state = self._read_header
        elif call_opening and call_opening.startswith(self._buffer):
            return False
        elif self._format.header and not call_opening and not self._in_list:
            self._state = self._read_header
        else:
            self._reject_candidate()
        return True

    def _read_header(self) -> bool:
        """State before the object of arguments: find[ARGS]{…} or functions.find:0<…>{…}"""
        self._consume_whitespace()
        name, length = _match_header(self._format.header, self._buffer)
        if length < 0:
            return False
        if not name or not self._buffer.startswith("{", length):
            self._reject_candidate()
            return True
        self._consume(length)
        self._name = name
        self._named_text = ("", "")
        self._scanner = json_scanner()
        self._state = self._read_object
        return True

    def _read_object(self) -> bool:
        position = self._scanner.scan_text(self._buffer)
        self._value.append(self._buffer[:position])
        self._consume(position)
        if self._scanner.complete:
            self._finish_object()
        elif self._scanner.invalid:
            is_closed = any(self._buffer.startswith(each) for each in self._format.all_closings)
            may_be_closed = any(each.startswith(self._buffer) for each in self._format.all_closings)
            if not is_closed and may_be_closed:
                return False
            if is_closed and self._scanner.depth == 1 and not self._name:
                self._value.append("}")  # only the last brace is missing
                self._finish_object()
            else:
                self._reject_candidate()
        return True

    def _finish_object(self) -> None:
        text = "".join(self._value)
        call = self._named_call(self._name, text) if self._name else read_json_call(text)
        name = offered_name(call.name, self._tool_names) if call else ""
        if call is None or (self._is_bare and not name):
            self._reject_candidate()
            return
        is_repeated = bool(self._name) and self._named_text == (self._name, text)
        self._named_text = (self._name, text)
        if is_repeated:
            self._candidate.clear()
            self._value.clear()
            self._name = ""
        else:
            self._accept_call(ToolCall(name or call.name, call.arguments))
        self._state = self._after_call

    def _named_call(self, name: str, text: str) -> ToolCall | None:
        """Return the call of the tool that a header names; None if that is unclear, or is none.

        If the header has the id of a call instead of a name, the name is a member of the object, or
        the arguments fit one tool only.
        """
        arguments = read_arguments(text)
        if arguments is None:
            return None
        if offered_name(name, self._tool_names):
            return ToolCall(name, arguments)
        bare = name.removeprefix("functions.").partition(":")[0]
        if not _IS_CALL_ID.fullmatch(name):
            return ToolCall(bare, arguments) if _WORDS[NAME].fullmatch(bare) and bare else None
        members = json.loads(arguments)
        call = read_json_call(arguments)
        if call and call.name in self._tools and {"arguments", "parameters"} & members.keys():
            return call
        tool = members.get("name")
        if isinstance(tool, str) and tool in self._tool_names:
            del members["name"]
            return ToolCall(tool, json.dumps(members, ensure_ascii=False))
        fitting = [tool for tool, schema in self._tools.items() if _fits(members, schema)]
        return ToolCall(fitting[0], arguments) if len(fitting) == 1 else None

    def _after_call(self) -> bool:
        self._consume_whitespace()
        if not self._buffer:
            return False
        call_format, first = self._format, self._buffer[0]
        closings = call_format.all_closings
        closing = next((each for each in closings if self._buffer.startswith(each)), "")
        call_opening = call_format.call_opening
        if first == "}" or (first == "]" and not self._in_list):
            self._buffer = self._buffer[1:]  # a bracket too many
        elif first == "{":
            self._name = self._named_text[0]
            self._state = self._expect_call
        elif self._in_list and first in ",]":
            self._in_list = first == ","
            self._consume(1)
            if first == ",":
                self._state = self._expect_call
            else:
                self._candidate.clear()
        elif first in _SEPARATORS:
            self._consume(1)
            self._state = self._expect_call
        elif closing:
            self._candidate.clear()
            self._buffer = self._buffer[len(closing) :]
            self._in_list = False
            if closing in call_format.closings:
                self._state = self._read_text
        elif call_opening and self._buffer.startswith(call_opening):
            self._consume(len(call_opening))
            self._state = self._read_header
        elif any(each.startswith(self._buffer) for each in (*closings, call_opening)):
            return False
        else:
            self._reject_candidate()
        return True

    def _may_become_call(self, held: str) -> bool:
        if not self._is_bare or self._state == self._read_text:
            return True  # a marker has come, or has begun
        return may_become_json_call(held.lstrip("".join(_SEPARATORS)), self._tool_names)

    def _reject_candidate(self) -> None:
        super()._reject_candidate()
        self._in_list = False


def _fits(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Return whether the arguments have names of parameters, among them all that are required."""
    is_known = arguments.keys() <= described_properties(schema).keys()
    return bool(arguments) and is_known and required_names(schema) <= arguments.keys()


def _match_header(parts: Sequence[HeaderPart], text: str) -> tuple[str, int]:
    """Return the name in a header and the length of the header, with whitespace around it.

    The length is negative if more text is needed, and the name is empty if this is no header.
    """
    name, position = "", 0
    for part in parts:
        optional = isinstance(part, tuple)
        end = position
        for word in part if isinstance(part, tuple) else (part,):
            start = after_whitespace(text, end)
            end = _match_word(word, text, start)
            if end < 0:
                return "", -1
            if end == start:
                break
            if word in (NAME, TOOL_ID):
                name = text[start:end]
        else:
            position = end
            continue
        if not optional:
            return "", 0
    position = after_whitespace(text, position)
    if position == len(text):
        return "", -1
    return (name if len(name) <= _MAX_NAME else ""), position


def _match_word(word: str, text: str, position: int) -> int:
    """Return where a word of a header ends; `position` without one, -1 if more text is needed."""
    pattern = _WORDS.get(word)
    if pattern is None:
        if text.startswith(word, position):
            return position + len(word)
        return -1 if word.startswith(text[position:]) else position
    found = pattern.match(text, position)
    end = found.end() if found else position
    return -1 if end == len(text) and end - position <= _MAX_NAME else end
