"""Values without quotes, as tagged tool calls have them: their types, and their grammars.

{"type": "string", "maxLength": 5}                text of at most 5 characters
{"type": "integer"}                               JSON
{"anyOf": [{"type": "string"}, {"type": "array"}]}   JSON if it starts with [, otherwise text
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from api_server.parsers.tools.base import described_properties, quoted
from api_server.parsers.tools.pythonic import PYTHON_CONSTANTS, python_value
from api_server.protocol.json_schema import SchemaWork, json_rule, listed_types, type_of
from proto.errors import InvalidRequestError, shown

ALL_TYPES: Final = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_MAX_REFERENCES: Final = 16
_MAX_DEPTH: Final = 64
"""Of unions and references; deeper ones allow any type."""
_MAX_UNION_STEPS: Final = 2_000
"""For the types of a parameter, which the parser of each answer asks for."""
_DEFINITIONS: Final = ("$defs", "definitions")


def value_types(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the schema of a tool allows for a parameter; empty if unknown."""
    schema = described_properties(parameters).get(key)
    try:
        types = ValueSchemas(parameters, SchemaWork(_MAX_UNION_STEPS)).of(schema)
    except InvalidRequestError:
        return frozenset()
    return frozenset() if types == ALL_TYPES else types


class ValueSchemas:
    """The schemas of a document: the JSON types that they allow, and what of them is text.

    root: has the definitions, each of which is read once. work: of all methods, which raise
    InvalidRequestError if they take more.
    """

    def __init__(self, root: Mapping[str, Any], work: SchemaWork) -> None:
        self._root = root
        self._work = work
        self._of_reference: dict[str, frozenset[str]] = {}

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Return the types that a schema allows, or more."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ALL_TYPES
        self._work.take_steps(4)
        types = ALL_TYPES
        if "type" in schema:
            types &= listed_types(schema["type"])
        if "const" in schema:
            types &= _types_of_values([schema["const"]])
        if isinstance(schema.get("enum"), list):
            self._work.take_steps(len(schema["enum"]) // 8)
            types &= _types_of_values(schema["enum"])
        if isinstance(schema.get("$ref"), str):
            types &= self._of_target(schema["$ref"], depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                parts = [self.of(part, depth + 1) for part in schema[keyword]]
                types &= frozenset[str]().union(*parts)
        if isinstance(schema.get("allOf"), list):
            for part in schema["allOf"]:
                types &= self.of(part, depth + 1)
        return types | {"integer"} if "number" in types else types

    def _of_target(self, reference: str, depth: int) -> frozenset[str]:
        if reference not in self._of_reference:
            self._of_reference[reference] = ALL_TYPES  # where it refers to itself
            target = _definition(reference, self._root)
            self._of_reference[reference] = self.of(target, depth)
        return self._of_reference[reference]

    def split(
        self, schema: Mapping[str, Any], depth: int = 0
    ) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
        """Return the alternatives of a schema that are strings, and the others."""
        self._work.take_steps(4 + len(schema))
        types = self.of(schema)
        if "string" not in types:
            return [], [dict(schema)]
        if types == ALL_TYPES and not {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
            return [{**schema, "type": "string"}], []  # any text is of some type
        if depth > _MAX_REFERENCES:
            raise InvalidRequestError("calls of this model cannot be held to nested references")
        own = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
        for keyword in ("$ref", "anyOf", "oneOf", "allOf"):
            if keyword not in own:
                continue
            is_reference = keyword == "$ref"
            parts = [_definition(own[keyword], self._root)] if is_reference else own[keyword]
            beside = own.keys() - {keyword, "type"}
            if beside or (keyword == "allOf" and len(parts) != 1):
                break
            texts: list[Mapping[str, Any]] = []
            others: list[dict[str, Any]] = []
            for part in parts:
                if not isinstance(part, Mapping):
                    raise InvalidRequestError(f"calls of this model cannot be held to {keyword}")
                found = self.split({**part, **_only_type(own, part)}, depth + 1)
                texts += found[0]
                others += found[1]
            return texts, others
        else:
            if types == {"string"}:
                return [schema], []
            values = [own["const"]] if "const" in own else own.get("enum")
            if isinstance(values, list):
                strings = [value for value in values if isinstance(value, str)]
                rest = [value for value in values if not isinstance(value, str)]
                return [{"enum": strings}], [{"enum": rest}] if rest else []
            rest_types = sorted(types - {"string"})
            if "number" in rest_types:
                rest_types.remove("integer")
            return [{**own, "type": "string"}], [{**own, "type": kind} for kind in rest_types]
        raise InvalidRequestError(
            f"calls of this model cannot be held to {keyword} beside other keywords of a string"
        )

    def literals(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the booleans and null that a schema allows, as JSON."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        types = self.of(schema)
        return [
            json.dumps(value)
            for kind, value in (("boolean", True), ("boolean", False), ("null", None))
            if kind in types
            and (not isinstance(values, list) or any(value is each for each in values))
        ]

    def terminals(
        self,
        schema: Mapping[str, Any],
        bounds: Sequence[str],
        forbidden: str,
        types: frozenset[str],
    ) -> list[str]:
        """Return Lark expressions of which each is a set of texts that conform to a schema.

        types: that the whole value may have.
        """
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        terminals = (
            _literal_terminals(values, forbidden, types)
            if isinstance(values, list)
            else [_text_terminal(schema, bounds)]
        )
        for terminal in terminals:
            self._work.take_bytes(terminal)
        self._work.take_steps(16 * len(terminals))
        return terminals


def _types_of_values(values: Sequence[Any]) -> frozenset[str]:
    types = {type_of(value) for value in values}
    return frozenset(types | {"integer"} if "number" in types else types)


def _definition(reference: Any, root: Mapping[str, Any]) -> Any:
    if isinstance(reference, str):
        for place in _DEFINITIONS:
            name = reference.removeprefix(f"#/{place}/")
            if name != reference and isinstance(root.get(place), Mapping):
                return root[place].get(name)
    return None


# A value as JSON.


def value_json(text: str, types: frozenset[str]) -> str:
    """Return the text of a parameter as JSON. types: that its schema allows; empty if unknown.

    Text of a value that cannot be a string is JSON, or a literal of Python. Text that is neither
    becomes a string, so that the arguments are valid JSON in any case.
    """
    if types == {"string"}:
        return json_string(text)
    is_surely_json = bool(types) and "string" not in types
    source = text.strip() if is_surely_json else text
    found = _json_type(source)
    if is_surely_json:
        return source if found else _python_json(source) or json_string(text)
    if found in ("", "string") or source != source.strip():
        literal = PYTHON_CONSTANTS.get(text, "")
        is_allowed = {"true": "boolean", "false": "boolean", "null": "null"}.get(literal) in types
        return literal if literal and (is_allowed or not types) else json_string(text)
    is_allowed = not types or found in types or (found == "integer" and "number" in types)
    return source if is_allowed else json_string(text)


def _json_type(text: str) -> str:
    """Return the JSON type of a text, "" if it is no JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return ""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    kinds = {int: "integer", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _python_json(text: str) -> str:
    """Return a Python literal as JSON, "" for other text."""
    try:
        source = python_value(text)
    except (ValueError, RecursionError):
        return ""
    return source if _json_type(source) else ""


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Grammars.


_JSON_TEXTS: Final = {
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
    "number": "[-0-9](?s:.*)",
    "integer": "[-0-9](?s:.*)",
    "boolean": "true|false|True|False",
    "null": "null|None",
}
"""Type → texts that may be read as a value of it, so that no string is written as one."""
_TEXT: Final = "/(?s:.*)/"
_TEXT_KEYWORDS: Final = frozenset(
    {"type", "enum", "const", "minLength", "maxLength", "pattern", "format", *_DEFINITIONS}
)
_UNSUPPORTED: Final = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref"})
_HEX: Final = "[0-9a-fA-F]"
_FORMATS: Final = {
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9]+(\.[A-Za-z0-9]+)+",
    "uri": r"https?:\/\/[A-Za-z0-9.-]+(:[0-9]{1,5})?(\/[A-Za-z0-9._~!$&'()*+,;=:@\/-]*)?"
    r"(\?[A-Za-z0-9._~!$&'()*+,;=:@\/?-]*)?",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])",
}
"""Values of `format` → regular expressions of texts that conform, in Lark."""


def text_rules(
    name: str,
    schema: Mapping[str, Any],
    work: SchemaWork,
    *,
    forbidden: str,
    end: str,
    after: Sequence[str],
) -> list[str]:
    """Return a Lark expression for a value without quotes and what follows it, and its rules.

    name: prefix of the rules' names. schema: with its definitions. work: of the request.
    forbidden: text that cannot be part of a string, because it ends the value. end: text behind the
    value; a lexer reads it together with a string. after: Lark items behind that. Raises
    InvalidRequestError for a schema that is not enforced.
    """
    behind = " ".join(after)
    quoted_end = [quoted(end)] if end else []
    ValueSchemas(schema, SchemaWork(_MAX_UNION_STEPS)).of(schema)  # what the parser will need
    schemas = ValueSchemas(schema, work)
    texts, others = schemas.split(schema)
    if not texts:
        return [
            " ".join([f"{name}_json", *quoted_end, behind]),
            json_rule(f"{name}_json", schema, work),
        ]
    types_of = schemas.of
    other_types = frozenset[str]().union(*map(types_of, others))
    if types_of(schema) == ALL_TYPES and schema.keys() - _TEXT_KEYWORDS:
        other_types = ALL_TYPES  # values that keywords of other types restrict are not written
    bounds = [f"~/(?s:.*){_escaped(forbidden)}(?s:.*)/"] if forbidden else []
    bounds += [f"~/{_JSON_TEXTS[kind]}/" for kind in sorted(other_types & _JSON_TEXTS.keys())]
    types = frozenset({"string", *other_types})
    choices = list[str]()
    for text in texts:
        choices += schemas.terminals(text, bounds, forbidden, types)
    choices += [quoted(literal) for other in others for literal in schemas.literals(other)]
    terminal = f"{name.upper()}_TEXT"
    rules = [" ".join([f"{terminal}: ({' | '.join(choices)})", *quoted_end])]
    alternatives = [terminal]
    written = [other for other in others if types_of(other) - {"boolean", "null"}]
    if written:
        definitions = {place: schema[place] for place in _DEFINITIONS if place in schema}
        union = {"anyOf": written, **definitions} if len(written) > 1 else written[0] | definitions
        alternatives.append(" ".join([f"{name}_json", *quoted_end]))
        rules.append(json_rule(f"{name}_json", union, work))
    return [f"({' | '.join(alternatives)}) {behind}", *rules]


def _only_type(own: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": own["type"]} if "type" in own and "type" not in part else {}


def _literal_terminals(values: Sequence[str], forbidden: str, types: frozenset[str]) -> list[str]:
    if any(forbidden and forbidden in value for value in values):
        raise InvalidRequestError(f"calls of this model cannot write {forbidden} in a value")
    if any(value_json(value, types) != json_string(value) for value in values):
        raise InvalidRequestError("calls of this model cannot tell strings from other values")
    return [quoted(value) for value in values]


def _text_terminal(schema: Mapping[str, Any], bounds: Sequence[str]) -> str:
    unsupported = _UNSUPPORTED & schema.keys()
    if unsupported:
        raise InvalidRequestError(f"calls of this model cannot be held to {min(unsupported)}")
    parts = [_TEXT, *bounds]
    if {"minLength", "maxLength"} & schema.keys():
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        parts.append(f"/(?s:.{{{low},{high}}})/")
    if "pattern" in schema:
        parts.append(f"/{_searched(schema['pattern'])}/")
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise InvalidRequestError(
                f"calls of this model cannot be held to the format {shown(schema['format'])}"
            )
        parts.append(f"/{_FORMATS[schema['format']]}/")
    return f"({' & '.join(parts)})"


def _searched(pattern: str) -> str:
    """Return the regular expression, in Lark, of all texts in which a pattern is found."""
    body, before, behind = pattern, "(?s:.*)", "(?s:.*)"
    if body.startswith("^"):
        body, before = body[1:], ""
    if body.endswith("$") and not body.endswith("\\$"):
        body, behind = body[:-1], ""
    unescaped = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", body)
    is_anchored = not (before and behind)
    if "^" in unescaped or "$" in unescaped or (is_anchored and _alternates(unescaped)):
        raise InvalidRequestError(
            f"calls of this model cannot be held to the pattern {shown(pattern)}"
        )
    slashes = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", body)
    return f"{before}({slashes}){behind}"


def _alternates(pattern: str) -> bool:
    """Return whether a pattern without classes has a | outside of groups."""
    depth = 0
    for character in pattern:
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            return True
    return False


def _escaped(text: str) -> str:
    return re.sub(r"([^A-Za-z0-9_<> ])", r"\\\1", text)
