"""Tool calls whose parameters are tagged: `TaggedCallFormat` and its parser.

    <tool_call>                                      text ──opening──▶ function ──▶ parameters
    <function=find>                                    ▲                ▲            │  ▲
    <parameter=text>                                   │                │       key, value
    a                                                  │                │            │  │
    </parameter>                                       └── after call ◀─┴── call end ┘──┘
    </function>
    </tool_call>

A value has no quotes. The tool's schema decides what it is: text if it may be a string, otherwise
JSON. A call is returned when it is complete; anything else is content.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from api_server.parsers.output import OutputParser
from api_server.parsers.tools.base import (
    CallRules,
    OfferedTool,
    ToolCallFormat,
    ToolSchemas,
    compact_schema,
    quoted,
    schema_properties,
)
from api_server.parsers.tools.call_parser import (
    CallParser,
    ToolCall,
    find_marker,
    json_scanner,
)
from api_server.parsers.tools.tagged_values import json_string, text_rules, value_json, value_types
from proto.errors import InvalidRequestError

_SEPARATORS: Final = ("",)
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{0,129}")
_MAX_NAME: Final = 128
_MAX_KEY: Final = 256
_ANY_KEY: Final = "/[A-Za-z0-9_.-]{1,64}/"
"""Lark terminal of the name of a parameter of a tool that is not strict."""


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """The text around a parameter: begin KEY key_end VALUE end."""

    begin: str
    key_end: str
    end: str


@dataclass(frozen=True, kw_only=True)
class TaggedCallFormat(ToolCallFormat):
    """A format whose calls consist of tags.

    The tags that the parser reads are the words of the layout; whitespace between them is free.
    The first marker in the layout opens a call, or a block of calls.
    """

    parameter: ParameterLayout

    def new_parser(self, tools: ToolSchemas) -> OutputParser:
        return TaggedCallParser(self, tools)

    @property
    def function_tag(self) -> str:
        """The text before a function's name; empty if the name follows the opening marker."""
        return self.layout.call_begin.removeprefix(self.trigger).strip()

    def render_arguments(self, arguments: str) -> str:
        layout = self.parameter
        return "".join(
            f"{layout.begin}{key}{layout.key_end}{_rendered(value)}{layout.end}"
            for key, value in json.loads(arguments).items()
        )

    def argument_rules(self, rule: str, tool: OfferedTool, rules: CallRules) -> list[str]:
        """Return the rules of all parameters, in the order of the schema.

        A tool that is not strict may have any parameters.
        """
        layout, names, lines = self.parameter, [], []
        field = f"{tool.field}.function.parameters"
        if not tool.strict:
            value, *lines = self._value_rules(f"{rule}_any", {}, rules)
            opening = [*self.lark(layout.begin, rules), _ANY_KEY, *self.lark(layout.key_end, rules)]
            return [f"{rule}: ({' '.join(opening)} {value})*", *lines]
        try:
            properties = schema_properties(compact_schema(tool.schema))
            for index, (key, required, schema) in enumerate(properties):
                if not _is_key(key, layout.key_end):
                    raise InvalidRequestError(f"calls of this model cannot name {key!r}")
                name = f"{rule}_{index}"
                names.append(name if required else f"{name}?")
                opening = self.lark(f"{layout.begin}{key}{layout.key_end}", rules)
                value, *value_lines = self._value_rules(name, schema, rules)
                lines += [f"{name}: {' '.join(opening)} ({value})", *value_lines]
        except InvalidRequestError as error:
            raise error.in_field(field) from None
        return [f"{rule}: {' '.join(names) or quoted('')}", *lines]

    def _value_rules(self, name: str, schema: Mapping[str, Any], rules: CallRules) -> list[str]:
        """Return the Lark expression of a value and the text behind it, and its rules."""
        end = self.parameter.end
        tag = end.strip()
        if tag in rules.token_ids:
            return text_rules(name, schema, forbidden="", end="", after=self.lark(end, rules))
        before, _, _ = end.partition(tag)
        behind = self.lark(end.removeprefix(before).removeprefix(tag), rules)
        return text_rules(name, schema, forbidden=tag, end=before + tag, after=behind)


def _rendered(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_key(key: str, key_end: str) -> bool:
    is_free = key_end.split()[0] not in key and "\n" not in key and key == key.strip()
    return is_free and 0 < len(key) <= _MAX_KEY


class TaggedCallParser(CallParser):
    """Parser of all formats whose parameters are tagged."""

    def __init__(self, call_format: TaggedCallFormat, tools: ToolSchemas) -> None:
        super().__init__(tools, _SEPARATORS)
        layout, parameter = call_format.layout, call_format.parameter
        self._tools = tools
        self._opening = call_format.trigger
        self._function_tag = call_format.function_tag
        self._name_end = layout.name_end.strip()
        self._call_end, *closings = layout.call_end.split()
        self._closings = [*closings, *layout.end.split()]
        self._key_tag = parameter.begin.strip()
        self._key_end, *value_tags = parameter.key_end.split()
        self._value_tag = "".join(value_tags)
        self._value_end = parameter.end.strip()
        self._is_on_own_lines = parameter.key_end.endswith("\n")
        self._key = ""
        self._values: dict[str, str] = {}  # of the call so far, as JSON; the last of a name counts
        self._types: frozenset[str] = frozenset()
        self._scanner = json_scanner()
        self._has_opening = False
        self._state = self._read_text

    def _read_text(self) -> bool:
        openings = [tag for tag in (self._opening, self._function_tag) if tag]
        position, marker = find_marker(self._buffer, openings)
        self._parts.add_content(self._buffer[:position])
        self._buffer = self._buffer[position:]
        if not marker:
            return False
        self._has_opening = marker == self._opening
        self._consume(len(marker))
        self._state = self._expect_function if self._has_opening else self._read_name
        return True

    def _expect_function(self) -> bool:
        """State after an opening marker."""
        return self._expect({self._function_tag: self._read_name})

    def _read_name(self) -> bool:
        if not self._function_tag:
            self._consume_whitespace()
        found = _NAME.match(self._buffer)
        length = found.end() if found else 0
        if length == len(self._buffer) <= _MAX_NAME:
            return False
        name = self._buffer[:length]
        is_known = self._has_opening or name in self._tools
        if not 0 < length <= _MAX_NAME or not is_known:
            self._reject_candidate()
            return True
        self._consume(length)
        self._name = name
        self._values = {}
        self._state = self._expect_name_end if self._name_end else self._expect_parameter
        return True

    def _expect_name_end(self) -> bool:
        return self._expect({self._name_end: self._expect_parameter})

    def _expect_parameter(self) -> bool:
        """State between parameters."""
        is_decided = self._expect({self._key_tag: self._read_key, self._call_end: self._after_call})
        if self._state == self._after_call:
            pairs = [f"{json_string(key)}: {value}" for key, value in self._values.items()]
            self._accept_call(ToolCall(self._name, "{" + ", ".join(pairs) + "}"))
        return is_decided

    def _read_key(self) -> bool:
        position = self._buffer.find(self._key_end)
        if position < 0 and len(self._buffer) <= _MAX_KEY + len(self._key_end):
            return False
        key = self._buffer[: max(position, 0)].strip()
        if not _is_key(key, self._key_end):
            self._reject_candidate()
            return True
        self._consume(position + len(self._key_end))
        self._key = key
        self._types = value_types(self._tools.get(self._name, {}), key)
        self._scanner = json_scanner()
        self._state = self._expect_value if self._value_tag else self._read_value
        return True

    def _expect_value(self) -> bool:
        return self._expect({self._value_tag: self._read_value})

    def _read_value(self) -> bool:
        position, marker = find_marker(self._buffer, [self._value_end])
        self._add_value(position)
        if not marker:
            return False
        if self._is_within_json():
            self._add_value(len(marker))
            return True
        self._consume(len(marker))
        text = "".join(self._value)
        self._value.clear()
        if self._is_on_own_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        self._values[self._key] = value_json(text, self._types)
        self._state = self._expect_parameter
        return True

    def _add_value(self, count: int) -> None:
        text = self._buffer[:count]
        self._value.append(text)
        if not self._scanner.complete and not self._scanner.invalid:
            self._scanner.scan_text(text)
        self._consume(count)

    def _is_within_json(self) -> bool:
        """Return whether an end tag at this position is part of a string in a list or object."""
        return bool(self._types) and "string" not in self._types and self._scanner.is_in_string

    def _after_call(self) -> bool:
        following = dict.fromkeys(self._closings, self._after_call)
        following[self._opening] = self._expect_function
        if self._function_tag:
            following[self._function_tag] = self._read_name
        is_decided = self._expect(following)
        if is_decided and self._state == self._after_call:
            self._candidate.clear()
        return is_decided

    def _expect(self, following: Mapping[str, Callable[[], bool]]) -> bool:
        """Skip whitespace and a tag, and continue in the state of the tag; reject other text."""
        self._consume_whitespace()
        if not self._buffer:
            return False
        for tag, state in following.items():
            if self._buffer.startswith(tag):
                self._consume(len(tag))
                self._state = state
                return True
        if any(tag.startswith(self._buffer) for tag in following):
            return False
        self._reject_candidate()
        return True
