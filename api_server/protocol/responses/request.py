"""The request of POST /v1/responses, and the same in the words of a chat completion.

Owns the fields of that API. What it has in common with chat (see `PASSED`) is checked there;
items and tools have modules of their own. Names in errors are those that the client used.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.common import SAMPLING_NUMBERS, Strict, Text
from api_server.protocol.fields import (
    CHAT_NEUTRAL,
    REASONING_NEUTRAL,
    RESPONSES_HINTS,
    RESPONSES_NEUTRAL,
    STREAM_OPTIONS_NEUTRAL,
    IgnoredFields,
    given_fields,
    nested_fields,
    parse,
)
from api_server.protocol.responses.items import MAX_ITEMS, Item, messages_of
from api_server.protocol.responses.tools import OfferedTools
from proto.errors import InvalidRequestError
from proto.sampling_params import MAX_LOGPROBS

LOGPROBS: Final = "message.output_text.logprobs"
"""The one thing that `include` can add to an answer."""
MAX_INCLUDED: Final = 64
MAX_PAIRS: Final = 16
MAX_KEY_CHARACTERS: Final = 64
MAX_VALUE_CHARACTERS: Final = 512

PASSED: Final = frozenset(
    {
        *("agent_hint", "session_id", "request_id", "cache_salt", "priority", "seed", "stop"),
        *("timeout_ms", "queue_timeout_ms", "stream_interval", "structured_outputs"),
        *("include_stop_str_in_output", "stop_token_ids", "top_k", "min_tokens"),
        *(SAMPLING_NUMBERS.keys() - {"temperature", "top_p"}),
        "logit_bias",
        *("bad_words", "allowed_token_ids", "ignore_eos", "skip_special_tokens"),
        *("spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side"),
        *("chat_template_kwargs", "thinking_token_budget", "include_reasoning"),
    }
)
"""Fields beyond OpenAI's that mean here what they mean in a chat completion."""

_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "include",
}
"""What a field of a chat completion was called by the client."""
_MENTIONED: Final = re.compile(
    r"\bmessages(?=\.)|^messages\b|\bmax_(?:completion_)?tokens\b|\bresponse_format\b"
    r"|\breasoning_effort\b"
)
_EFFORT_NAMES: Final = frozenset({"reasoning_effort", "enable_thinking", "thinking"})
"""Template variables for how much to reason, or whether. Agents ask every model
for an effort; one whose template has none of these answers as it does."""
_FUNCTION: Final = re.compile(r"\btools\[(\d{1,4})\](?:\.function)?")
"""The place of a function in a chat completion."""


class TextOptions(Strict):
    """verbosity has no effect: how much a model says is its own."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Strict):
    """generate_summary: the older name of summary."""

    effort: Text | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Strict):
    """Has no fields with an effect."""


def _text(value: Any, info: ValidationInfo) -> Any:
    return nested_fields(value, TextOptions, {}, info, "text.")


def _reasoning(value: Any, info: ValidationInfo) -> Any:
    return nested_fields(value, ReasoningOptions, REASONING_NEUTRAL, info, "reasoning.")


def _stream_options(value: Any, info: ValidationInfo) -> Any:
    return nested_fields(
        value, ResponseStreamOptions, STREAM_OPTIONS_NEUTRAL, info, "stream_options."
    )


def _not_too_many(value: Any) -> Any:
    """Before any of them is looked at."""
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise ValueError(f"at most {MAX_ITEMS} items, got {len(value)}")
    return value


Label = Annotated[Text, Field(max_length=MAX_VALUE_CHARACTERS)]


class ResponsesRequest(Strict):
    input: Annotated[
        Annotated[Text, Field(min_length=1)] | Annotated[list[dict[str, Any]], Field(min_length=1)],
        BeforeValidator(_not_too_many),
    ]
    """A text, or up to 4096 items: messages, function_call, function_call_output,
    custom_tool_call, custom_tool_call_output and reasoning."""
    model: Text | None = None
    """Name of a served model; by default the one there is."""
    instructions: Text | None = None
    """What stands before the conversation, as a system message."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Most output tokens, reasoning included; by default all that the context leaves."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this probability."""
    tools: list[dict[str, Any]] = []
    """Functions, custom tools and namespaces of them. Tools that OpenAI runs itself are left out,
    and named in X-Tokend-Ignored."""
    tool_choice: Text | dict[str, Any] = "auto"
    """auto, none, required, a function or custom tool by name, or allowed_tools."""
    parallel_tool_calls: bool = True
    """Whether an answer may call more than one tool."""
    text: Annotated[TextOptions | None, BeforeValidator(_text)] = None
    """format: text, json_object, or json_schema with a schema that the answer keeps to."""
    reasoning: Annotated[ReasoningOptions | None, BeforeValidator(_reasoning)] = None
    """effort; summary: send the whole reasoning as a summary too."""
    include: Annotated[list[Text], Field(max_length=MAX_INCLUDED)] = []
    """message.output_text.logprobs; anything else is ignored, and said to be."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Alternatives for each token (0 to 20); only with these logprobs."""
    stream: bool = False
    """Answer with server-sent events."""
    stream_options: Annotated[ResponseStreamOptions | None, BeforeValidator(_stream_options)] = None
    """Of its fields only include_obfuscation (false) is taken, which is how it is."""
    store: bool = False
    """Keep the response for a while, for GET and for previous_response_id."""
    background: bool = False
    """Answer at once and go on without the client; needs store, does not go with stream."""
    previous_response_id: Annotated[Text, Field(max_length=256)] | None = None
    """A stored response whose conversation this one goes on with; its instructions are not kept."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """auto: a conversation that is too long loses its beginning."""
    metadata: Annotated[dict[str, Label], Field(max_length=MAX_PAIRS)] = {}
    """Up to 16 pairs that come back with the response."""

    @property
    def wants_summary(self) -> bool:
        """The reasoning is sent as a summary too."""
        reasoning = self.reasoning
        wish = reasoning and (reasoning.summary or reasoning.generate_summary)
        return wish not in (None, "none")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include


_ONLY_CHATS: Final = (
    ChatCompletionRequest.model_fields.keys() - ResponsesRequest.model_fields.keys() - PASSED
)
"""What says something in a chat completion has other words here, or no place."""


def parse_request(body: Any, ignored: IgnoredFields) -> tuple[ResponsesRequest, dict[str, Any]]:
    """The request, and those of its fields that are passed on to chat as they are.

    ignored: collects what has no effect. Raises InvalidRequestError.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    passed = {name: value for name, value in body.items() if name in PASSED}
    rest = {}
    for name, value in body.items():
        if name in RESPONSES_HINTS and value is not None:
            ignored.add(name)
        elif name in _ONLY_CHATS:
            if value is not None and value != ChatCompletionRequest.model_fields[name].default:
                raise InvalidRequestError(f"{name} is not available here", name)
        elif name not in PASSED:
            rest[name] = value
    request = parse(ResponsesRequest, rest, RESPONSES_NEUTRAL, ignored)
    for each in request.include:
        if each != LOGPROBS:
            ignored.add(f"include.{each}")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        ignored.add("text.verbosity")
    _check(request)
    return request, passed


def _check(request: ResponsesRequest) -> None:
    """Raise InvalidRequestError for fields that do not go together."""
    if request.top_logprobs and not request.wants_logprobs:
        raise InvalidRequestError(f"top_logprobs needs {LOGPROBS} in include", "top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream", "stream_options")
    if request.background and not request.store:
        raise InvalidRequestError("background needs store", "background")
    if request.background and request.stream:
        raise InvalidRequestError("background does not go with stream here", "background")
    for key in request.metadata:
        if len(key) > MAX_KEY_CHARACTERS:
            raise InvalidRequestError(
                f"metadata: a key is longer than {MAX_KEY_CHARACTERS}", "metadata"
            )


def chat_request(
    request: ResponsesRequest,
    passed: Mapping[str, Any],
    items: Sequence[Item],
    tools: OfferedTools,
    template_names: Collection[str],
    ignored: IgnoredFields,
    *,
    is_folded: bool = False,
) -> ChatCompletionRequest:
    """Return the arguments of the same request as a chat.

    items: the conversation, from its first item to its last. template_names: variables that the
    chat template reads. is_folded: see folding.py. Raises InvalidRequestError that names what the
    client wrote.
    """
    messages = messages_of(items, request.instructions, tools, ignored)
    fields: dict[str, Any] = {
        **passed,
        "model": request.model,
        "stream": request.stream,
        "messages": folded(messages) if is_folded else messages,
        "max_completion_tokens": request.max_output_tokens,
        "response_format": _response_format(request, ignored),
        **tools.chat_fields(request.parallel_tool_calls),
    }
    for name in ("temperature", "top_p"):
        if name in request.model_fields_set:
            fields[name] = getattr(request, name)
    effort = None if request.reasoning is None else request.reasoning.effort
    if effort in (None, "none") or not _EFFORT_NAMES.isdisjoint(template_names):
        fields["reasoning_effort"] = effort
    else:
        ignored.add("reasoning.effort")
    if request.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.truncation == "auto":
        fields.setdefault("truncate_prompt_tokens", -1)
    try:
        return parse(ChatCompletionRequest, fields, CHAT_NEUTRAL, ignored)
    except InvalidRequestError as error:
        raise in_client_names(error, tools) from None


def in_client_names(error: InvalidRequestError, tools: OfferedTools) -> InvalidRequestError:
    """The same error with the names and places that the fields have in this API."""
    places = tools.places

    def place(found: re.Match[str]) -> str:
        number = int(found.group(1))
        return places[number] if number < len(places) else "tools"

    message = _MENTIONED.sub(lambda found: _NAMES[found.group()], error.message)
    name = error.param
    if name is not None:
        first, dot, rest = name.partition(".")
        name = _FUNCTION.sub(place, _NAMES.get(first, first) + dot + rest)
    return InvalidRequestError(_FUNCTION.sub(place, message), name)


def _response_format(request: ResponsesRequest, ignored: IgnoredFields) -> dict[str, Any] | None:
    """As chat has it: the schema in an object of its own."""
    wanted = None if request.text is None else request.text.format
    if wanted is None:
        return None
    kind = wanted.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequestError(
            "text.format.type must be 'text', 'json_object' or 'json_schema'", "text.format.type"
        )
    taken = ("name", "schema", "description", "strict") if kind == "json_schema" else ()
    rest = {name: value for name, value in wanted.items() if name != "type"}
    given = given_fields(rest, taken, {}, ignored, "text.format.")
    if kind != "json_schema":
        return {"type": kind}
    for name in ("name", "schema"):
        if name not in given:
            raise InvalidRequestError(f"text.format.{name} is missing", "text")
    return {"type": kind, "json_schema": given}


# Messages of a chat for templates that take few orders of roles.
#
#     system       "be brief"                        system       "be brief"
#     user         "on a Linux machine"            ┐ user         "on a Linux machine
#     user         "weather?"                      ┘               weather?"
#     assistant    weather(…)                        assistant    weather(…)
#     tool         "21 °C"                         ┐ tool         "21 °C
#     user         "And tomorrow?"                 ┘               And tomorrow?"


Json = dict[str, Any]


def folded(messages: Sequence[Json]) -> list[Json]:
    """The same conversation; contents of all but the assistant's are texts."""
    found: list[Json] = []
    for message in messages:
        role = message["role"]
        if found and role in ("system", "user"):
            before = found[-1]
            if before["role"] in ("user", "tool"):
                texts = (before["content"], message["content"])
                found[-1] = before | {"content": "\n".join(each for each in texts if each)}
                continue
            role = "user"
        found.append({**message, "role": role})
    return found
