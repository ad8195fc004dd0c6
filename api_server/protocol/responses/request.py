"""The request of POST /v1/responses (OpenAI), and its translation into a chat completion.

The fields of `PASSED` mean the same as in a chat completion and are checked there. Errors use the
names of the client's API.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from api_server.protocol.chat import REASONING_SWITCHES, ChatCompletionRequest
from api_server.protocol.chat_translation import PASSED as PASSED_TO_CHAT
from api_server.protocol.chat_translation import ChatTranslation, chat_only_fields, split_fields
from api_server.protocol.common import Text
from api_server.protocol.fields import (
    REASONING_NEUTRAL,
    RESPONSES_HINTS,
    RESPONSES_NEUTRAL,
    STREAM_OPTIONS_NEUTRAL,
    IgnoredFields,
    NestedFields,
    Strict,
    given_fields,
    most_elements,
    most_members,
    parse,
)
from api_server.protocol.images import image_paths
from api_server.protocol.responses.input import (
    MAX_ITEMS,
    Item,
    ItemTranslator,
    with_id,
    with_merged_roles,
)
from api_server.protocol.responses.tools import ResponseTools
from api_server.protocol.tools import MAX_LISTED_TOOLS
from proto.errors import InvalidRequestError, require
from proto.messages.sampling_params import MAX_LOGPROBS

LOGPROBS: Final = "message.output_text.logprobs"
"""The only value of `include` that this server supports."""
MAX_INCLUDE_VALUES: Final = 64
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY_CHARACTERS: Final = 64
MAX_METADATA_VALUE_CHARACTERS: Final = 512

_REPEATED_NUMBERS: Final = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Sampling parameters that the response repeats."""
PASSED: Final = (PASSED_TO_CHAT - set(_REPEATED_NUMBERS)) | {
    *("stop", "include_stop_str_in_output", "top_k", "allowed_token_ids", "skip_special_tokens"),
    *("spaces_between_special_tokens", "thinking_token_budget", "include_reasoning"),
}
"""Fields of a chat completion that OpenAI's Responses API lacks and that this server accepts."""

_CLIENT_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning",
    "logprobs": "include",
}
"""Field of a chat completion → name of the same in the client's API."""
_EFFORT_VARIABLES: Final = frozenset({"reasoning_effort", *REASONING_SWITCHES})
"""Template variables that an effort can set. Agents ask every model for an effort, so it is ignored
if the template reads none of these."""


class TextOptions(NestedFields):
    """Options of the answer's text. verbosity has no effect."""

    where = "text."

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(NestedFields):
    """Options of the reasoning. generate_summary is the older name of summary."""

    where, neutral = "reasoning.", REASONING_NEUTRAL

    effort: Text | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(NestedFields):
    """Stream options; none has an effect."""

    where, neutral = "stream_options.", STREAM_OPTIONS_NEUTRAL


def _with_ids(value: str | list[Item]) -> str | list[Item]:
    return value if isinstance(value, str) else [with_id(item) for item in value]


InputItems = Annotated[
    Annotated[Text, Field(min_length=1)]
    | Annotated[list[Item], Field(fail_fast=True, max_length=MAX_ITEMS)],
    most_elements(MAX_ITEMS, "items"),
    AfterValidator(_with_ids),
]
"""What a client sends as `input`; its items get the ids that they lack."""
Label = Annotated[Text, Field(max_length=MAX_METADATA_VALUE_CHARACTERS)]


class ResponsesRequest(Strict):
    input: InputItems
    """A text, or up to 4096 items: messages, reasoning, calls of tools and their outputs,
    compaction and references; messages of the user and outputs may hold input_image parts, for a
    model that reads images. Items without text are named in ignored_fields. May be empty beside
    instructions or previous_response_id."""
    model: Text | None = None
    """Name of a served model; by default the one there is."""
    instructions: Text | None = None
    """Instructions before the conversation, as a system message."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Most output tokens, reasoning included; by default the model's max_new_tokens, or all that
    the context leaves."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this probability."""
    presence_penalty: float = 0.0
    """-2 to 2; above 0, a token that the answer already contains gets less likely."""
    frequency_penalty: float = 0.0
    """-2 to 2; above 0, a token gets less likely with each time that the answer contains it."""
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_LISTED_TOOLS)] = []
    """Functions, custom tools and namespaces of them. Tools that OpenAI's servers run are left out
    and named in ignored_fields."""
    tool_choice: Text | dict[str, Any] = "auto"
    """auto, none, required, a function or custom tool by name, or allowed_tools."""
    parallel_tool_calls: bool = True
    """Whether an answer may call more than one tool."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Most calls of tools that the server runs. This server runs none, so it has no effect."""
    text: TextOptions | None = None
    """format: text, json_object, or json_schema with a schema that the answer keeps to."""
    reasoning: ReasoningOptions | None = None
    """effort; summary: return all reasoning as a summary too."""
    include: Annotated[list[Text], Field(fail_fast=True, max_length=MAX_INCLUDE_VALUES)] = []
    """message.output_text.logprobs; other values are ignored and reported."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Alternatives for each token (0 to 20); only with these logprobs."""
    stream: bool = False
    """Answer with server-sent events."""
    stream_options: ResponseStreamOptions | None = None
    """Only include_obfuscation (false) is accepted; it has no effect."""
    store: bool | None = None
    """Store the response for a while, for GET and for previous_response_id. By default yes, unless
    storing is disabled or the conversation is too large; with true that is a 400."""
    background: bool = False
    """Answer at once and generate in the background; not without store, nor with stream."""
    previous_response_id: Annotated[Text, Field(max_length=256)] | None = None
    """A stored response whose conversation this request continues, without its instructions."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """auto: a conversation that is too long loses its beginning."""
    metadata: Annotated[dict[str, Label], most_members(MAX_METADATA_PAIRS)] = {}
    """Up to 16 pairs that the response repeats."""
    user: Label | None = None
    """The client's id of its user, which the response repeats."""
    safety_identifier: Label | None = None
    """A newer name of user, which the response repeats."""
    prompt_cache_key: Label | None = None
    """Has no effect, because prefixes are found without it; the response repeats it."""

    @property
    def returns_summary(self) -> bool:
        """The response contains the reasoning as a summary too."""
        reasoning = self.reasoning
        summary = reasoning and (reasoning.summary or reasoning.generate_summary)
        return summary not in (None, "none")

    @property
    def returns_logprobs(self) -> bool:
        return LOGPROBS in self.include


_CHAT_ONLY: Final = chat_only_fields(ResponsesRequest.model_fields, PASSED)


def parse_request(body: Any, ignored: IgnoredFields) -> tuple[ResponsesRequest, dict[str, Any]]:
    """Return the request, and its fields that are passed to the chat unchanged.

    ignored: collects fields without effect. Raises InvalidRequestError.
    """
    own_fields, passed = split_fields(
        body, passed=PASSED, chat_only=_CHAT_ONLY, hints=RESPONSES_HINTS, ignored=ignored
    )
    request = parse(ResponsesRequest, own_fields, RESPONSES_NEUTRAL, ignored)
    for name in request.include:
        if name != LOGPROBS:
            ignored.add(f"include.{name}")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        ignored.add("text.verbosity")
    _check_combinations(request)
    return request, passed


def _check_combinations(request: ResponsesRequest) -> None:
    """Raise InvalidRequestError for fields that do not go together."""
    if request.top_logprobs and not request.returns_logprobs:
        raise InvalidRequestError(f"top_logprobs needs {LOGPROBS} in include", "top_logprobs")
    require(request.stream_options is None or request.stream, "stream_options", "needs stream")
    require(not request.background or request.store is not False, "background", "needs store")
    if request.background and request.stream:
        raise InvalidRequestError("background does not go with stream here", "background")
    for key in request.metadata:
        if len(key) > MAX_METADATA_KEY_CHARACTERS:
            raise InvalidRequestError(
                f"metadata: a key is longer than {MAX_METADATA_KEY_CHARACTERS}", "metadata"
            )


class ResponsesTranslation(ChatTranslation):
    """A request of /v1/responses, translated into a chat completion.

    items: the conversation, from its first item to its last. template_names: variables that the
    chat template reads. Raises InvalidRequestError.
    """

    _client_names = _CLIENT_NAMES
    _mentioned = re.compile(
        r"^messages\b|\bmax_(?:completion_)?tokens\b"
        r"|\bresponse_format(?:\.json_schema)?\b|\breasoning_effort\b"
    )

    def __init__(
        self,
        request: ResponsesRequest,
        passed: Mapping[str, Any],
        items: Sequence[Item],
        ignored: IgnoredFields,
        *,
        template_names: frozenset[str],
    ) -> None:
        super().__init__(ignored)
        self._request = request
        self._passed = passed
        self._items = items
        self._template_names = template_names
        self.tools = ResponseTools(request.tools, request.tool_choice, ignored)
        self._tool_paths = self.tools.paths

    def chat_request(self, *, merge_roles: bool = False) -> ChatCompletionRequest:
        request, ignored = self._request, self._ignored
        translator = ItemTranslator(request.instructions, self.tools, ignored)
        sent = [] if isinstance(request.input, str) else request.input
        places = {item["id"]: f"input[{index}]" for index, item in enumerate(sent)}
        translator.append_items(self._items, places)
        messages = translator.build_messages()
        self._places = () if merge_roles else translator.places
        self._call_paths = {} if merge_roles else translator.call_paths
        if merge_roles:
            messages = with_merged_roles(messages)
        self._image_paths = image_paths(messages, translator.image_paths)
        fields: dict[str, Any] = {
            **self._passed,
            "model": request.model,
            "stream": request.stream,
            "messages": messages,
            "max_completion_tokens": request.max_output_tokens,
            "response_format": _response_format(request, ignored),
            **self.tools.chat_fields(request.parallel_tool_calls),
        }
        for name in _REPEATED_NUMBERS:
            if name in request.model_fields_set:
                fields[name] = getattr(request, name)
        effort = None if request.reasoning is None else request.reasoning.effort
        if effort in (None, "none") or not _EFFORT_VARIABLES.isdisjoint(self._template_names):
            fields["reasoning_effort"] = effort
        else:
            ignored.add("reasoning.effort")
        if request.returns_logprobs:
            fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
        if request.truncation == "auto":
            fields.setdefault("truncate_prompt_tokens", -1)
        return self._parse_chat(fields)

    def drop_request(self) -> None:
        del self._request, self._passed, self._items


def _response_format(request: ResponsesRequest, ignored: IgnoredFields) -> dict[str, Any] | None:
    """Return `text.format` as the `response_format` of a chat completion."""
    text_format = None if request.text is None else request.text.format
    if text_format is None:
        return None
    kind = text_format.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequestError(
            "text.format.type must be 'text', 'json_object' or 'json_schema'", "text.format.type"
        )
    known = ("name", "schema", "description", "strict") if kind == "json_schema" else ()
    rest = {name: value for name, value in text_format.items() if name != "type"}
    given = given_fields(rest, known, {}, ignored, "text.format.")
    if kind != "json_schema":
        return {"type": kind}
    for name in ("name", "schema"):
        if name not in given:
            where = f"text.format.{name}"
            raise InvalidRequestError(f"{where} is missing", where)
    return {"type": kind, "json_schema": given}
