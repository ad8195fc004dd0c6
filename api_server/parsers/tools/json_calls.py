"""Tool calls whose arguments are JSON: `JsonCallFormat`, and the parser of all its formats.

    text ──opening──▶ expect call ──{──▶ object ──}──▶ after call ──closing──▶ text
                         ▲   └── header ──▶ ┘              │  └──── other text ──▶ text
                         └─── separator, call opening ─────┘

    {"name": "find", "arguments": {"text": "a"}}     an object with the name
    find[ARGS]{"text": "a"}                          a header with the name, and an object

A call is returned when its object is complete and valid; until then its text is held back. If it
turns out not to be a call, the text from the marker on is content, and no character is read twice.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from api_server.parsers.output import OutputParser
from api_server.parsers.tools.base import INDEX, NAME, ToolCallFormat, ToolSchemas
from api_server.parsers.tools.call_parser import (
    CallParser,
    ToolCall,
    find_marker,
    is_json_object,
    json_scanner,
    may_become_json_call,
    read_json_call,
)

CALL_ID: Final = "{call id}"
_SEPARATORS: Final = ("", ",", ";")
_WORDS: Final = {
    NAME: re.compile(r"[A-Za-z0-9_./-]{0,129}"),
    INDEX: re.compile(r"[0-9]{0,9}"),
    CALL_ID: re.compile(r"[A-Za-z0-9_-]{0,64}"),
}
"""What stands for a varying part of a header → its characters."""
_MAX_NAME: Final = 128
_FEW_BLANKS: Final = re.compile(r"\s{0,64}")
"""All whitespace within a header: the header stays in the buffer until it is complete."""

HeaderPart = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class JsonCallFormat(ToolCallFormat):
    """A format whose calls have JSON arguments.

    openings: markers of which each begins a call, or a block of calls. closings: markers after a
    call; the last one ends the block. call_opening: marker of a further call in a block.
    separator: text between objects of a block that is no list. header: what stands between the
    opening and the arguments if the name is no member of the object: NAME, INDEX, CALL_ID and
    texts; a tuple of them may be left out. start: text that is an opening where the answer begins.
    may_start_answer: an answer that begins with an object is a call without an opening, if the
    object names a tool of the request.
    """

    openings: Sequence[str]
    closings: Sequence[str] = ()
    call_opening: str = ""
    separator: str = ""
    header: Sequence[HeaderPart] = ()
    start: str = ""
    may_start_answer: bool = False

    def new_parser(self, tools: ToolSchemas) -> OutputParser:
        return JsonCallParser(self, tools)


class JsonCallParser(CallParser):
    """Parser of all formats whose arguments are JSON."""

    def __init__(self, call_format: JsonCallFormat, tool_names: Collection[str]) -> None:
        super().__init__(tool_names, _SEPARATORS)
        self._format = call_format
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
            self._reject_candidate()
        return True

    def _finish_object(self) -> None:
        text = "".join(self._value)
        if self._name:
            call = ToolCall(self._name, text) if is_json_object(text) else None
        else:
            call = read_json_call(text)
        if call is None or (self._is_bare and call.name not in self._tool_names):
            self._reject_candidate()
            return
        self._accept_call(call)
        self._state = self._after_call

    def _after_call(self) -> bool:
        self._consume_whitespace()
        if not self._buffer:
            return False
        call_format, first = self._format, self._buffer[0]
        closing = next((each for each in call_format.closings if self._buffer.startswith(each)), "")
        call_opening = call_format.call_opening
        if self._in_list and first in ",]":
            self._in_list = first == ","
            self._consume(1)
            if first == ",":
                self._state = self._expect_call
            else:
                self._candidate.clear()
        elif self._in_list:
            self._reject_candidate()
        elif call_format.separator and first == call_format.separator:
            self._consume(1)
            self._state = self._expect_call
        elif closing:
            self._candidate.clear()
            self._buffer = self._buffer[len(closing) :]
            if closing == call_format.closings[-1]:
                self._state = self._read_text
        elif call_opening and self._buffer.startswith(call_opening):
            self._consume(len(call_opening))
            self._state = self._read_header
        elif any(each.startswith(self._buffer) for each in (*call_format.closings, call_opening)):
            return False
        else:
            self._reject_candidate()
        return True

    def _may_become_call(self, held: str) -> bool:
        if not self._is_bare or self._state == self._read_text:
            return True  # a marker has come, or has begun
        return may_become_json_call(held.lstrip(self._format.separator), self._tool_names)

    def _reject_candidate(self) -> None:
        super()._reject_candidate()
        self._in_list = False


def _match_header(parts: Sequence[HeaderPart], text: str) -> tuple[str, int]:
    """Return the name in a header and the length of the header, with whitespace around it.

    The length is negative if more text is needed, and the name is empty if this is no header.
    """
    name, position = "", 0
    for part in parts:
        optional = isinstance(part, tuple)
        end = position
        for word in part if isinstance(part, tuple) else (part,):
            start = _after_whitespace(text, end)
            end = _match_word(word, text, start)
            if end < 0:
                return "", -1
            if end == start:
                break
            if word == NAME:
                name = text[start:end]
        else:
            position = end
            continue
        if not optional:
            return "", 0
    position = _after_whitespace(text, position)
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


def _after_whitespace(text: str, position: int) -> int:
    found = _FEW_BLANKS.match(text, position)
    return found.end() if found else position
