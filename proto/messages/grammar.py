"""Sources of grammars for structured output, and the limits that front end and engine both check.

Only the engine compiles grammars.
"""

import json
from typing import Any, Final, Literal

import msgspec

from proto.errors import InvalidRequestError, shown

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "free"]

MAX_GRAMMAR_BYTES: Final = 64 << 10
"""Of the source, as UTF-8."""
MAX_GRAMMAR_DEPTH: Final = 64
"""Levels of a JSON schema."""
MAX_TRIGGER_CHARACTERS: Final = 256


class GrammarSource(msgspec.Struct, array_like=True, frozen=True):
    """The source of a grammar.

    kind, source: a JSON schema as JSON; a regular expression for the whole text; a JSON list of
        strings to choose from; a context-free grammar (Lark or GBNF); `free` for no grammar.
    compact: JSON without white space.
    trigger: the grammar applies after the first occurrence of this text, and the text before is
        free; empty: it applies from the start.
    trigger_token_id: the same for a token, which may have no text.
    field: path of the request field, for errors.
    """

    kind: GrammarKind
    source: str
    compact: bool = False
    trigger: str = ""
    trigger_token_id: int | None = None
    field: str = "grammar"

    @property
    def num_bytes(self) -> int:
        """Size of the source as UTF-8; raises InvalidRequestError for unpaired surrogates."""
        try:
            return len(self.source.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError("the grammar contains an unpaired surrogate") from None

    def validate(self) -> None:
        """Raise InvalidRequestError for errors that can be found without compiling the grammar."""
        num_bytes = len(self.source)  # at least; a long one is not copied
        if num_bytes <= MAX_GRAMMAR_BYTES:
            num_bytes = self.num_bytes
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"the grammar has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed"
            )
        if not self.source.strip():
            raise InvalidRequestError("the grammar is empty")
        if len(self.trigger) > MAX_TRIGGER_CHARACTERS:
            raise InvalidRequestError(f"a trigger has at most {MAX_TRIGGER_CHARACTERS} characters")
        if self.kind == "json_schema":
            check_schema(decoded(self.source))
        elif self.kind == "choice":
            _check_choices(decoded(self.source))


FREE_TEXT: Final = GrammarSource("free", "anything", field="thinking_token_budget")
"""For a request with a reasoning budget and no grammar for the answer."""


def decoded(source: str) -> Any:
    """Parse JSON; raises InvalidRequestError if it is invalid."""
    try:
        return json.loads(source, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidRequestError("the grammar is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"the grammar is not valid JSON: {shown(error)}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def encoded(value: Any) -> str:
    """Serialise a value of a request as JSON; raises InvalidRequestError if that is impossible."""
    check_depth(value)
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise InvalidRequestError(
            "the grammar contains a number that JSON cannot represent"
        ) from None


def check_schema(schema: Any) -> None:
    """Raise InvalidRequestError for a schema of an invalid type or too many levels."""
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError("a JSON schema is an object")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise InvalidRequestError("the keyword x-guidance is not supported")
    check_depth(schema)


def check_depth(value: Any) -> None:
    """Raise InvalidRequestError for JSON that is too deep or too large."""
    if num_parts(value, MAX_GRAMMAR_BYTES) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes")


def num_parts(value: Any, limit: int) -> int:
    """Return the number of values in JSON, and one more for each 16 characters of a text.

    It is at most the size in bytes. Counting ends above the limit. Raises InvalidRequestError for
    JSON that is too deep.
    """
    level, depth, found = [value], 0, 0
    while level:
        depth += 1
        if depth > MAX_GRAMMAR_DEPTH:
            raise InvalidRequestError(
                f"the schema is nested more than {MAX_GRAMMAR_DEPTH} levels deep"
            )
        found += len(level)
        children: list[Any] = []
        for part in level:
            if isinstance(part, str):
                found += len(part) >> 4
            elif isinstance(part, dict | list):
                if found + len(children) + len(part) > limit:
                    return limit + 1
                if isinstance(part, list):
                    children += part
                else:
                    found += sum([len(name) >> 4 for name in part])
                    children += part.values()
        if found > limit:
            break
        level = children
    return found


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, list) or not choices:
        raise InvalidRequestError("choice takes a list of strings, at least one")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequestError("choice takes strings that are not empty")
