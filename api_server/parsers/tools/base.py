"""What a tool-call format consists of: `ToolCallFormat`, and the grammars that it makes.

A grammar (Lark, for llguidance) admits exactly what the parser of the format reads as calls, with
arguments that conform to their JSON schemas.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from api_server.parsers.output import OutputParser
from api_server.protocol.json_lark import json_rules
from proto.config import ToolCallParser
from proto.errors import InvalidRequestError

MAX_CALLS_IN_GRAMMAR: Final = 16
"""Most calls that a grammar admits in one answer: a small model may never end by itself."""
OPTIONAL_BLANK: Final = r"/[ \n]?/"
"""Lark terminal for the whitespace that models write beside markers."""


class ToolCallFormat:
    """One way in which models write tool calls: a parser, a grammar and a rendering.

    name: value of --tool-call-parser. markers: texts that may be special tokens of the
    tokenizer; the detokenizer keeps them so that the parser sees them. template_markers: a chat
    template that contains all strings of one of these groups belongs to this format.
    needs_schemas: its grammar holds every tool to its schema, not only strict ones.
    """

    name: ClassVar[ToolCallParser]
    markers: ClassVar[Sequence[str]] = ()
    template_markers: ClassVar[Sequence[Sequence[str]]] = ()
    needs_schemas: ClassVar[bool] = False

    def new_parser(self, tool_names: Collection[str]) -> OutputParser:
        """Return a parser for one choice. tool_names: names of the tools in the request."""
        raise NotImplementedError

    def grammar(self, rules: "CallRules") -> "CallGrammar":
        """Return the grammar of calls.

        Raises InvalidRequestError for a schema that this format cannot enforce.
        """
        raise NotImplementedError

    def render_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of calls as the model writes it. calls: (name, arguments as JSON)."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that an answer may call.

    schema: JSON schema of the arguments. strict: the arguments must conform to it.
    field: path of the tool in the request, for errors.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool
    field: str

    def argument_rules(self, name: str) -> list[str]:
        """Return Lark rules for the arguments as JSON; the first one has this name."""
        try:
            return json_rules(name, compact_schema(self.schema) if self.strict else ANY_OBJECT)
        except InvalidRequestError as error:
            raise error.in_field(f"{self.field}.function.parameters") from None


@dataclass(frozen=True, slots=True)
class CallRules:
    """Constraints on the calls of one answer.

    max_calls: most calls in the answer. token_ids: ids of the markers that are special tokens.
    """

    tools: Sequence[OfferedTool]
    max_calls: int
    token_ids: Mapping[str, int]

    def marker(self, text: str) -> str:
        """Return a marker in Lark: a special token by its id, other text in quotes."""
        token_id = self.token_ids.get(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def repeated(self, first: str, further: str) -> str:
        """Return the Lark expression of one call and up to `max_calls` - 1 further ones."""
        return first if self.max_calls == 1 else f"{first} ({further}){{0,{self.max_calls - 1}}}"


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Grammar of calls, as Lark rules. The rule `calls` is an answer that consists of calls.

    trigger: the marker after which the engine enforces the rule `after_trigger`, in an answer
    that may also be text. A format without a marker has no trigger; its `free_text` is the Lark
    terminal of an answer without calls.
    """

    rules: Sequence[str]
    trigger: str = ""
    free_text: str = ""


def json_call_rules(rules: CallRules, arguments_key: str) -> list[str]:
    """Return the rule `object`: a call as a JSON object with its arguments under this key."""
    objects = [
        f"{quoted(json_call_prefix(tool.name, arguments_key))} arguments_{index} {quoted('}')}"
        for index, tool in enumerate(rules.tools)
    ]
    return [f"object: {' | '.join(objects)}", *argument_rules(rules)]


def argument_rules(rules: CallRules) -> list[str]:
    """Return a rule `arguments_N` for the arguments of the Nth tool as JSON."""
    return [
        rule
        for index, tool in enumerate(rules.tools)
        for rule in tool.argument_rules(f"arguments_{index}")
    ]


def json_call_prefix(name: str, arguments_key: str) -> str:
    """Return the text of a JSON call before its arguments."""
    return f'{{"name": "{name}", "{arguments_key}": '


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
    named = result.get("properties")
    names_all = isinstance(named, dict) and _are_named(result.get("required", []), named)
    if closed and named and names_all and not _EXTENDING_KEYWORDS & result.keys():
        result["additionalProperties"] = False
    return result


def _are_named(required: Any, properties: Mapping[str, Any]) -> bool:
    """Return whether `required`, which may be any JSON value, is a list of these properties."""
    return isinstance(required, list) and all(
        isinstance(name, str) and name in properties for name in required
    )


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
    if not _are_named(required, properties):
        raise InvalidRequestError("required must be a list of properties that are described")
    if extra not in (True, False) and not isinstance(extra, dict):
        raise InvalidRequestError("additionalProperties must be a schema")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return [
        (name, name in required, {**shared, **member} if isinstance(member, dict) else shared)
        for name, member in properties.items()
    ]
