"""From the decoded body to a model of the request.

Owns what happens to a field that the model does not have. One that some API defines is refused
by name, unless its value has no effect. One that no API defines is ignored, and named in a
header of the answer.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError, ValidationInfo

from proto.errors import InvalidRequestError, shown

# Fields that no API defines: ignored, and named in a header of the answer.


MAX_NAMES: Final = 16
MAX_NAME_CHARACTERS: Final = 64
HEADER: Final = b"x-tokend-ignored"
_ODD: Final = re.compile(r"[^A-Za-z0-9_.-]")


def not_shown(kind: str) -> str:
    """What the model reads where a tool gave something that it cannot."""
    return f"[{kind}: not shown, only text can be read here]"


class IgnoredFields:
    """Names in the order in which they came, each once, and how many are not kept."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._num_more = 0

    def add(self, name: str) -> None:
        """One more. Odd characters become question marks, a long name is cut."""
        name = name if len(name) <= MAX_NAME_CHARACTERS else name[: MAX_NAME_CHARACTERS - 3] + "..."
        name = _ODD.sub("?", name)
        if name in self._names:
            return
        if len(self._names) < MAX_NAMES:
            self._names[name] = None
        else:
            self._num_more += 1

    def __str__(self) -> str:
        """The names with commas between them; empty for none."""
        more = [f"{self._num_more} more"] if self._num_more else []
        return ", ".join([*self._names, *more])

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the header that names them, if there are any."""
        return [(HEADER, str(self).encode())] if self._names else []


# Names of fields that the APIs which clients know define, beyond what is taken here.


Neutral = dict[str, tuple[Any, ...]]
"""Field → values, beside null, that have no effect."""

HARMLESS: Final = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Labels and hints: they cannot change an answer."""

OPENAI: Final = frozenset(
    {
        "audio",
        "background",
        "best_of",
        "conversation",
        "function_call",
        "functions",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "modalities",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "previous_response_id",
        "prompt_cache_retention",
        "reasoning",
        "reasoning_effort",
        "service_tier",
        "store",
        "suffix",
        "text",
        "tool_choice",
        "tools",
        "truncation",
        "verbosity",
        "web_search_options",
    }
)
"""Of completions, chat completions and responses."""

ANTHROPIC: Final = frozenset(
    {
        "anthropic_beta",
        "anthropic_version",
        "cache_control",
        "container",
        "context_management",
        "max_tokens_to_sample",
        "mcp_servers",
        "output_config",
        "output_format",
        "stop_sequences",
        "system",
        "thinking",
    }
)
"""Of messages."""

VLLM: Final = frozenset(
    {
        "data_parallel_rank",
        "documents",
        "ec_transfer_params",
        "flat_logprobs",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "include_reasoning",
        "kv_transfer_params",
        "logits_processors",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "output_kind",
        "prompt_embeds",
        "skip_reading_prefix_cache",
        "structural_tag",
        "thinking_token_budget",
        "vllm_xargs",
    }
)
"""Of completions and chat completions."""

ENDPOINTS: Final = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "echo",
        "max_completion_tokens",
        "messages",
        "prompt",
        "top_logprobs",
    }
)
"""Fields of one endpoint that mean nothing to the other."""

KNOWN: Final = OPENAI | ANTHROPIC | VLLM | ENDPOINTS

NEUTRAL: Final[Neutral] = {
    "best_of": (1,),
    "include_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "skip_reading_prefix_cache": (False,),
    "store": (False,),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
    "vllm_xargs": ({},),
}
"""Of fields of both endpoints."""

COMPLETION_NEUTRAL: Final[Neutral] = {**NEUTRAL, "parallel_tool_calls": (True,)}

CHAT_NEUTRAL: Final[Neutral] = {
    **NEUTRAL,
    "add_special_tokens": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
}

RESPONSES_NEUTRAL: Final[Neutral] = {
    "context_management": ([],),
    "service_tier": ("auto", "default"),
}

RESPONSES_HINTS: Final = frozenset(
    {"max_tool_calls", "prompt_cache_options", "prompt_cache_retention"}
)
"""Of /v1/responses: about a cache that is not ours, and tools that are not called here."""

REASONING_NEUTRAL: Final[Neutral] = {"context": ("auto",), "mode": ("standard",)}

STREAM_OPTIONS_NEUTRAL: Final[Neutral] = {"include_obfuscation": (False,)}

MESSAGES_NEUTRAL: Final[Neutral] = {
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
"""Of Anthropic's messages."""

MESSAGES_HINTS: Final = frozenset(
    {
        *("anthropic_beta", "anthropic_version", "betas", "context_management", "diagnostics"),
        *("fallbacks", "inference_geo", "user_profile_id"),
    }
)
"""Of Anthropic's messages: what changes no answer, or only how long a conversation may become."""

MESSAGE_NEUTRAL: Final[Neutral] = {
    "annotations": ([],),
    "audio": (),
    "cache_control": (),
    "function_call": (),
    "refusal": (),
}

PART_NEUTRAL: Final[Neutral] = {"cache_control": (), "prompt_cache_breakpoint": ()}

STRUCTURED_NEUTRAL: Final[Neutral] = {
    "disable_additional_properties": (False,),
    "disable_fallback": (False, True),
    "structural_tag": (),
    "whitespace_pattern": (),
}


# What is wrong with a field, in words that name it.


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


def request_error_of(error: ValidationError) -> InvalidRequestError:
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


Model = TypeVar("Model", bound=BaseModel)


def parse(
    model: type[Model], body: Any, neutral: Mapping[str, tuple[Any, ...]], ignored: IgnoredFields
) -> Model:
    """`body` as a `model`; raises InvalidRequestError naming the first field that is wrong.

    A field that is null counts as not given. neutral: values of known fields that have
    no effect. ignored: collects fields that no API defines.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    fields = given_fields(body, model.model_fields, neutral, ignored)
    try:
        return model.model_validate(fields, context=ignored)
    except ValidationError as error:
        raise request_error_of(error) from None


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
    """Return the collector of ignored fields of a nested validator."""
    return info.context if isinstance(info.context, IgnoredFields) else IgnoredFields()


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value has no effect; True and 1 are different values."""
    if value is None:
        return True
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )
