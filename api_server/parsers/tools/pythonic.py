"""Tool calls that are a Python list: the format `PythonicFormat` and its parser.

    [weather(city="Paris", days=[1, 2]), now()]

Only an answer that starts with such a list, and whose calls name tools of the request, contains
calls: lists are common in text. Values are literals of Python or JSON; the arguments are returned
as JSON. A call is returned when it is complete; anything else is content.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api_server.parsers.output import OutputParser
from api_server.parsers.tools.base import (
    CallRules,
    ToolCallFormat,
    ToolSchemas,
    compact_schema,
    quoted,
    schema_properties,
)
from api_server.parsers.tools.call_parser import CallParser, ToolCall, python_scanner
from api_server.protocol.fields import errors_of
from api_server.protocol.json_schema import SchemaWork, json_rule
from api_server.protocol.tools import FunctionTool

OPENING: Final = "<|python_start|>"
CLOSING: Final = "<|python_end|>"
_SEPARATORS: Final = ("", ",")
_FUNCTION_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class PythonicFormat(ToolCallFormat):
    """`[find(text="a"), …]`, of Llama 3.2 and 4; some models put markers around the list."""

    needs_schemas = True

    def new_parser(self, tools: ToolSchemas) -> OutputParser:
        return PythonicParser(tools)

    @property
    def call_markers(self) -> Sequence[str]:
        return (OPENING,)

    def argument_rules(self, rule: str, tool: FunctionTool, rules: CallRules) -> list[str]:
        return _keyword_rules(rule, tool, rules.work)

    def render_arguments(self, arguments: str) -> str:
        pairs = json.loads(arguments).items()
        return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in pairs)


def _keyword_rules(rule: str, tool: FunctionTool, work: SchemaWork) -> list[str]:
    """Return the rules of `a=1, b=2`, with properties in the order of the schema.

    RULE_first_N: the properties from the Nth on, if none came before; RULE_then_N: the same after
    another property, so with a comma. A call without its schema would admit anything, so a tool
    that is not strict is held to its schema too.
    """
    rules = []
    with errors_of(f"{tool.field}.function.parameters"):
        properties = schema_properties(compact_schema(tool.parameters))
        values = [
            _value_rule(f"{rule}_value_{index}", schema, work)
            for index, (_, _, schema) in enumerate(properties)
        ]
    for index, (name, required, _) in enumerate(properties):
        value = f"{rule}_value_{index}"
        pair = f"{quoted(name + '=')} {value}"
        then, first = f"{rule}_then_{index + 1}", f"{rule}_first_{index + 1}"
        skipped_first = "" if required else f" | {first}"
        skipped_then = "" if required else f" | {then}"
        rules += [
            f"{rule}_first_{index}: {pair} {then}{skipped_first}",
            f'{rule}_then_{index}: ", " {pair} {then}{skipped_then}',
            values[index],
        ]
    end = len(properties)
    rules += [f"{rule}: {rule}_first_0", f'{rule}_first_{end}: ""', f'{rule}_then_{end}: ""']
    return rules


def _value_rule(name: str, schema: Mapping[str, Any], work: SchemaWork) -> str:
    if schema.get("type") == "boolean" and not {"enum", "const"} & schema.keys():
        return f'{name}: "True" | "False"'
    return json_rule(name, schema, work)


class PythonicParser(CallParser):
    """Parser of `[name(argument=literal, …), …]` at the start of an answer."""

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names, _SEPARATORS)
        self._scanner = python_scanner()

    def _read_start(self) -> bool:
        self._consume_whitespace()
        if self._buffer.startswith("["):
            self._consume(1)
            self._state = self._expect_call
        elif self._buffer.startswith(OPENING):
            self._consume(len(OPENING))
        elif OPENING.startswith(self._buffer):
            return False
        else:
            self._reject_candidate()
        return True

    def _expect_call(self) -> bool:
        """State after the `[` or a comma."""
        self._consume_whitespace()
        found = _FUNCTION_NAME.match(self._buffer)
        if found is None:
            if self._buffer.startswith("]") and self._parts.is_after_call:
                self._close_list()  # a comma after the last call
            elif self._buffer:
                self._reject_candidate()
            return bool(self._buffer)
        if found.end() == len(self._buffer):
            return False
        if self._buffer[found.end()] != "(" or found[0] not in self._tool_names:
            self._reject_candidate()
            return True
        self._name = found[0]
        self._consume(found.end())
        self._scanner = python_scanner()
        self._state = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        position = self._scanner.scan_text(self._buffer)
        self._value.append(self._buffer[:position])
        self._consume(position)
        if self._scanner.invalid:
            self._reject_candidate()
        elif self._scanner.complete:
            try:
                arguments = python_arguments("".join(self._value))
            except (ValueError, RecursionError):
                self._reject_candidate()
                return True
            self._accept_call(ToolCall(self._name, arguments))
            self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        self._consume_whitespace()
        if not self._buffer:
            return False
        if self._buffer.startswith(","):
            self._consume(1)
            self._state = self._expect_call
        elif self._buffer.startswith("]"):
            self._close_list()
        else:
            self._reject_candidate()
        return True

    def _may_become_call(self, held: str) -> bool:
        if self._state == self._expect_call and self._buffer:
            return any(name.startswith(self._buffer) for name in self._tool_names)
        return True

    def _close_list(self) -> None:
        self._candidate.clear()
        self._buffer = self._buffer[1:]
        self._state = self._after_list

    def _after_list(self) -> bool:
        self._consume_whitespace()
        if self._buffer.startswith("]"):
            self._buffer = self._buffer[1:]  # a bracket too many
        elif self._buffer.startswith("["):
            self._consume(1)
            self._state = self._expect_call
        elif self._buffer.startswith(CLOSING):
            self._buffer = self._buffer[len(CLOSING) :]
            self._candidate.clear()
            self._state = self._read_text
        elif CLOSING.startswith(self._buffer):
            return False
        else:
            self._reject_candidate()
        return True

    def _read_text(self) -> bool:
        self._parts.add_content(self._buffer)
        self._buffer = ""
        return False


# Python literals as JSON.


_TOKEN: Final = re.compile(
    r"""[ \t\r\n]*(?:
        (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![0-9A-Za-z_.]))
      | (?P<word>[^\W\d]\w*)
      | (?P<delimiter>[\[\]{}(),:=])
    )""",
    re.X,
)
PYTHON_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS: Final = {**PYTHON_CONSTANTS, "true": "true", "false": "false", "null": "null"}
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.S)
_ESCAPED: Final = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"},
    **{"0": "\0", "\\": "\\", "'": "'", '"': '"', "\n": ""},
}
_MAX_CODE_POINT: Final = 0x10FFFF


def python_value(text: str) -> str:
    """Return a Python literal as JSON; raise ValueError for other text."""
    return _LiteralReader(text).read_value()


def python_arguments(text: str) -> str:
    """Return `(city="Paris", days=[1, 2])` as a JSON object; raise ValueError for other text."""
    return _LiteralReader(text).read_arguments()


class _LiteralReader:
    """Recursive-descent reader of literals. `ValueScanner` has limited the nesting."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._position = 0

    def read_arguments(self) -> str:
        values: dict[str, str] = {}
        self._expect("(")
        while not self._accept(")"):
            kind, name = self._next()
            if kind != "word" or name in values or name in _CONSTANTS:
                raise ValueError("no argument name, or a repeated one")
            self._expect("=")
            values[name] = self._value()
            if not self._accept(","):
                self._expect(")")
                break
        if self._position < len(self._tokens):
            raise ValueError("text after the arguments")
        pairs = [f"{json.dumps(name)}: {value}" for name, value in values.items()]
        return "{" + ", ".join(pairs) + "}"

    def read_value(self) -> str:
        value = self._value()
        if self._position < len(self._tokens):
            raise ValueError("text after the value")
        return value

    def _value(self) -> str:
        kind, text = self._next()
        if kind == "string":
            return json.dumps(_string(text), ensure_ascii=False)
        if kind == "number":
            return text
        if kind == "word" and text in _CONSTANTS:
            return _CONSTANTS[text]
        if text == "[":
            return "[" + ", ".join(self._values()) + "]"
        if text == "{":
            return "{" + ", ".join(self._pairs()) + "}"
        raise ValueError("not a literal")

    def _values(self) -> list[str]:
        values = []
        while not self._accept("]"):
            values.append(self._value())
            if not self._accept(","):
                self._expect("]")
                break
        return values

    def _pairs(self) -> list[str]:
        pairs = []
        while not self._accept("}"):
            kind, key = self._next()
            if kind != "string":
                raise ValueError("a key is no string")
            self._expect(":")
            pairs.append(f"{json.dumps(_string(key), ensure_ascii=False)}: {self._value()}")
            if not self._accept(","):
                self._expect("}")
                break
        return pairs

    def _next(self) -> tuple[str, str]:
        if self._position == len(self._tokens):
            raise ValueError("the text ends early")
        self._position += 1
        return self._tokens[self._position - 1]

    def _accept(self, delimiter: str) -> bool:
        upcoming = self._tokens[self._position : self._position + 1]
        is_next = upcoming == [("delimiter", delimiter)]
        self._position += is_next
        return is_next

    def _expect(self, delimiter: str) -> None:
        if not self._accept(delimiter):
            raise ValueError(f"no {delimiter}")


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, position = [], 0
    end = len(text.rstrip(" \t\r\n"))
    while position < end:
        found = _TOKEN.match(text, position)
        if found is None or found.lastgroup is None:
            raise ValueError("not a token")
        tokens.append((found.lastgroup, found[found.lastgroup]))
        position = found.end()
    return tokens


def _string(token: str) -> str:
    """Return the value of a string token; raise ValueError for an unpaired surrogate."""
    if token[0] == '"':
        try:
            value = str(json.loads(token))
        except ValueError:
            value = _ESCAPE.sub(_unescaped, token[1:-1])
    else:
        value = _ESCAPE.sub(_unescaped, token[1:-1])
    value.encode()
    return value


def _unescaped(found: re.Match[str]) -> str:
    """Return the character of a Python escape; an unknown one stands for itself, as in Python."""
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number <= _MAX_CODE_POINT else found[0]
    return _ESCAPED.get(code, found[0])
