"""JSON Schemas of requests and responses, for the OpenAPI document."""

from collections.abc import Mapping
from typing import Any, Final

Schema = dict[str, Any]

INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
STRING: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}


def an_object(*, optional: Mapping[str, Schema] | None = None, **required: Schema) -> Schema:
    """Return the schema of an object with these properties; later versions may add more."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)}


def a_list(of: Schema, **limits: int) -> Schema:
    """Return the schema of a list. limits: minItems, maxItems."""
    return {"type": "array", **limits, "items": of}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}
