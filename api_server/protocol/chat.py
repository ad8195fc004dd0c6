"""POST /v1/chat/completions: the request and the encoder of its response."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from api_server.parsers.output import (
    ChoiceParser,
    ContentText,
    OutputPart,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from api_server.protocol.common import GenerationRequest, Strict, Text
from api_server.protocol.decoding import num_values
from api_server.protocol.encoder import (
    PLACEHOLDER,
    OpenAIStreamEncoder,
    ResponseOptions,
    json_string,
    last_chunk_fields,
    sse_event,
    sse_event_parts,
    text_chunk_parts,
    transfer_params,
    usage_object,
    with_usage,
)
from api_server.protocol.fields import (
    MESSAGE_NEUTRAL,
    PART_NEUTRAL,
    given_fields,
    ignored_of,
    is_nested_deeper,
    most_members,
    no_text,
)
from api_server.protocol.tools import ToolFields
from api_server.request_stream import Delta, RequestStream, Usage
from api_server.text.logprobs import ChatLogprobs
from proto.errors import InvalidRequestError
from proto.sampling_params import MAX_BUDGET, MAX_LOGPROBS

MAX_MESSAGES: Final = 4096
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

MAX_ROLE_LENGTH: Final = 64
MAX_PARTS: Final = 4096
"""Most content parts of one message."""
MAX_VARIABLES: Final = 64
MAX_DOCUMENTS: Final = 1024
MAX_ARGUMENT_VALUES: Final = 1 << 17
"""Most values in the arguments of all calls together."""
MAX_CALLS: Final = 1024
"""Most tool calls of one message."""


def _content_parts(content: Any, info: ValidationInfo) -> Any:
    """Return a list of content as text parts; a string unchanged. Raises ValueError."""
    if not isinstance(content, list):
        return content
    if len(content) > MAX_PARTS:
        raise ValueError(f"takes at most {MAX_PARTS} parts, got {len(content)}")
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            kind, part = "text", {"type": "text", "text": part.get("refusal")}
        if isinstance(kind, str) and kind != "text":
            raise ValueError(no_text(kind))
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError("takes a string or parts with the type text and a string as text")
        where = "messages.content."
        try:
            fields = given_fields(part, ("type", "text"), PART_NEUTRAL, ignored_of(info), where)
        except InvalidRequestError as error:
            raise ValueError(error.message) from None
        parts.append(fields)
    return parts


def check_message_count(messages: Any) -> Any:
    """Raise ValueError for too many messages, before any of them is parsed."""
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise ValueError(f"at most {MAX_MESSAGES} messages, got {len(messages)}")
    return messages


def message_fields(message: Any, info: ValidationInfo) -> Any:
    """Return the fields of a message that are not null; raise ValueError for invalid ones."""
    if not isinstance(message, dict):
        return message
    content, role, ignored = message.get("content"), message.get("role"), ignored_of(info)
    refusal = message.get("refusal")
    if role == "assistant" and refusal and isinstance(refusal, str):
        if not content and not isinstance(content, dict):
            content = refusal
        elif isinstance(content, str | list):
            content = [*([content] if isinstance(content, str) else content), refusal]
        message = {**message, "content": content, "refusal": None}
    elif content is None or content == []:
        if role not in ("assistant", "tool"):
            what = "null" if content is None else "an empty list"
            raise ValueError(f"content must not be {what}")
        message = {**message, "content": ""}
    if message.get("annotations"):
        ignored.add("messages.annotations")
        message = {**message, "annotations": None}
    try:
        return given_fields(message, Message.model_fields, MESSAGE_NEUTRAL, ignored, "messages.")
    except InvalidRequestError as error:
        raise ValueError(error.message) from None


def _tool_call_fields(call: Any, info: ValidationInfo) -> Any:
    if not isinstance(call, dict):
        return call
    try:
        where = "messages.tool_calls."
        fields = given_fields(call, CalledTool.model_fields, {}, ignored_of(info), where)
        if isinstance(fields.get("function"), dict):
            function, where = fields["function"], where + "function."
            known = CalledFunction.model_fields
            fields["function"] = given_fields(function, known, {}, ignored_of(info), where)
    except InvalidRequestError as error:
        raise ValueError(error.message) from None
    return fields


def _arguments(given: Any, info: ValidationInfo) -> Any:
    """Return the arguments of a call decoded from JSON, or as text if they are no JSON.

    An earlier answer is not judged here. Null and an empty text mean no arguments, and nesting as
    deep as no body may have it stays text. U+FFFD replaces half of a surrogate pair. Raises
    ValueError if the arguments of all calls have too many values together.
    """
    if isinstance(given, str):
        ignored = ignored_of(info)
        ignored.num_inner_values += num_values(
            given, MAX_ARGUMENT_VALUES - ignored.num_inner_values
        )
        if ignored.num_inner_values > MAX_ARGUMENT_VALUES:
            raise ValueError(f"have more than {MAX_ARGUMENT_VALUES} values in all calls together")
        try:
            arguments = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            arguments = given
        given = given if is_nested_deeper(arguments) else arguments
    if given is None:
        return {}
    try:
        (text := json.dumps(given, ensure_ascii=False)).encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return given


_ROLES_WITHOUT_RESULTS: Final = ("system", "developer", "user", "assistant")
_PART_SCHEMA: Final = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA: Final = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_PARTS,
            "items": {"anyOf": [{"type": "string"}, _PART_SCHEMA]},
        },
    ]
}
_ARGUMENTS_SCHEMA: Final = {"anyOf": [{"type": "string"}, {"type": "object"}]}


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class CalledFunction(Strict):
    """The function of a tool call. arguments: a text only if they are no JSON."""

    name: Text
    arguments: Annotated[Any, BeforeValidator(_arguments), WithJsonSchema(_ARGUMENTS_SCHEMA)] = {}


class CalledTool(Strict):
    """A tool call in an earlier answer."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    role: Annotated[Text, Field(min_length=1, max_length=MAX_ROLE_LENGTH)]
    """The chat template gets any role, also ipython, function or critic."""
    content: Annotated[
        Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)],
        BeforeValidator(_content_parts),
        WithJsonSchema(_CONTENT_SCHEMA),
    ] = ""
    """Text of the message; may be empty or null in those of the roles assistant and tool."""
    name: Text | None = None
    tool_calls: Annotated[
        list[Annotated[CalledTool, BeforeValidator(_tool_call_fields)]],
        Field(fail_fast=True, max_length=MAX_CALLS),
    ] = []
    """Calls of tools; only in messages of the assistant."""
    tool_call_id: Text | None = None
    """Id of the call whose result this is; in messages of the role tool, or of a custom role."""
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    """The older name of reasoning."""

    @model_validator(mode="after")
    def _check_reasoning(self) -> Self:
        if self.role != "assistant" and (self.reasoning or self.reasoning_content):
            raise ValueError("only messages of the assistant have reasoning")
        return self

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        if self.role != "assistant" and self.tool_calls:
            raise ValueError("only messages of the assistant have tool_calls")
        if self.role in _ROLES_WITHOUT_RESULTS and self.tool_call_id is not None:
            raise ValueError("only messages of the role tool have a tool_call_id")
        return self

    def for_template(self, *, takes_parts: bool, needs_parts: bool = False) -> dict[str, Any]:
        """Return the message for a chat template, with only the fields that were given.

        takes_parts: keep a list of content parts; otherwise join their texts by line breaks.
        needs_parts: make a list of a text.
        """
        fields = self.model_dump(exclude_none=True)
        if not self.tool_calls:
            del fields["tool_calls"]  # templates test whether the field exists
        if not takes_parts and isinstance(self.content, list):
            fields["content"] = "\n".join(part.text for part in self.content)
        if needs_parts and isinstance(self.content, str):
            fields["content"] = [{"type": "text", "text": self.content}]
        return fields


class ConversationFields(ToolFields, Strict):
    """Fields of a request from which the chat template renders a prompt."""

    messages: Annotated[
        list[Annotated[Message, BeforeValidator(message_fields)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(check_message_count),
    ]
    """The conversation, at most 4096 messages."""
    add_generation_prompt: bool = True
    """End the prompt with what an answer begins with; false with continue_final_message."""
    continue_final_message: bool = False
    """Let the answer continue the text of the last message, which is not closed."""
    chat_template_kwargs: Annotated[dict[str, Any], most_members(MAX_VARIABLES)] = {}
    """Variables of the chat template, such as enable_thinking; unknown ones are ignored."""
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_DOCUMENTS)] = []
    """Up to 1024 texts to answer from, for templates that know documents."""


class ChatCompletionRequest(ConversationFields, GenerationRequest):
    """The body of POST /v1/chat/completions."""

    max_tokens: int | None = None
    """Most output tokens; by default the model's max_new_tokens, or all that the context leaves."""
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; wins over it."""
    include_reasoning: bool = True
    """Return the model's reasoning, as `reasoning` of the message."""
    reasoning_effort: Effort | None = None
    """How much to reason, for templates that know efforts; with others none switches it off."""
    thinking_token_budget: int | None = Field(default=None, ge=0, le=MAX_BUDGET)
    """Most reasoning tokens, after which the end is forced; needs a model with reasoning."""
    logprobs: bool = False
    """Log-probabilities of the sampled tokens."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Alternatives for each token (0 to 20); only with logprobs."""

    @property
    def requested_max_tokens(self) -> int | None:
        """`max_completion_tokens` or else `max_tokens`, None if the request has neither."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each output token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


# The response of /v1/chat/completions.


TOOL_CALLS: Final = "tool_calls"
"""The finish_reason of a choice that ended by itself and calls a tool."""


class ChatEncoder(OpenAIStreamEncoder):
    """Encoder of /v1/chat/completions.

    prompt_text: None if not requested. choice_parsers: one for each choice.
    """

    object_name = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        options: ResponseOptions,
        stream: RequestStream,
        prompt_text: str | None,
        choice_parsers: Sequence[ChoiceParser],
    ) -> None:
        super().__init__(options, self.chunk_object)
        self._stream = stream
        self._prompt_text = {} if prompt_text is None else {"prompt_text": prompt_text}
        self._choice_parsers = choice_parsers
        self._opened: set[int] = set()
        choice = {"index": PLACEHOLDER, "delta": {"content": PLACEHOLDER}, "logprobs": None}
        self._chunk_head, self._chunk_tail = text_chunk_parts(
            {**options.envelope(self.chunk_object), "choices": [choice]}, '"finish_reason": null'
        )

    def encode_delta(self, delta: Delta) -> str:
        index = delta.index
        opening = "" if index in self._opened else self._opening_chunk(index)
        parser = self._choice_parsers[index]
        is_last = delta.finish_reason is not None
        if self._options.is_text_only and not is_last:
            if parser.is_plain:
                before, between = self._chunk_head
                text = json_string(delta.text)
                return f"{opening}{before}{index}{between}{text}{self._chunk_tail}"
            parts = parser.parse_delta(delta.text, None, delta.content_end)
            return opening + self._parts_chunk(delta, parts) if parts else opening
        parts = parser.parse_delta(delta.text, delta.finish_reason, delta.content_end)
        return opening + self._parts_chunk(delta, parts)

    async def encode_body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = map(self._whole_choice, deltas)
        body = self._options.envelope(self.object_name) | {
            "choices": choices,
            "usage": usage_object(usage),
            **transfer_params([self._stream]),
        }
        body["prompt_logprobs"] = self._options.prompt_logprobs(self._stream)
        if self._options.returns_token_ids:
            body["prompt_token_ids"] = list(self._stream.prompt_token_ids)
        return body | self._prompt_text

    def _whole_choice(self, delta: Delta) -> dict[str, Any]:
        parser = self._choice_parsers[delta.index]
        parts = parser.parse_delta(delta.text, delta.finish_reason, delta.content_end)
        choice = {"index": delta.index, "message": full_message(parts)}
        return choice | self._choice_fields(delta)

    def _opening_chunk(self, index: int) -> str:
        """Return the chunk with the role; that of the first choice has the prompt's ids too.

        Its content is null if the choice may begin with reasoning or a call: some clients begin a
        text with an empty string.
        """
        is_first = not self._opened
        self._opened.add(index)
        content = "" if self._choice_parsers[index].is_plain else None
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": content},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._options.envelope(self.chunk_object) | {"choices": [choice]}
        if self._options.returns_token_ids and is_first:
            chunk["prompt_token_ids"] = list(self._stream.prompt_token_ids)
        if is_first:
            chunk |= self._prompt_text
        no_tokens = Delta(index, "", [], [], 0)
        return sse_event(with_usage(chunk, self._options, self._stream, no_tokens))

    def _parts_chunk(self, delta: Delta, parts: Sequence[OutputPart]) -> str:
        choice = {"index": delta.index, "delta": delta_message(parts)}
        choice |= self._choice_fields(delta)
        chunk = self._options.envelope(self.chunk_object) | {"choices": [choice]}
        chunk = with_usage(chunk, self._options, self._stream, delta)
        return "".join(sse_event_parts(chunk | last_chunk_fields(delta, [self._stream])))

    def _choice_fields(self, delta: Delta) -> dict[str, Any]:
        """Return the fields of a choice beside its message."""
        options = self._options
        logprobs = None
        if options.num_logprobs is not None:
            entries = ChatLogprobs(delta.tokens, options.num_logprobs, options.token_names)
            logprobs = {"content": entries, "refusal": None}
        reason = delta.finish_reason
        if reason == "stop" and self._choice_parsers[delta.index].has_tool_calls:
            reason = TOOL_CALLS
        fields: dict[str, Any] = {"logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            fields["stop_reason"] = delta.stop_reason
        if options.returns_token_ids:
            fields["token_ids"] = delta.token_ids
        fields |= options.accepted_drafts(self._stream, delta)
        return fields | options.routed_experts(self._stream, delta)


def delta_message(parts: Sequence[OutputPart]) -> dict[str, Any]:
    """Return the `delta` of a chunk with these parts."""
    message = _texts(parts)
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            calls.append({"index": part.index, **_tool_call(part.call_id, part.name, "")})
        elif isinstance(part, ToolCallArguments):
            if not calls or calls[-1]["index"] != part.index:
                calls.append({"index": part.index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += part.text
    return message | {"tool_calls": calls} if calls else message


def full_message(parts: Sequence[OutputPart]) -> dict[str, Any]:
    """Return the `message` of a choice with these parts."""
    texts = _texts(parts)
    starts = {part.index: part for part in parts if isinstance(part, ToolCallStart)}
    arguments: dict[int, list[str]] = {index: [] for index in starts}
    for part in parts:
        if isinstance(part, ToolCallArguments):
            arguments[part.index].append(part.text)
    calls = [
        _tool_call(start.call_id, start.name, "".join(arguments[index]))
        for index, start in starts.items()
    ]
    content = texts.get("content", None if calls or texts else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if "reasoning" in texts:
        message["reasoning"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(parts: Iterable[OutputPart]) -> dict[str, Any]:
    """Return `content` and `reasoning`, each only if there is any."""
    pieces: dict[str, list[str]] = {}
    for part in parts:
        if isinstance(part, ContentText | ReasoningText):
            name = "content" if isinstance(part, ContentText) else "reasoning"
            pieces.setdefault(name, []).append(part.text)
    return {name: "".join(texts) for name, texts in pieces.items()}


def _tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
