"""JSON that conforms to a schema, as a Lark rule within a larger grammar."""

import json
from collections.abc import Mapping
from typing import Any, Final

from api_server.protocol.json_schema import SchemaWork
from proto.errors import InvalidRequestError

_ESCAPES: Final = r'"\bfnrt'
_OPTIONS: Final = {"whitespace_pattern": r"[ ]|\n[ ]{0,24}", "json_allowed_escapes": _ESCAPES}
"""The white space and escapes that structured output admits."""
_COMPACT_OPTIONS: Final = {"whitespace_flexible": False, "json_allowed_escapes": _ESCAPES}


def json_rule(
    name: str, schema: Mapping[str, Any] | bool, work: SchemaWork, *, compact: bool = False
) -> str:
    """Return the Lark rule of this name for JSON that conforms to a rewritten schema.

    work: of the request's schemas. compact: JSON without white space.
    Raises InvalidRequestError for a schema that no text satisfies, and for one that takes too much
    work.
    """
    if schema is False:
        raise InvalidRequestError("no text satisfies the schema false")
    given = {} if schema is True else schema
    options = _COMPACT_OPTIONS if compact else _OPTIONS
    rule = f"{name}: %json {json.dumps({**given, 'x-guidance': options})}"
    work.take_bytes(rule)
    return rule
