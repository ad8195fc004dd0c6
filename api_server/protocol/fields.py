"""From the decoded body of a request to its pydantic model. Start reading at `parse`.

A field that the model lacks but some API defines is refused by name, unless its value has no
effect. A field that no API defines is ignored and named in a header of the response.
"""

import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from proto.errors import InvalidRequestError, shown

MAX_NAMES: Final = 16
MAX_NAME_CHARACTERS: Final = 64
IGNORED_HEADER: Final = b"x-tokend-ignored"
_UNSAFE_CHARACTER: Final = re.compile(r"[^A-Za-z0-9_.\[\]-]")


def media_placeholder(kind: str) -> str:
    """Return the text that the model reads instead of an image or document in a tool's result."""
    return f"[{kind}: not shown, only text can be read here]"


_MEDIA: Final = re.compile("(input_)?(image|audio|video|document|file)(_url)?")


def is_media(kind: str) -> bool:
    """Return whether parts of this type hold an image, a sound or a file."""
    return _MEDIA.fullmatch(kind) is not None


_MEDIA_WORDS: Final = ("image", "audio", "video", "document", "file")


def no_text(kind: object, *, takes_images: bool = False) -> str:
    """Return the reason why a part of this type is refused in a message: a sound, or no type."""
    takes = "takes text and images only" if takes_images else "takes text only"
    if not isinstance(kind, str):
        return f"{takes}: each part needs a type"
    if any(word in kind for word in _MEDIA_WORDS):
        return f"{takes}: this model reads no part of the type {shown(kind)}"
    return f"{takes}: {shown(kind)} is no type of a text"


class IgnoredFields:
    """Names of ignored fields in their order, without repetition, for a response header.

    Names beyond MAX_NAMES are only counted. It accompanies a body through its validation, so it has
    what else that needs: takes_images: the model reads images; num_inner_values: of JSON in strings
    of the body.
    """

    def __init__(self, *, takes_images: bool = False) -> None:
        self.takes_images = takes_images
        self.num_inner_values = 0
        self._names: dict[str, None] = {}
        self._more = set[str]()

    def add(self, name: str) -> None:
        """Add a name; unsafe characters become question marks, a long name is cut."""
        name = name if len(name) <= MAX_NAME_CHARACTERS else name[: MAX_NAME_CHARACTERS - 3] + "..."
        name = _UNSAFE_CHARACTER.sub("?", name)
        if name in self._names:
            return
        if len(self._names) < MAX_NAMES:
            self._names[name] = None
        else:
            self._more.add(name)

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Replace each name by its new name."""
        self._names = dict.fromkeys(map(new_name, self._names))

    def names(self) -> list[str]:
        """Return the names, and the number of those beyond MAX_NAMES."""
        return [*self._names, *([f"{len(self._more)} more"] if self._more else [])]

    def __str__(self) -> str:
        """Return the names, separated by commas; "" for none."""
        return ", ".join(self.names())

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the header with the names; no header without names."""
        return [(IGNORED_HEADER, str(self).encode())] if self._names else []


# Fields that OpenAI, Anthropic and vLLM define: foreign_fields.toml.


Neutral = dict[str, tuple[Any, ...]]
"""Field → values beside null that have no effect."""

_TABLES: Final = tomllib.loads(
    Path(__file__).with_name("foreign_fields.toml").read_text(encoding="utf-8")
)
HARMLESS: Final = frozenset(_TABLES["harmless"])
OPENAI: Final = frozenset(_TABLES["openai"])
ANTHROPIC: Final = frozenset(_TABLES["anthropic"])
VLLM: Final = frozenset(_TABLES["vllm"])
ENDPOINTS: Final = frozenset(_TABLES["endpoints"])
KNOWN: Final = OPENAI | ANTHROPIC | VLLM | ENDPOINTS
RESPONSES_HINTS: Final = frozenset(_TABLES["responses_hints"])
MESSAGES_HINTS: Final = frozenset(_TABLES["messages_hints"])


def _neutral(*names: str) -> Neutral:
    """Return the fields of several tables."""
    tables = [_TABLES["neutral"][name] for name in names]
    return {field: tuple(values) for table in tables for field, values in table.items()}


SGLANG_NEUTRAL: Final = _neutral("sglang")
COMPLETION_NEUTRAL: Final = _neutral("sglang", "both", "completions")
CHAT_NEUTRAL: Final = _neutral("sglang", "both", "chats")
LLAMA_CPP_NEUTRAL: Final = _neutral("llama_cpp")
RESPONSES_NEUTRAL: Final = _neutral("responses")
REASONING_NEUTRAL: Final = _neutral("reasoning")
STREAM_OPTIONS_NEUTRAL: Final = _neutral("stream_options")
MESSAGES_NEUTRAL: Final = _neutral("messages")
MESSAGE_NEUTRAL: Final = _neutral("message")
PART_NEUTRAL: Final = _neutral("part")
STRUCTURED_NEUTRAL: Final = _neutral("structured")


# Error messages that name the invalid field.


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
    "string_too_long": "is longer than {max_length} characters",
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
"""Type of pydantic's error → message. Braces hold values of the error's context."""


def invalid_request_error(error: ValidationError) -> InvalidRequestError:
    """Return an error about the first invalid field.

    The message lists all alternatives of a field that accepts several types.
    """
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]["loc"]
    path = [part for index, part in enumerate(first) if not (index and _is_type_name(part))]
    same = [detail for detail in errors if detail["loc"][: len(path)] == tuple(path)]
    name = str(first[0]) if first else None
    rules = list(
        dict.fromkeys(
            _rule(detail["type"], detail["msg"], detail.get("ctx", {})) for detail in same
        )
    )
    if all(rule.startswith(_MUST_BE) for rule in rules):
        rules[1:] = [rule.removeprefix(_MUST_BE) for rule in rules[1:]]
    where, rule = shown(path_text(path)), " or ".join(rules)
    # a rule about a part of what the path names begins with a dot or a bracket
    return InvalidRequestError(f"{where}{rule if rule[0] in '.[' else ' ' + rule}".strip(), name)


_MUST_BE: Final = "must be "


def path_text(path: Sequence[str | int]) -> str:
    """Return a path as text, such as messages[0].content."""
    parts = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in path]
    return "".join(parts).removeprefix(".")


def _is_type_name(part: int | str) -> bool:
    """Return whether a path component is one of several types of a field, not a subfield."""
    return part in ("bool", "int", "float", "str", "constrained-str") or "[" in str(part)


def _rule(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """Return the message for an error type; pydantic's own message if _RULES has none."""
    whole = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in context.items()
    }
    return _RULES[kind].format(**whole) if kind in _RULES else message


Model = TypeVar("Model", bound=BaseModel)


def parse(
    model: type[Model], body: Any, neutral: Mapping[str, tuple[Any, ...]], ignored: IgnoredFields
) -> Model:
    """Return the body as a model; raise InvalidRequestError that names the first invalid field.

    A field that is null counts as absent. neutral: values without effect of fields that the model
    lacks. ignored: collects fields that no API defines.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    fields = given_fields(body, model.model_fields, neutral, ignored)
    try:
        return model.model_validate(fields, context=ignored)
    except ValidationError as error:
        raise invalid_request_error(error) from None


def given_fields(
    body: Mapping[str, Any],
    known: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    ignored: IgnoredFields,
    where: str = "",
) -> dict[str, Any]:
    """Return the fields that are in `known` and not null.

    Raises InvalidRequestError for a field of some API that is not in `known` and whose value is not
    neutral. where: prefix of field names in errors and in `ignored`.
    """
    fields = {}
    for name, value in body.items():
        if name in known:
            if value is not None:
                fields[name] = value
        elif name in KNOWN or name in neutral:
            if not is_neutral(value, neutral.get(name, ())):
                successors = _TABLES["successors"]
                instead = f": use {successors[name]}" if name in successors else ""
                raise InvalidRequestError(
                    f"{where}{name} is not available here{instead}", f"{where}{name}"
                )
        elif name not in HARMLESS:
            ignored.add(where + name)
    return fields


class Strict(BaseModel):
    """Base of request models: no type conversion, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class NestedFields(Strict):
    """Base of the objects inside a request, with the fields that `given_fields` takes of them.

    where: prefix of their names. neutral: values without effect of fields that the model lacks.
    """

    where: ClassVar[str]
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        return cls.known_fields(value, info)

    @classmethod
    def known_fields(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the fields that are known and not null; what is no object is left to pydantic."""
        if not isinstance(value, dict):
            return value
        names = [field.alias or name for name, field in cls.model_fields.items()]
        try:
            return given_fields(value, names, cls.neutral, ignored_of(info), cls.where)
        except InvalidRequestError as error:
            raise ValueError(f".{error.message.removeprefix(cls.where)}") from None


@contextmanager
def errors_of(field: str) -> Iterator[None]:
    """Name a field in any InvalidRequestError of the block."""
    try:
        yield
    except InvalidRequestError as error:
        raise error.in_field(field) from None


def ignored_of(info: ValidationInfo) -> IgnoredFields:
    return info.context if isinstance(info.context, IgnoredFields) else IgnoredFields()


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether a value has no effect. True and 1 are different values."""
    if value is None:
        return True
    return any(
        value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral
    )


def is_encodable(text: str) -> bool:
    """Return whether UTF-8 can encode a text: JSON can express half of a surrogate pair.

    A piece at a time, because others wait and memory is taken meanwhile.
    """
    if text.isascii():
        return True
    try:
        for start in range(0, len(text), _ENCODED_CHARACTERS):
            text[start : start + _ENCODED_CHARACTERS].encode()
    except UnicodeEncodeError:
        return False
    return True


_ENCODED_CHARACTERS: Final = 1 << 20


def most_members(number: int) -> BeforeValidator:
    """Return a validator that refuses an object with more members before it reads them."""
    return _most(dict, number, f"takes at most {number} names")


def most_elements(number: int, plural: str) -> BeforeValidator:
    """Return a validator that refuses a longer list before it reads the elements."""
    return _most(list, number, f"at most {number} {plural}")


def _most(kind: type[Sized], number: int, rule: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if isinstance(value, kind) and len(value) > number:
            raise ValueError(f"{rule}, got {len(value)}")
        return value

    return BeforeValidator(check)


MAX_DEPTH: Final = 64
"""Most nested objects and lists in a body."""


def is_nested_deeper(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Return whether objects and lists of a JSON value are nested more than `max_depth` deep."""
    level: list[Any] = [[value]]
    for _ in range(max_depth + 1):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
