"""What is wrong with a field, in words that name it.

Owns the wording; which rule was broken is pydantic's to say.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from proto.errors import InvalidRequestError, shown

_RULES: Final = {
    "missing": "is missing",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "string_unicode": "must be valid text",
    "string_too_short": "must not be empty",
    "string_too_long": "is longer than {max_length}",
    "string_pattern_mismatch": "must match {pattern}",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "too_long": "is longer than {max_length}",
    "too_short": "must not be empty",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "extra_forbidden": "is not known here",
    "value_error": "{error}",
}
"""By the type of pydantic's error; in braces what its context has."""


def in_plain_words(error: ValidationError) -> InvalidRequestError:
    """The first field that is wrong; of a field that takes different things, all of them."""
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]["loc"]
    place = [part for number, part in enumerate(first) if not (number and _is_branch(part))]
    same = [each for each in errors if each["loc"][: len(place)] == tuple(place)]
    name = str(first[0]) if first else None
    rules = dict.fromkeys(_rule(each["type"], each["msg"], each.get("ctx", {})) for each in same)
    where = shown(".".join(map(str, place)))
    return InvalidRequestError(f"{where} {' or '.join(rules)}".strip(), name)


def _is_branch(part: int | str) -> bool:
    """Whether it names one of several types that a field takes, not a place within it."""
    return part in ("bool", "int", "float", "str", "constrained-str") or "[" in str(part)


def _rule(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """What pydantic has no words for here, in its own."""
    return _RULES[kind].format(**context) if kind in _RULES else message
