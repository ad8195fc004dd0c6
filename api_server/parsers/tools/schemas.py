"""JSON schemas of arguments, as grammars take them.

Owns nothing. What only describes is left out, which makes them small. Where properties are named
and nothing is said of others there are none: what a model that is held to its schema would write
into those is of no use to anyone.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from proto.errors import InvalidRequestError

_SPACING: Final = {"whitespace_pattern": r"[ ]|\n[ ]{0,24}"}
"""The same that structured output has."""
_WORDS_ONLY: Final = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "title"}
    | {"readOnly", "writeOnly", "strict"}
)
_MAPS: Final = frozenset({"properties", "$defs", "definitions"})
_DATA: Final = frozenset({"enum", "const"})
_JOINED: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
    | {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"}
    | {"dependentRequired", "dependencies", "minProperties", "maxProperties"}
)
"""Beside these an object may need properties that it does not name."""
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


def slim(schema: Any, *, closed: bool = True) -> Any:
    """Without descriptions; `closed`: without properties that it does not name.

    What is no schema stays as it is, for those who compile it to refuse.
    """
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _WORDS_ONLY:
            continue
        if name in _MAPS and isinstance(value, dict):
            inside = closed and name == "properties"
            found[name] = {key: slim(each, closed=inside) for key, each in value.items()}
        elif name in _DATA:
            found[name] = value
        elif isinstance(value, list):
            found[name] = [slim(each, closed=False) for each in value]
        else:
            found[name] = slim(value, closed=closed and name == "items")
    named = found.get("properties")
    names_all = isinstance(named, dict) and _are_named(found.get("required", []), named)
    if closed and named and names_all and not _JOINED & found.keys():
        found["additionalProperties"] = False
    return found


def _are_named(required: Any, properties: Mapping[str, Any]) -> bool:
    """Whether `required`, which may be anything, is a list of these."""
    return isinstance(required, list) and all(
        isinstance(name, str) and name in properties for name in required
    )


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """What a grammar says for JSON of a schema."""
    options = {"x-guidance": _SPACING}
    whole = {**schema, **options} if isinstance(schema, Mapping) else {**options}
    if schema is False:
        raise InvalidRequestError("no text satisfies the schema false")
    return f"%json {json.dumps(whole)}"


def property_rules(schema: Mapping[str, Any]) -> list[tuple[str, bool, Mapping[str, Any]]]:
    """(name, whether it is required, schema) of each property, in the order in which they come.

    Raises InvalidRequestError for a schema that says more than a list of properties can keep to.
    """
    wrong = (_JOINED - {"additionalProperties"}) & schema.keys()
    extra = schema.get("additionalProperties", False)
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    if wrong:
        raise InvalidRequestError(f"calls of this model cannot be held to {min(wrong)}")
    if not _are_named(required, properties):
        raise InvalidRequestError("required must be a list of properties that are described")
    if extra not in (True, False) and not isinstance(extra, dict):
        raise InvalidRequestError("additionalProperties must be a schema")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return [
        (name, name in required, {**shared, **each} if isinstance(each, dict) else shared)
        for name, each in properties.items()
    ]
