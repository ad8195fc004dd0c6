"""Flags whose value is a JSON object."""

from typing import Any, TypeVar

import msgspec

from proto.errors import ConfigError, shown

FieldsT = TypeVar("FieldsT", bound=msgspec.Struct)


def flag_error(field: str, what: str) -> ConfigError:
    """Return an error that begins with the flag. field: its name in the settings."""
    return ConfigError(f"--{field.replace('_', '-')}{what}", field)


def parse_json_flag(field: str, text: str, example: str = "") -> dict[str, Any]:
    """Return the object of a flag; raises ConfigError naming the flag, with the example."""
    such = f", such as {example}" if example else ""
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise flag_error(field, f" takes JSON{such}: {shown(error)}") from None
    return check_object(field, document, such)


def check_object(field: str, document: Any, such: str = "") -> dict[str, Any]:
    if not isinstance(document, dict):
        raise flag_error(field, f" takes a JSON object{such}, got {shown(document)}")
    return document


def convert_object(field: str, document: dict[str, Any], kind: type[FieldsT]) -> FieldsT:
    """Convert the object of a flag; raises ConfigError naming the flag, and the key at fault."""
    known = kind.__struct_fields__
    if unknown := sorted(document.keys() - set(known)):
        names = ", ".join(map(shown, unknown))
        raise flag_error(field, f" has no {names}; it has {', '.join(known)}")
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise flag_error(field, f": {shown(error)}") from None
