"""From the decoded body to a model of the request.

Owns what happens to a field that the model does not have. One that some API defines (see
known_fields.py) is refused by name, unless its value asks for nothing. One that none
defines is ignored, and said to be.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError, ValidationInfo

from api_server.protocol.ignored import IgnoredFields
from api_server.protocol.known_fields import HARMLESS, KNOWN, Neutral
from api_server.protocol.wording import in_plain_words
from proto.errors import InvalidRequestError

Model = TypeVar("Model", bound=BaseModel)


def parse(
    model: type[Model], body: Any, neutral: Mapping[str, tuple[Any, ...]], ignored: IgnoredFields
) -> Model:
    """`body` as a `model`; raises InvalidRequestError naming the first field that is wrong.

    A field that is null counts as not given. neutral: values of known fields that ask for
    nothing. ignored: is told of fields that nobody defines.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    fields = given_fields(body, model.model_fields, neutral, ignored)
    try:
        return model.model_validate(fields, context=ignored)
    except ValidationError as error:
        raise in_plain_words(error) from None


def given_fields(
    body: Mapping[str, Any],
    taken: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    ignored: IgnoredFields,
    where: str = "",
) -> dict[str, Any]:
    """The fields that are taken and not null. `where`: prefix for names."""
    fields = {}
    for name, value in body.items():
        if name in taken:
            if value is not None:
                fields[name] = value
        elif name in KNOWN or name in neutral:
            if not is_neutral(value, neutral.get(name, ())):
                raise InvalidRequestError(f"{where}{name} is not available here", f"{where}{name}")
        elif name not in HARMLESS:
            ignored.add(where + name)
    return fields


def nested_fields(
    value: Any, model: type[BaseModel], neutral: Neutral, info: ValidationInfo, where: str
) -> Any:
    """The fields that an object in a request may have, by the names that clients know.

    For a validator before that of `model`, so raises ValueError. where: prefix for other names.
    """
    if not isinstance(value, dict):
        return value
    names = [field.alias or name for name, field in model.model_fields.items()]
    try:
        return given_fields(value, names, neutral, ignored_of(info), where)
    except InvalidRequestError as error:
        raise ValueError(error.message) from None


def ignored_of(info: ValidationInfo) -> IgnoredFields:
    """Where a validator of a nested field tells of what is ignored."""
    return info.context if isinstance(info.context, IgnoredFields) else IgnoredFields()


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing; True and 1 are different things."""
    if value is None:
        return True
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )
