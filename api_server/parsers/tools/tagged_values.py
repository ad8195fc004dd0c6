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
from api_server.parsers.tools.pythonic import python_value
from api_server.protocol.json_lark import json_rules
from api_server.protocol.json_schema import listed_types, type_of
from proto.errors import InvalidRequestError

ALL_TYPES: Final = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_MAX_REFERENCES: Final = 16
_DEFINITIONS: Final = ("$defs", "definitions")


def value_types(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the schema of a tool allows for a parameter; empty if unknown."""
    types = types_of(described_properties(parameters).get(key), parameters)
    return frozenset() if types == ALL_TYPES else types


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types that a schema allows, or more. root: has the definitions."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return ALL_TYPES
    types = ALL_TYPES
    if "type" in schema:
        types &= listed_types(schema["type"])
    if "const" in schema:
        types &= _types_of_values([schema["const"]])
    if isinstance(schema.get("enum"), list):
        types &= _types_of_values(schema["enum"])
    if "$ref" in schema:
        types &= types_of(_definition(schema["$ref"], root), root, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            parts = [types_of(part, root, depth + 1) for part in schema[keyword]]
            types &= frozenset[str]().union(*parts)
    if isinstance(schema.get("allOf"), list):
        for part in schema["allOf"]:
            types &= types_of(part, root, depth + 1)
    return types | {"integer"} if "number" in types else types


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


_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}


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
        literal = _CONSTANTS.get(text, "")
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
    name: str, schema: Mapping[str, Any], *, forbidden: str, end: str, after: Sequence[str]
) -> list[str]:
    """Return a Lark expression for a value without quotes and what follows it, and its rules.

    name: prefix of the rules' names. schema: with its definitions. forbidden: text that cannot be
    part of a string, because it ends the value. end: text behind the value; a lexer reads it
    together with a string. after: Lark items behind that. Raises InvalidRequestError for a schema
    that is not enforced.
    """
    behind = " ".join(after)
    quoted_end = [quoted(end)] if end else []
    texts, others = _split(schema, schema)
    if not texts:
        return [
            " ".join([f"{name}_json", *quoted_end, behind]),
            *json_rules(f"{name}_json", schema),
        ]
    other_types = frozenset[str]().union(*(types_of(other, schema) for other in others))
    if types_of(schema, schema) == ALL_TYPES and schema.keys() - _TEXT_KEYWORDS:
        other_types = ALL_TYPES  # values that keywords of other types restrict are not written
    bounds = [f"~/(?s:.*){_escaped(forbidden)}(?s:.*)/"] if forbidden else []
    bounds += [f"~/{_JSON_TEXTS[kind]}/" for kind in sorted(other_types & _JSON_TEXTS.keys())]
    types = frozenset({"string", *other_types})
    choices = [part for text in texts for part in _text_terminals(text, bounds, forbidden, types)]
    choices += [quoted(literal) for other in others for literal in _literals(other, schema)]
    terminal = f"{name.upper()}_TEXT"
    rules = [" ".join([f"{terminal}: ({' | '.join(choices)})", *quoted_end])]
    alternatives = [terminal]
    written = [other for other in others if types_of(other, schema) - {"boolean", "null"}]
    if written:
        definitions = {place: schema[place] for place in _DEFINITIONS if place in schema}
        union = {"anyOf": written, **definitions} if len(written) > 1 else written[0] | definitions
        alternatives.append(" ".join([f"{name}_json", *quoted_end]))
        rules += json_rules(f"{name}_json", union)
    return [f"({' | '.join(alternatives)}) {behind}", *rules]


def _split(
    schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0
) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
    """Return the alternatives of a schema that are strings, and the others."""
    types = types_of(schema, root)
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
        parts = [_definition(own[keyword], root)] if keyword == "$ref" else own[keyword]
        beside = own.keys() - {keyword, "type"}
        if beside or (keyword == "allOf" and len(parts) != 1):
            break
        texts: list[Mapping[str, Any]] = []
        others: list[dict[str, Any]] = []
        for part in parts:
            if not isinstance(part, Mapping):
                raise InvalidRequestError(f"calls of this model cannot be held to {keyword}")
            found = _split({**part, **_only_type(own, part)}, root, depth + 1)
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


def _only_type(own: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": own["type"]} if "type" in own and "type" not in part else {}


def _literals(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
    """Return the booleans and null that a schema allows, as JSON."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    types = types_of(schema, root)
    return [
        json.dumps(value)
        for kind, value in (("boolean", True), ("boolean", False), ("null", None))
        if kind in types and (not isinstance(values, list) or any(value is each for each in values))
    ]


def _text_terminals(
    schema: Mapping[str, Any], bounds: Sequence[str], forbidden: str, types: frozenset[str]
) -> list[str]:
    """Return Lark expressions of which each is a set of texts that conform to a string's schema.

    types: that the whole value may have.
    """
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        if any(forbidden and forbidden in value for value in values):
            raise InvalidRequestError(f"calls of this model cannot write {forbidden} in a value")
        if any(value_json(value, types) != json_string(value) for value in values):
            raise InvalidRequestError("calls of this model cannot tell strings from other values")
        return [quoted(value) for value in values]
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
                f"calls of this model cannot be held to the format {schema['format']}"
            )
        parts.append(f"/{_FORMATS[schema['format']]}/")
    return [f"({' & '.join(parts)})"]


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
        raise InvalidRequestError(f"calls of this model cannot be held to the pattern {pattern}")
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
