"""What the text of an answer has to be: a grammar, as a client gave it.

Owns the limits that front end and engine both check. Knows nothing of how a grammar is
compiled: only the engine does that.
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
MAX_TRIGGER_BYTES: Final = 256


class GrammarSource(msgspec.Struct, array_like=True, frozen=True):
    """A grammar in words.

    kind, source: a JSON schema as JSON; a regular expression that the whole text matches; a
        JSON list of strings, one of which is the text; or a context-free grammar (Lark, or GBNF);
        `free` stands for none at all.
    compact: JSON without any space between its parts.
    trigger: the grammar begins behind the first place where this stands in the text, and what
        comes before is free; empty: it holds from the start.
    trigger_token_id: the same for a token, which may have no text.
    field: of the request that it came with, for errors.
    """

    kind: GrammarKind
    source: str
    compact: bool = False
    trigger: str = ""
    trigger_token_id: int | None = None
    field: str = "structured_outputs"

    @property
    def num_bytes(self) -> int:
        """Of the source; raises InvalidRequestError where it is no text."""
        try:
            return len(self.source.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError("the grammar holds half of a surrogate pair") from None

    def validate(self) -> None:
        """Raise InvalidRequestError for what need not be compiled to be known as wrong."""
        if not self.source.strip():
            raise InvalidRequestError("the grammar is empty")
        if self.num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"the grammar has {self.num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are taken"
            )
        if len(self.trigger) > MAX_TRIGGER_BYTES:
            raise InvalidRequestError(f"a trigger has at most {MAX_TRIGGER_BYTES} characters")
        if self.kind == "json_schema":
            check_schema(decoded(self.source))
        elif self.kind == "choice":
            _check_choices(decoded(self.source))


FREE_TEXT: Final = GrammarSource("free", "anything")
"""Of an answer whose thoughts alone have a rule."""


def decoded(source: str) -> Any:
    """A JSON text as Python has it; raises InvalidRequestError where it is none."""
    try:
        return json.loads(source)
    except RecursionError:
        raise InvalidRequestError("the grammar is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"the grammar is not valid JSON: {shown(error)}") from None


def encoded(value: Any) -> str:
    """A JSON text of what came with a request; raises InvalidRequestError for what has none."""
    check_depth(value)
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise InvalidRequestError("the grammar holds a number that JSON has no word for") from None


def check_schema(schema: Any) -> None:
    """Raise InvalidRequestError for a schema that is too deep, or none at all."""
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError("a JSON schema is an object")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise InvalidRequestError("the keyword x-guidance is not supported")
    check_depth(schema)


def check_depth(value: Any) -> None:
    """Raise InvalidRequestError for JSON of more than MAX_GRAMMAR_DEPTH levels, or far too much.

    Each part of it takes a byte at least, so this looks at no more of them than may be.
    """
    level, depth, num_parts = [value], 0, 1
    while level:
        depth += 1
        if depth > MAX_GRAMMAR_DEPTH:
            raise InvalidRequestError(
                f"the schema is nested more than {MAX_GRAMMAR_DEPTH} levels deep"
            )
        num_parts += sum(len(each) for each in level if isinstance(each, dict | list))
        if num_parts > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes")
        level = [
            part
            for each in level
            if isinstance(each, dict | list)
            for part in (each.values() if isinstance(each, dict) else each)
        ]


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, list) or not choices:
        raise InvalidRequestError("choice takes a list of strings, at least one")
    if not all(isinstance(each, str) and each for each in choices):
        raise InvalidRequestError("choice takes strings that are not empty")
