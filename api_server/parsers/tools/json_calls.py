"""Tool calls that are JSON objects: the formats of Hermes, Llama 3 and Mistral, and their parser.

    text ──opening marker──▶ expect call ──{──▶ object ──}──▶ after call ──closing marker──▶ text
                                 ▲  └ name ─▶ ┘                   │  └────── other text ──▶ text
                                 └────────── , or ; ──────────────┘

A call is returned when its object is complete and valid; until then its text is held back. If it
turns out not to be a call, the text from the marker on is content, and no character is read twice.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from api_server.parsers.output import OutputParser
from api_server.parsers.tools.base import (
    OPTIONAL_BLANK,
    CallGrammar,
    CallRules,
    ToolCallFormat,
    argument_rules,
    json_call_prefix,
    json_call_rules,
    quoted,
)
from api_server.parsers.tools.call_parser import (
    TOOL_NAME_PATTERN,
    CallParser,
    ToolCall,
    is_json_object,
    json_scanner,
    may_become_json_call,
    read_json_call,
)
from proto.config import ToolCallParser

_IS_NAME: Final = re.compile(TOOL_NAME_PATTERN)
_NAME_SO_FAR: Final = re.compile(TOOL_NAME_PATTERN.replace("{1,128}", "{0,129}"))
_SEPARATORS: Final = ("", ",", ";")
_ARGUMENTS_MARKER: Final = "[ARGS]"
_CALL_ID_MARKER: Final = "[CALL_ID]"
_CALL_ID: Final = re.compile(r"[A-Za-z0-9_-]{0,64}")


class Hermes(ToolCallFormat):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, of Hermes, Qwen 2.5 and Qwen 3."""

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    template_markers = (("<tool_call>",),)

    def new_parser(self, tool_names: Collection[str]) -> OutputParser:
        opening, closing = self.markers
        return JsonCallParser(JsonCallSyntax(opening, closing), tool_names)

    def grammar(self, rules: CallRules) -> CallGrammar:
        opening, closing = map(rules.marker, self.markers)
        return CallGrammar(
            [
                f"calls: {opening} after_trigger",
                f"after_trigger: {rules.repeated('rest', f'BLANK {opening} rest')}",
                f"rest: BLANK object BLANK {closing}",
                f"BLANK: {OPTIONAL_BLANK}",
                *json_call_rules(rules, "arguments"),
            ],
            trigger=self.markers[0],
        )

    def render_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        opening, closing = self.markers
        return "\n".join(
            f"{opening}\n{json_call_prefix(name, 'arguments')}{arguments}}}\n{closing}"
            for name, arguments in calls
        )


class Llama3Json(ToolCallFormat):
    """`{"name": …, "parameters": {…}}; {…}`, of Llama 3: an answer that starts with the object."""

    name = "llama3_json"
    markers = ("<|python_tag|>",)
    template_markers = (('"parameters": ',), ("<|python_tag|>",))

    def new_parser(self, tool_names: Collection[str]) -> OutputParser:
        syntax = JsonCallSyntax(self.markers[0], separator=";", may_start_answer=True)
        return JsonCallParser(syntax, tool_names)

    def grammar(self, rules: CallRules) -> CallGrammar:
        further = '"; " object'
        return CallGrammar(
            [
                f"calls: {rules.marker(self.markers[0])}? {rules.repeated('object', further)}",
                *json_call_rules(rules, "parameters"),
            ],
            free_text=r"/([ \n]*([^ \n\r\t{<]|<[^|])([^<]|<[^|])*)?/",
        )

    def render_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        return "; ".join(
            f"{json_call_prefix(name, 'parameters')}{arguments}}}" for name, arguments in calls
        )


class Mistral(ToolCallFormat):
    """`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, of Mistral 7B and Nemo."""

    name: ClassVar[ToolCallParser] = "mistral"
    markers = ("[TOOL_CALLS]", _ARGUMENTS_MARKER, _CALL_ID_MARKER)
    template_markers: ClassVar[Sequence[Sequence[str]]] = (("[TOOL_CALLS]",),)

    def new_parser(self, tool_names: Collection[str]) -> OutputParser:
        return JsonCallParser(JsonCallSyntax(self.markers[0], may_be_named=True), tool_names)

    def grammar(self, rules: CallRules) -> CallGrammar:
        further = '", " object'
        return CallGrammar(
            [
                f"calls: {rules.marker(self.markers[0])} after_trigger",
                f'after_trigger: BLANK "[" {rules.repeated("object", further)} "]"',
                f"BLANK: {OPTIONAL_BLANK}",
                *json_call_rules(rules, "arguments"),
            ],
            trigger=self.markers[0],
        )

    def render_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        objects = [
            f"{json_call_prefix(name, 'arguments')}{arguments}}}" for name, arguments in calls
        ]
        return f"{self.markers[0]} [{', '.join(objects)}]"


class MistralNamed(Mistral):
    """`[TOOL_CALLS]name[ARGS]{…}`, of newer Mistral models; one parser reads both formats."""

    name = "mistral_named"
    template_markers = (("[TOOL_CALLS]", _ARGUMENTS_MARKER),)

    def grammar(self, rules: CallRules) -> CallGrammar:
        opening, arguments = rules.marker(self.markers[0]), rules.marker(_ARGUMENTS_MARKER)
        objects = [
            f"{quoted(tool.name)} {arguments} arguments_{index}"
            for index, tool in enumerate(rules.tools)
        ]
        return CallGrammar(
            [
                f"calls: {opening} after_trigger",
                f"after_trigger: {rules.repeated('object', f'{opening} object')}",
                f"object: {' | '.join(objects)}",
                *argument_rules(rules),
            ],
            trigger=self.markers[0],
        )

    def render_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        return "".join(
            f"{self.markers[0]}{name}{_ARGUMENTS_MARKER}{arguments}" for name, arguments in calls
        )


@dataclass(frozen=True, slots=True)
class JsonCallSyntax:
    """What surrounds the JSON objects of a format.

    opening: marker before a call or a list of calls. closing: optional marker after a call.
    separator: stands between objects after one opening marker that are in no list.
    may_start_answer: an answer that starts with an object is a call without an opening marker, if
    the object names a tool of the request. may_be_named: the opening marker may be followed by
    the tool's name and an object of arguments only.
    """

    opening: str
    closing: str = ""
    separator: str = ""
    may_start_answer: bool = False
    may_be_named: bool = False


class JsonCallParser(CallParser):
    """Parser of all formats whose calls are JSON objects."""

    def __init__(self, syntax: JsonCallSyntax, tool_names: Collection[str]) -> None:
        super().__init__(tool_names, _SEPARATORS)
        self._syntax = syntax
        self._scanner = json_scanner()
        self._in_list = False
        self._is_bare = syntax.may_start_answer  # no opening marker has come
        if not syntax.may_start_answer:
            self._state = self._read_text

    def _read_start(self) -> bool:
        self._consume_whitespace()
        if not self._buffer:
            return False
        if self._buffer[0] == "{":
            self._state = self._expect_call
        else:
            self._is_bare = False
            self._reject_candidate()
        return True

    def _read_text(self) -> bool:
        marker = self._syntax.opening
        position = self._buffer.find(marker)
        if position < 0:
            end = len(self._buffer) - self._num_marker_characters()
            self._parts.add_content(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        self._parts.add_content(self._buffer[:position])
        self._buffer = self._buffer[position:]
        self._consume(len(marker))
        self._is_bare = False
        self._state = self._expect_call
        return True

    def _expect_call(self) -> bool:
        """State after an opening marker, the start of a list or a separator."""
        self._consume_whitespace()
        if not self._buffer:
            return False
        if self._buffer[0] == "{":
            self._scanner = json_scanner()
            self._state = self._read_object
        elif self._buffer[0] == "[" and not self._in_list and not self._is_bare:
            self._in_list = True
            self._consume(1)
        elif self._syntax.may_be_named and not self._in_list and _IS_NAME.match(self._buffer):
            self._state = self._read_name
        else:
            self._reject_candidate()
        return True

    def _read_name(self) -> bool:
        """State in find{…}, find[ARGS]{…} or find[CALL_ID]a1b2c3d4e[ARGS]{…}, before the `{`."""
        position = _match_end(_NAME_SO_FAR, self._buffer)
        name = self._buffer[:position]
        if not _IS_NAME.fullmatch(name):
            self._reject_candidate()
            return True
        if self._buffer.startswith(_CALL_ID_MARKER, position):
            position = _match_end(_CALL_ID, self._buffer, position + len(_CALL_ID_MARKER))
        rest = self._buffer[position:]
        if rest.startswith((_ARGUMENTS_MARKER, "{")):
            self._consume(position if rest[0] == "{" else position + len(_ARGUMENTS_MARKER))
            self._name = name
            self._state = self._expect_arguments
            return True
        if _ARGUMENTS_MARKER.startswith(rest) or _CALL_ID_MARKER.startswith(rest):
            return False
        self._reject_candidate()
        return True

    def _expect_arguments(self) -> bool:
        """State after the name of a call."""
        self._consume_whitespace()
        if not self._buffer:
            return False
        if self._buffer[0] == "{":
            self._scanner = json_scanner()
            self._state = self._read_object
        else:
            self._reject_candidate()
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
        syntax, first = self._syntax, self._buffer[0]
        if self._in_list and first in ",]":
            self._in_list = first == ","
            self._consume(1)
            if first == ",":
                self._state = self._expect_call
            else:
                self._candidate.clear()
        elif self._in_list:
            self._reject_candidate()
        elif syntax.separator and first == syntax.separator:
            self._consume(1)
            self._state = self._expect_call
        elif syntax.closing and self._buffer.startswith(syntax.closing):
            self._candidate.clear()
            self._buffer = self._buffer[len(syntax.closing) :]
            self._state = self._read_text
        elif syntax.closing and syntax.closing.startswith(self._buffer):
            return False
        else:
            self._reject_candidate()
        return True

    def _may_become_call(self, held: str) -> bool:
        if not self._is_bare or self._state == self._read_text:
            return True  # a marker has come, or has begun
        return may_become_json_call(held.lstrip(self._syntax.separator), self._tool_names)

    def _reject_candidate(self) -> None:
        super()._reject_candidate()
        self._in_list = False

    def _num_marker_characters(self) -> int:
        """Return how many characters at the end of the buffer may start an opening marker."""
        marker = self._syntax.opening
        position = self._buffer.find(marker[0], max(0, len(self._buffer) - len(marker) + 1))
        while position >= 0 and not marker.startswith(self._buffer[position:]):
            position = self._buffer.find(marker[0], position + 1)
        return 0 if position < 0 else len(self._buffer) - position


def _match_end(pattern: re.Pattern[str], text: str, position: int = 0) -> int:
    found = pattern.match(text, position)
    return found.end() if found else position
