"""Which fields a request may have, beyond those that its model defines.

Owns two lists: fields that are read and ignored because they cannot change an
answer, and fields of features that come later, which may only hold the value that
asks for nothing. Every other field is refused by name.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from proto.errors import InvalidRequestError, shown

Model = TypeVar("Model", bound=BaseModel)

IGNORED: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)

LATER: Final[dict[str, tuple[Any, ...]]] = {
    "agent_hint": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "detokenize": (True,),
    "ec_transfer_params": (),
    "frequency_penalty": (0,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "logit_bias": ({},),
    "logprob_token_ids": (),
    "presence_penalty": (0,),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_id": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "vllm_xargs": ({},),
}
"""Field → values, beside null, that ask for nothing. For both endpoints."""


def parse(model: type[Model], body: Any, later: Mapping[str, tuple[Any, ...]]) -> Model:
    """`body` as a `model`; raises InvalidRequestError naming the first field that is wrong.

    A field that is null counts as not given.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    fields = given_fields(body, model.model_fields, later)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _from_validation(error) from None


def given_fields(
    body: Mapping[str, Any],
    known: Collection[str],
    later: Mapping[str, tuple[Any, ...]],
    where: str = "",
) -> dict[str, Any]:
    """The known fields that are not null. `where`: prefix for names in errors."""
    fields = {}
    for name, value in body.items():
        if name in known:
            if value is not None:
                fields[name] = value
        elif name in later:
            if not is_neutral(value, later[name]):
                raise InvalidRequestError(f"{where}{name} is not available yet", f"{where}{name}")
        elif name not in IGNORED:
            written = shown(name.encode("ascii", "backslashreplace").decode())
            raise InvalidRequestError(f"unknown field {where}{written}", f"{where}{written}")
    return fields


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing; True and 1 are different things."""
    if value is None:
        return True
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )


def _from_validation(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = shown(".".join(str(part) for part in first["loc"]))
    name = str(first["loc"][0]) if first["loc"] else None
    text = first["msg"].removeprefix("Value error, ")
    return InvalidRequestError(f"{place}: {text}", name)
