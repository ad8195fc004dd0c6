"""The request of POST /v1/chat/completions."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from api_server.parsers.parts import (
    PLAIN_TEXT,
    CallArguments,
    CallBegins,
    Content,
    Part,
    PartsParser,
    Reasoning,
)
from api_server.protocol.answers import (
    HOLE,
    OpenAIStream,
    Shape,
    around,
    at_end,
    encode_string,
    event_of,
    transfer_params,
    usage_object,
    with_usage,
)
from api_server.protocol.common import GenerationRequest, Strict, Text
from api_server.protocol.fields import MESSAGE_NEUTRAL, PART_NEUTRAL, given_fields, ignored_of
from api_server.protocol.tools import ToolFields
from api_server.request_stream import Delta, RequestStream, Usage
from api_server.text.logprobs import chat_logprobs
from proto.errors import InvalidRequestError
from proto.sampling_params import MAX_BUDGET, MAX_LOGPROBS

MAX_MESSAGES: Final = 4096
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

MAX_CALLS: Final = 1024
"""Of one message."""


def _parts(content: Any, info: ValidationInfo) -> Any:
    """A list of parts, each with its type; a text stays what it is."""
    if not isinstance(content, list):
        return content
    if not content:
        raise ValueError("must not be an empty list")
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError("takes a string or parts of type text; no other parts yet")
        where = "messages.content."
        try:
            fields = given_fields(part, ("type", "text"), PART_NEUTRAL, ignored_of(info), where)
        except InvalidRequestError as error:
            raise ValueError(error.message) from None
        parts.append(fields)
    return parts


def not_too_many(messages: Any) -> Any:
    """Before any of them is looked at."""
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise ValueError(f"at most {MAX_MESSAGES} messages, got {len(messages)}")
    return messages


def message_fields(message: Any, info: ValidationInfo) -> Any:
    """Those that are not null; raises ValueError for what no message may have."""
    if not isinstance(message, dict):
        return message
    if message.get("role") == "function":
        raise ValueError("messages of the role function are not available: use the role tool")
    if message.get("content") is None and not message.get("tool_calls"):
        raise ValueError("content must not be null")
    try:
        return given_fields(
            message, Message.model_fields, MESSAGE_NEUTRAL, ignored_of(info), "messages."
        )
    except InvalidRequestError as error:
        raise ValueError(error.message) from None


def _call_fields(call: Any, info: ValidationInfo) -> Any:
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


def _arguments(text: Any) -> Any:
    """Of a call: a JSON object in a string. An empty one is taken for no arguments."""
    if not isinstance(text, str):
        raise ValueError("must be a string that holds a JSON object")
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("must be a string that holds a JSON object")
    return found


_PART_SCHEMA: Final = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA: Final = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _PART_SCHEMA]}},
    ]
}


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class CalledFunction(Strict):
    """arguments: of the call, decoded."""

    name: Text
    arguments: Annotated[
        dict[str, Any], BeforeValidator(_arguments), WithJsonSchema({"type": "string"})
    ] = {}


class CalledTool(Strict):
    """A call that an earlier answer made."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Text | list[TextPart], BeforeValidator(_parts), WithJsonSchema(_CONTENT_SCHEMA)
    ] = ""
    """Left out, or null, only beside tool_calls."""
    name: Text | None = None
    tool_calls: Annotated[
        list[Annotated[CalledTool, BeforeValidator(_call_fields)]],
        FailFast(),
        Field(max_length=MAX_CALLS),
    ] = []
    """Calls that the assistant made."""
    tool_call_id: Text | None = None
    """The call that a message of the role tool answers."""
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
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("only messages of the role tool have a tool_call_id")
        return self

    def for_template(self, *, takes_parts: bool) -> dict[str, Any]:
        """What a template sees: only fields that were given.

        takes_parts: a content of several parts stays so; otherwise its texts become lines.
        """
        fields = self.model_dump(exclude_none=True)
        if not self.tool_calls:
            del fields["tool_calls"]  # templates ask whether it is there
        if not takes_parts and isinstance(self.content, list):
            fields["content"] = "\n".join(part.text for part in self.content)
        return fields


class ChatCompletionRequest(ToolFields, GenerationRequest):
    messages: Annotated[
        list[Annotated[Message, BeforeValidator(message_fields)]],
        FailFast(),
        Field(min_length=1),
        BeforeValidator(not_too_many),
    ]
    """The conversation, at most 4096 messages."""
    max_tokens: int | None = None
    """Most output tokens; by default all that the context leaves."""
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; wins over it."""
    add_generation_prompt: bool = True
    """End the prompt with what an answer begins with; false with continue_final_message."""
    continue_final_message: bool = False
    """Let the answer go on with the text of the last message, which is not closed."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as enable_thinking; those that it does not know are
    ignored."""
    include_reasoning: bool = True
    """Show the model's thoughts, as `reasoning` of the message."""
    reasoning_effort: Effort | None = None
    """How much to think, for templates that know efforts; with others none is not at all."""
    thinking_token_budget: int | None = Field(default=None, ge=0, le=MAX_BUDGET)
    """Most tokens of thoughts, after which their end is forced; needs a model that thinks."""
    documents: list[dict[str, Any]] = []
    """Texts to answer from, for templates that know documents."""
    logprobs: bool = False
    """Log-probabilities of the chosen tokens."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Alternatives for each token (0 to 20); only with logprobs."""

    @property
    def wanted_max_tokens(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def max_tokens_field(self) -> str:
        """The name by which the client gave `wanted_max_tokens`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each token, None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


# Answers of /v1/chat/completions, as OpenAI shapes them: content, reasoning and tool calls.


TOOL_CALLS: Final = "tool_calls"
"""The finish_reason of a choice that ended by itself and calls a tool."""


class ChatAnswer(OpenAIStream):
    """Shapes of /v1/chat/completions.

    prompt_text: None is not shown. make_parser: of the text of one choice.
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        shape: Shape,
        stream: RequestStream,
        prompt_text: str | None,
        make_parser: Callable[[], PartsParser] = lambda: PLAIN_TEXT,
    ) -> None:
        super().__init__(shape, self.chunk_kind)
        self._stream = stream
        self._prompt = {} if prompt_text is None else {"prompt_text": prompt_text}
        self._make_parser = make_parser
        self._readers: dict[int, _Reader] = {}
        self._head, self._tail = around(
            {
                **shape.envelope(self.chunk_kind),
                "choices": [{"index": HOLE, "delta": {"content": HOLE}, "logprobs": None}],
            },
            '"finish_reason": null',
        )

    def chunk(self, delta: Delta) -> str:
        index = delta.index
        opening = "" if index in self._readers else self._opening(index)
        reader = self._readers[index]
        if self._shape.plain and delta.finish_reason is None:
            if reader.is_plain:
                head, text = self._head, encode_string(delta.text)
                return f"{opening}{head[0]}{index}{head[1]}{text}{self._tail}"
            parts = reader.read(delta)
            return opening + self._parts_event(delta, parts) if parts else opening
        return opening + self._parts_event(delta, reader.read(delta))

    def body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = []
        for delta in deltas:
            reader = _Reader(self._make_parser())
            message = whole_message(reader.read(delta))
            choices.append(
                {"index": delta.index, "message": message} | self._rest(delta, reader.has_calls)
            )
        body = self._shape.envelope(self.kind) | {
            "choices": choices,
            "usage": usage_object(usage),
            **transfer_params([self._stream]),
        }
        body["prompt_logprobs"] = self._shape.prompt_logprobs(self._stream)
        if self._shape.token_ids:
            body["prompt_token_ids"] = list(self._stream.prompt_token_ids)
        return body | self._prompt

    def _opening(self, index: int) -> str:
        """Return the chunk with the role; the first of all has the prompt's ids too."""
        first = not self._readers
        self._readers[index] = _Reader(self._make_parser())
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        event = self._shape.envelope(self.chunk_kind) | {"choices": [choice]}
        if self._shape.token_ids and first:
            event["prompt_token_ids"] = list(self._stream.prompt_token_ids)
        if first:
            event |= self._prompt
        nothing = Delta(index, "", [], [], 0)
        return event_of(with_usage(event, self._shape, self._stream, nothing))

    def _parts_event(self, delta: Delta, parts: Sequence[Part]) -> str:
        has_calls = self._readers[delta.index].has_calls
        choice = {"index": delta.index, "delta": delta_fields(parts)}
        choice |= self._rest(delta, has_calls)
        event = self._shape.envelope(self.chunk_kind) | {"choices": [choice]}
        event = with_usage(event, self._shape, self._stream, delta)
        return event_of(event | at_end(delta, [self._stream]))

    def _rest(self, delta: Delta, has_calls: bool) -> dict[str, Any]:
        shape = self._shape
        logprobs = None
        if shape.top is not None:
            logprobs = chat_logprobs(delta.tokens, shape.top, shape.names)
        reason = delta.finish_reason
        if has_calls and reason == "stop":
            reason = TOOL_CALLS
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            rest["stop_reason"] = delta.stop_reason
        if shape.token_ids:
            rest["token_ids"] = delta.token_ids
        return rest


class _Reader:
    """A choice on its way into parts."""

    def __init__(self, parser: PartsParser) -> None:
        self._parser = parser
        self.is_plain = parser is PLAIN_TEXT
        self.has_calls = False

    def read(self, delta: Delta) -> list[Part]:
        parts = [*self._parser.feed(delta.text)]
        if delta.finish_reason is not None:
            parts += self._parser.end()
        self.has_calls = self.has_calls or any(isinstance(each, CallBegins) for each in parts)
        return parts


def delta_fields(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the `delta` of a chunk with these parts."""
    fields = _texts(parts)
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallBegins):
            calls.append({"index": part.index, **_call(part.call_id, part.name, "")})
        elif isinstance(part, CallArguments):
            if not calls or calls[-1]["index"] != part.index:
                calls.append({"index": part.index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += part.text
    return fields | {"tool_calls": calls} if calls else fields


def whole_message(parts: Iterable[Part]) -> dict[str, Any]:
    """The `message` of an answer that has these parts."""
    parts = list(parts)
    texts = _texts(parts)
    begins = {part.index: part for part in parts if isinstance(part, CallBegins)}
    arguments: dict[int, list[str]] = {index: [] for index in begins}
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index].append(part.text)
    calls = [
        _call(begun.call_id, begun.name, "".join(arguments[index]))
        for index, begun in begins.items()
    ]
    content = texts.get("content", None if calls or texts else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if "reasoning" in texts:
        message["reasoning"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(parts: Iterable[Part]) -> dict[str, Any]:
    """content and reasoning, where there is any."""
    found: dict[str, list[str]] = {}
    for part in parts:
        if isinstance(part, Content | Reasoning):
            name = "content" if isinstance(part, Content) else "reasoning"
            found.setdefault(name, []).append(part.text)
    return {name: "".join(texts) for name, texts in found.items()}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
