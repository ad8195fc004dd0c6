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

What follows a tag decides whether it ends a value, or is part of its text:

    a</parameter>b              text                another tag, or the end of the call, must follow
    a</parameter></function>    the end             if </tool_call>, a call or nothing follows
    a<parameter=limit>          a missing end tag   if the tool has this parameter, not yet given
    a</function></tool_call>    a missing end tag
    <tool_call><function=…      a call within text  its tags belong to the text
"""

import enum
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api_server.parsers.output import OutputParser, OutputPart, find_marker, num_marker_characters
from api_server.parsers.tools.base import (
    CallRules,
    ToolCallFormat,
    ToolSchemas,
    compact_schema,
    described_properties,
    quoted,
    required_names,
    schema_properties,
)
from api_server.parsers.tools.call_parser import (
    CallParser,
    ToolCall,
    after_whitespace,
    json_scanner,
)
from api_server.parsers.tools.tagged_values import json_string, text_rules, value_json, value_types
from api_server.protocol.fields import errors_of
from api_server.protocol.tools import FunctionTool
from proto.errors import InvalidRequestError, shown

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

    def argument_rules(self, rule: str, tool: FunctionTool, rules: CallRules) -> list[str]:
        """Return the rules of all parameters, in the order of the schema.

        A tool that is not strict may have any parameters.
        """
        layout, names, lines = self.parameter, [], []
        field = f"{tool.field}.function.parameters"
        if not tool.strict:
            value, *lines = self._value_rules(f"{rule}_any", {}, rules)
            opening = [*self.lark(layout.begin, rules), _ANY_KEY, *self.lark(layout.key_end, rules)]
            return [f"{rule}: ({' '.join(opening)} {value})*", *lines]
        with errors_of(field):
            properties = schema_properties(compact_schema(tool.parameters))
            for index, (key, required, schema) in enumerate(properties):
                if not _is_key(key, layout.key_end):
                    raise InvalidRequestError(f"calls of this model cannot name {shown(key)!r}")
                name = f"{rule}_{index}"
                names.append(name if required else f"{name}?")
                opening = self.lark(f"{layout.begin}{key}{layout.key_end}", rules)
                value, *value_lines = self._value_rules(name, schema, rules)
                lines += [f"{name}: {' '.join(opening)} ({value})", *value_lines]
        return [f"{rule}: {' '.join(names) or quoted('')}", *lines]

    def _value_rules(self, name: str, schema: Mapping[str, Any], rules: CallRules) -> list[str]:
        """Return the Lark expression of a value and the text behind it, and its rules."""
        end = self.parameter.end
        tag = end.strip()
        if tag in rules.token_ids:
            after = self.lark(end, rules)
            return text_rules(name, schema, rules.work, forbidden="", end="", after=after)
        before, _, _ = end.partition(tag)
        behind = self.lark(end.removeprefix(before).removeprefix(tag), rules)
        return text_rules(name, schema, rules.work, forbidden=tag, end=before + tag, after=behind)


def _rendered(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_key(key: str, key_end: str) -> bool:
    is_free = key_end.split()[0] not in key and "\n" not in key and key == key.strip()
    return is_free and 0 < len(key) <= _MAX_KEY


class _TagRole(enum.Enum):
    """What a tag in a value is: its end, a part of its text, or a sign that this is no call."""

    END = 0
    TEXT = 1
    NO_CALL = 2


_OUTPUT_END: Final = "end of the output"
"""Stands for a tag where nothing follows."""
_LINE_BREAK: Final = re.compile(r"\n[ \t]*\Z")
"""The line break before a tag on a line of its own."""


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
        self._call_tags = [tag for tag in (self._opening, self._function_tag) if tag]
        self._end_tags = [self._call_end, *self._closings]
        self._tags = [self._value_end, self._key_tag, *self._end_tags, *self._call_tags]
        self._any_tag = re.compile("|".join(map(re.escape, self._tags)))
        self._longest_tag = max(map(len, self._tags))
        self._key = ""
        self._values: dict[str, str] = {}  # of the call so far, as JSON; the last of a name counts
        self._types: frozenset[str] = frozenset()
        self._scanner = json_scanner()
        self._depth = 0  # calls within the text of the value that are not closed
        self._has_end_tag = False  # the text of the value contains its end tag
        self._has_lines = False  # the text of the value contains a line break,
        self._is_mid_line = False  # and more than blanks after the last one
        # Places in the text of the value and in the candidate, from which on an answer that ends
        # within the value is read again:
        self._first_inner_call: tuple[int, int] | None = (
            None  # the first call in the text of the value
        )
        self._last_call_end: tuple[int, int] | None = (
            None  # the last end of a call before other text
        )
        self._is_ambiguous = False  # the value may contain the start of a call without its end
        self._has_opening = False
        self._is_ended = False  # no more text comes
        self._state = self._read_text

    def parse_end(self, *, is_cut: bool = False) -> Sequence[OutputPart]:
        if not is_cut:
            self._end_output()
            first = min(filter(None, (self._first_inner_call, self._last_call_end)), default=None)
            if self._state == self._read_value and first and first == self._first_inner_call:
                self._is_ambiguous, self._last_call_end = True, None
                self._read_again(self._rewind(first))
            if self._state == self._read_value and self._last_call_end:
                rest = self._rewind(self._last_call_end).removeprefix(self._value_end)
                self._buffer = self._value_end
                self._finish_value(self._value_end)
                self._read_again(rest)
        return super().parse_end(is_cut=is_cut)

    def _read_again(self, text: str) -> None:
        self._is_ended = False
        self._depth = 0
        self._read(text)
        self._end_output()

    def _rewind(self, place: tuple[int, int]) -> str:
        """Take back and return all text from a place in the value on."""
        num_value, num_candidate = place
        rest = "".join([*self._candidate[num_candidate:], self._buffer])
        del self._value[num_value:], self._candidate[num_candidate:]
        self._buffer = ""
        return rest

    def _end_output(self) -> None:
        """Read the text that was held back, and accept a call whose end tags are missing."""
        self._is_ended = True
        while self._buffer and self._state():
            pass
        if self._state == self._expect_parameter and not self._buffer and self._is_complete():
            self._finish_call()

    def _is_complete(self) -> bool:
        """Return whether the call is one without its end tags.

        It names a tool of the request and has a parameter, if the tool has any, and all that are
        required.
        """
        schema = self._tools.get(self._name)
        if schema is None or (described_properties(schema) and not self._values):
            return False
        return required_names(schema) <= self._values.keys()

    def _read_text(self) -> bool:
        position, marker = find_marker(self._buffer, self._call_tags)
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
        if length == len(self._buffer) <= _MAX_NAME and not self._is_ended:
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
        self._consume_whitespace()
        following = dict.fromkeys(self._end_tags, self._after_call)
        following |= {self._key_tag: self._read_key, self._value_end: self._expect_parameter}
        if self._is_complete():
            if any(self._buffer.startswith(tag) for tag in self._call_tags):
                self._finish_call()
                return True
            following |= dict.fromkeys(self._call_tags, self._expect_parameter)
        is_decided = self._expect(following)
        if self._state == self._after_call:
            self._finish_call()
        return is_decided

    def _finish_call(self) -> None:
        pairs = [f"{json_string(key)}: {value}" for key, value in self._values.items()]
        self._accept_call(ToolCall(self._name, "{" + ", ".join(pairs) + "}"))
        self._state = self._after_call

    def _read_key(self) -> bool:
        length, end = self._find_key(0)
        if end < 0:
            return False
        if not end:
            self._reject_candidate()
            return True
        self._key = self._buffer[:length].strip()
        self._consume(end)
        self._types = value_types(self._tools.get(self._name, {}), self._key)
        self._scanner = json_scanner()
        self._depth, self._first_inner_call, self._last_call_end = 0, None, None
        self._has_end_tag = self._has_lines = self._is_mid_line = False
        self._state = self._expect_value if self._value_tag else self._read_value
        return True

    def _find_key(self, start: int) -> tuple[int, int]:
        """Return where a key that begins here ends, and where its end tag ends.

        The latter is 0 if this is no key, and negative if more text is needed.
        """
        position = self._buffer.find(self._key_end, start, start + _MAX_KEY + len(self._key_end))
        if position < 0:
            is_open = len(self._buffer) - start <= _MAX_KEY + len(self._key_end)
            return 0, -1 if is_open and not self._is_ended else 0
        is_key = _is_key(self._buffer[start:position].strip(), self._key_end)
        return position, position + len(self._key_end) if is_key else 0

    def _expect_value(self) -> bool:
        return self._expect({self._value_tag: self._read_value})

    def _read_value(self) -> bool:
        found = self._any_tag.search(self._buffer)
        if found is None:
            held = max(num_marker_characters(self._buffer, tag) for tag in self._tags)
            self._add_value(len(self._buffer) - held)
            return False
        self._add_value(found.start())
        tag = found[0]
        role: _TagRole | None = _TagRole.TEXT
        if not (self._is_json and self._scanner.is_in_string):
            is_value_end = tag == self._value_end
            role = self._classify_value_end() if is_value_end else self._classify_other_tag(tag)
        if role is _TagRole.END:
            self._finish_value(tag)
        elif role is _TagRole.TEXT:
            self._add_value(len(tag))
        elif role is _TagRole.NO_CALL:
            self._reject_candidate()
        return role is not None

    @property
    def _is_json(self) -> bool:
        """The value cannot be a string."""
        return bool(self._types) and "string" not in self._types

    def _classify_value_end(self) -> _TagRole | None:
        """Return what the end tag at the start of the buffer is; None if more text is needed."""
        tag, position = self._next_tag(len(self._value_end))
        is_closed = True
        if tag == self._call_end and self._closings and self._has_opening:
            after, _ = self._next_tag(position)
            is_closed = after in (*self._closings, *self._call_tags, _OUTPUT_END)
            tag = None if after is None else tag
        if tag is None:
            return None
        if tag == self._call_end and not self._depth and not is_closed:
            self._last_call_end = len(self._value), len(self._candidate)
        elif not self._depth and tag and (tag != self._value_end or self._is_json):
            return _TagRole.END
        self._has_end_tag = self._has_end_tag or not self._depth
        return _TagRole.TEXT

    def _classify_other_tag(self, tag: str) -> _TagRole | None:
        """Return what the tag at the start of the buffer is; None if more text is needed."""
        if tag in self._call_tags:
            name = self._name_of_call(0) if tag == self._opening else ""
            if name and not self._is_ambiguous:
                self._depth += 1
                self._first_inner_call = self._first_inner_call or (
                    len(self._value),
                    len(self._candidate),
                )
            return None if name is None else _TagRole.TEXT
        if self._depth:
            self._depth -= tag == self._end_tags[-1]
            return _TagRole.TEXT
        if self._is_ambiguous or (self._is_on_own_lines and self._is_mid_line):
            return _TagRole.TEXT
        if tag == self._key_tag:
            is_end = self._is_next_key()
        else:
            following, _ = self._next_tag(len(tag))
            ends = (*self._call_tags, _OUTPUT_END, *self._closings[: tag == self._call_end])
            is_end = None if following is None else following in ends
        if not is_end:
            return None if is_end is None else _TagRole.TEXT
        if not self._has_end_tag:
            return _TagRole.END
        return None if self._is_ended and self._last_call_end else _TagRole.NO_CALL

    def _tag_at(self, position: int) -> tuple[str | None, int]:
        """Return the tag at a position of the buffer, after whitespace, and where it ends.

        The tag is "" if other text follows, and None if more text is needed.
        """
        start = after_whitespace(self._buffer, position)
        text = self._buffer[start : start + self._longest_tag]
        found = self._any_tag.match(text)
        if found:
            return found[0], start + found.end()
        if self._is_ended:
            return "" if text else _OUTPUT_END, start
        return None if any(tag.startswith(text) for tag in self._tags) else "", start

    def _next_tag(self, position: int) -> tuple[str | None, int]:
        """Return what `_tag_at` does; a call counts only if it calls a tool of the request."""
        tag, end = self._tag_at(position)
        if tag in self._call_tags:
            name = self._name_of_call(end - len(tag))
            tag = None if name is None else tag if name in self._tools else ""
        return tag, end

    def _name_of_call(self, start: int) -> str | None:
        """Return the name in the call that begins with a tag here; "" if none does.

        It is None if more text is needed.
        """
        tag, position = self._tag_at(start)
        if self._function_tag and tag == self._opening:
            tag, position = self._tag_at(position)
            if tag != self._function_tag:
                return None if tag is None else ""
        name = _NAME.match(self._buffer, after_whitespace(self._buffer, position))
        if name is None or (name.end() == len(self._buffer) and not self._is_ended):
            return None
        is_named = self._buffer.startswith(self._name_end, name.end())
        following, _ = self._tag_at(name.end() + len(self._name_end))
        if is_named and following in (self._key_tag, self._call_end):
            return name[0]
        return None if is_named and following is None else ""

    def _is_next_key(self) -> bool | None:
        """Return whether the tag at the start of the buffer begins the next parameter.

        It does if it names one that the tool has and that has no value yet.
        """
        length, end = self._find_key(len(self._key_tag))
        if end <= 0:
            return None if end else False
        if self._value_tag:
            text = self._buffer[after_whitespace(self._buffer, end) :][: len(self._value_tag)]
            if text != self._value_tag:
                is_open = self._value_tag.startswith(text) and not self._is_ended
                return None if is_open else False
        key = self._buffer[len(self._key_tag) : length].strip()
        properties = described_properties(self._tools.get(self._name, {}))
        is_given = key == self._key or key in self._values
        return not is_given and (not properties or key in properties)

    def _finish_value(self, tag: str) -> None:
        """End the value. tag: its end tag, or the one after it if its end tag is missing."""
        text = "".join(self._value)
        self._value.clear()
        if self._is_on_own_lines:
            text = text.removeprefix("\n")
        if tag != self._value_end:
            text = _LINE_BREAK.sub("", text)
        else:
            self._consume(len(tag))
            text = text.removesuffix("\n") if self._is_on_own_lines else text
        self._values[self._key] = value_json(text, self._types)
        self._state = self._expect_parameter

    def _add_value(self, count: int) -> None:
        if not count:
            return
        text = self._buffer[:count]
        self._value.append(text)
        _, line_break, last = text.rpartition("\n")
        self._has_lines = self._has_lines or bool(line_break)
        is_after_text = self._is_mid_line and not line_break
        self._is_mid_line = self._has_lines and (is_after_text or bool(last.strip()))
        if not self._scanner.complete and not self._scanner.invalid:
            self._scanner.scan_text(text)
        self._consume(count)

    def _after_call(self) -> bool:
        following = dict.fromkeys([*self._end_tags, self._value_end], self._after_call)
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
