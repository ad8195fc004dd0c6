"""The request of POST /v1/chat/completions."""

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from api_server.protocol.common import GenerationRequest, Strict, Text
from api_server.protocol.fields import given_fields, ignored_of
from api_server.protocol.known_fields import MESSAGE_NEUTRAL, PART_NEUTRAL
from api_server.protocol.tools import ToolFields
from proto.errors import InvalidRequestError
from proto.sampling_params import MAX_LOGPROBS
from proto.thinking import MAX_BUDGET

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
