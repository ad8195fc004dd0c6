"""What a tool-call format consists of: `ToolCallFormat`, and the grammars that it makes.

    kind                in              formats whose calls are
    JsonCallFormat      json_calls.py   JSON: an object with the name, or a name before an object
    TaggedCallFormat    tagged.py       tags around a function and each of its parameters
    PythonicFormat      pythonic.py     calls in Python

A grammar (Lark, for llguidance) admits exactly what the parser of the format reads as calls, with
arguments that conform to their JSON schemas.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from api_server.parsers.output import OutputParser
from api_server.parsers.tools.call_parser import read_arguments
from api_server.protocol.fields import errors_of
from api_server.protocol.json_schema import SchemaWork, json_rule
from api_server.protocol.tools import FunctionTool
from proto.errors import InvalidRequestError

MAX_CALLS_IN_GRAMMAR: Final = 16
"""Most calls that a grammar admits in one answer: a small model may never end by itself."""
ToolSchemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool → JSON schema of its arguments, for all tools of a request."""
NAME: Final = "{name}"
INDEX: Final = "{index}"
OPTIONAL_BLANK: Final = r"/[ \n]?/"
"""Lark terminal for the whitespace that models write beside markers."""


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The text around calls, exactly as the models of a format were trained to write it.

        begin (call_begin NAME name_end ARGUMENTS call_end) between (…) end

    INDEX in `name_end` stands for the number of the call.
    """

    begin: str = ""
    call_begin: str = ""
    name_end: str = ""
    call_end: str = ""
    between: str = ""
    end: str = ""

    @property
    def start(self) -> str:
        """The text before the name of the first call."""
        return f"{self.begin}{self.call_begin}"

    def call(self, name: str, arguments: str, index: int) -> str:
        name_end = self.name_end.replace(INDEX, str(index))
        return f"{self.call_begin}{name}{name_end}{arguments}{self.call_end}"


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
    """One way in which models write tool calls: a layout, and a parser that reads it.

    The layout is what grammars force and what templates without tools show; the parser reads it
    and what models make of it. Derived classes are kinds of formats; most formats are instances.

    name: value of --tool-call-parser. markers: texts that may be special tokens of the tokenizer;
    the detokenizer keeps them so that the parser sees them. Whitespace beside them is optional. If
    the layout begins with one, a grammar can begin there, in an answer that is text otherwise.
    template_markers: a chat template that contains all strings of one of these groups belongs to
    this format. optional_opening: marker that grammars admit before all calls. free_text: Lark
    terminal of an answer without calls, if the layout begins with no marker. call_id: id of a call
    in the prompt, with NAME and INDEX; empty for any. needs_schemas: its grammar holds every tool
    to its schema, not only strict ones.
    """

    name: str
    layout: CallLayout
    markers: Sequence[str] = ()
    template_markers: Sequence[Sequence[str]] = ()
    optional_opening: str = ""
    free_text: str = ""
    call_id: str = ""
    needs_schemas: ClassVar[bool] = False

    def new_parser(self, tools: ToolSchemas) -> OutputParser:
        """Return a parser for one choice."""
        raise NotImplementedError

    def argument_rules(self, rule: str, tool: FunctionTool, rules: "CallRules") -> list[str]:
        """Return Lark rules for the arguments of a tool; the first one has this name.

        Raises InvalidRequestError for a schema that this format cannot enforce.
        """
        return [json_argument_rule(rule, tool, rules.work)]

    def render_arguments(self, arguments: str) -> str:
        """Return arguments, which are JSON, as the model writes them."""
        return arguments

    @property
    def call_markers(self) -> Sequence[str]:
        """The markers of which each begins a call."""
        return (self.trigger,) if self.trigger else ()

    @property
    def trigger(self) -> str:
        """The marker with which calls begin; empty if they begin with other text."""
        start = self.layout.start
        return next((marker for marker in self.markers if start.startswith(marker)), "")

    def grammar(self, rules: "CallRules") -> list[str]:
        """Return the grammar of calls, as Lark rules.

        The rule `calls` is an answer that consists of calls. In an answer that may also be text,
        the engine enforces the rule `after_trigger` after the trigger. Raises InvalidRequestError
        for a schema that this format cannot enforce.
        """
        layout, trigger = self.layout, self.trigger
        calls, argument_rules = [], []
        for index, tool in enumerate(rules.tools):
            arguments = f"arguments_{index}"
            before = self.lark(f"{layout.call_begin}{tool.name}", rules)
            before += self.lark(layout.name_end, rules)
            if trigger and not layout.begin:
                before = before[1:]  # the trigger
            calls.append(" ".join([*before, arguments, *self.lark(layout.call_end, rules)]))
            argument_rules += self.argument_rules(arguments, tool, rules)
        opening = self.lark(trigger, rules)
        begin = self.lark(layout.begin, rules)[len(opening) :]
        further = self.lark(layout.between, rules)
        if not layout.begin:
            further = self.lark(layout.between + trigger, rules)
        if self.optional_opening:
            opening = [f"{rules.marker(self.optional_opening)}?"]
        all_calls = rules.repeated("call", " ".join([*further, "call"]))
        body = [*begin, all_calls, *self.lark(layout.end, rules)]
        lines = [
            f"calls: {' '.join([*opening, 'after_trigger'])}",
            f"after_trigger: {' '.join(body)}",
            f"call: {' | '.join(calls)}",
            *argument_rules,
        ]
        for terminal, expression in (("BLANK", OPTIONAL_BLANK), ("INDEX", "/[0-9]{1,4}/")):
            if any(re.search(rf"\b{terminal}\b", line) for line in lines):
                lines.append(f"{terminal}: {expression}")
        return lines

    def lark(self, text: str, rules: "CallRules") -> list[str]:
        """Return the Lark items of a text of the layout; a marker is an item of its own.

        Whitespace beside a marker, or as a text of its own, becomes BLANK.
        """
        items = []
        for piece in self._pieces.split(text):
            stripped = piece.strip()
            if stripped == INDEX:
                items.append("INDEX")
            elif stripped in self.markers:
                before, _, after = piece.partition(stripped)
                items += [
                    *["BLANK"] * bool(before),
                    rules.marker(stripped),
                    *["BLANK"] * bool(after),
                ]
            elif piece:
                items.append(quoted(piece) if stripped else "BLANK")
        return items

    @property
    def _pieces(self) -> re.Pattern[str]:
        markers = "|".join(map(re.escape, self.markers)) or "(?!)"
        return re.compile(rf"({re.escape(INDEX)}|[ \n]*(?:{markers})[ \n]*)")

    def render_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of calls as the model writes it.

        calls: (name, arguments as JSON). Arguments that are no JSON object stay as they are.
        """
        layout, rendered = self.layout, []
        for index, (name, arguments) in enumerate(calls):
            if read_arguments(arguments) == arguments:
                arguments = self.render_arguments(arguments)
            rendered.append(layout.call(name, arguments, index))
        return f"{layout.begin}{layout.between.join(rendered)}{layout.end}"


def json_argument_rule(name: str, tool: FunctionTool, work: SchemaWork) -> str:
    """Return the Lark rule of this name for the arguments of a tool as JSON.

    Arguments of a strict tool conform to its schema.
    """
    with errors_of(f"{tool.field}.function.parameters"):
        schema = compact_schema(tool.parameters) if tool.strict else ANY_OBJECT
        return json_rule(name, schema, work)


@dataclass(frozen=True, slots=True)
class CallRules:
    """Constraints on the calls of one answer.

    tools: that the answer may call. max_calls: most calls in the answer. token_ids: ids of the
    markers that are special tokens. work: of the request's schemas.
    """

    tools: Sequence[FunctionTool]
    max_calls: int
    token_ids: Mapping[str, int]
    work: SchemaWork

    def marker(self, text: str) -> str:
        """Return a marker in Lark: a special token by its id, other text in quotes."""
        token_id = self.token_ids.get(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def repeated(self, first: str, further: str) -> str:
        """Return the Lark expression of one call and up to `max_calls` - 1 further ones."""
        return first if self.max_calls == 1 else f"{first} ({further}){{0,{self.max_calls - 1}}}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# JSON schemas of arguments, in the form that grammars take.


_ANNOTATIONS: Final = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "title"}
    | {"readOnly", "writeOnly", "strict"}
)
"""Keywords that describe a value and restrict nothing."""
_SCHEMA_MAPS: Final = frozenset({"properties", "$defs", "definitions"})
_LITERAL_VALUES: Final = frozenset({"enum", "const"})
_EXTENDING_KEYWORDS: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
    | {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"}
    | {"dependentRequired", "dependencies", "minProperties", "maxProperties"}
)
"""Keywords that may require properties which `properties` does not name."""
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


def compact_schema(schema: Any, *, closed: bool = True) -> Any:
    """Return a schema without annotations; `closed` also forbids properties it does not name.

    Without `closed`, a model constrained to the schema would invent properties of no use. A value
    that is no schema is returned unchanged, for the grammar compiler to refuse.
    """
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _ANNOTATIONS:
            continue
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            inner = closed and name == "properties"
            result[name] = {
                key: compact_schema(member, closed=inner) for key, member in value.items()
            }
        elif name in _LITERAL_VALUES:
            result[name] = value
        elif isinstance(value, list):
            result[name] = [compact_schema(member, closed=False) for member in value]
        else:
            result[name] = compact_schema(value, closed=closed and name == "items")
    named = described_properties(result)
    names_all = are_named(result.get("required", []), named)
    if closed and named and names_all and not _EXTENDING_KEYWORDS & result.keys():
        result["additionalProperties"] = False
    return result


def are_named(required: Any, properties: Mapping[str, Any]) -> bool:
    """Return whether `required`, which may be any JSON value, is a list of keys of `properties`."""
    return isinstance(required, list) and all(
        isinstance(name, str) and name in properties for name in required
    )


def described_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the properties that a schema, which need not be a valid one, describes."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def required_names(schema: Mapping[str, Any]) -> set[str]:
    """Return the names that a schema, which need not be a valid one, requires."""
    required = schema.get("required")
    names = required if isinstance(required, list) else ()
    return {name for name in names if isinstance(name, str)}


def schema_properties(schema: Mapping[str, Any]) -> list[tuple[str, bool, Mapping[str, Any]]]:
    """Return (name, whether it is required, schema) of each property, in the schema's order.

    Raises InvalidRequestError for a schema that a list of properties does not express.
    """
    unsupported = (_EXTENDING_KEYWORDS - {"additionalProperties"}) & schema.keys()
    extra = schema.get("additionalProperties", False)
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    if unsupported:
        raise InvalidRequestError(f"calls of this model cannot be held to {min(unsupported)}")
    if not isinstance(properties, dict):
        raise InvalidRequestError("properties must be an object")
    if not are_named(required, properties):
        raise InvalidRequestError("required must be a list of properties that are described")
    if extra not in (True, False) and not isinstance(extra, dict):
        raise InvalidRequestError("additionalProperties must be a schema")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return [
        (name, name in required, {**shared, **member} if isinstance(member, dict) else shared)
        for name, member in properties.items()
    ]
