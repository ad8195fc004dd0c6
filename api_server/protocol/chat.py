"""The request of POST /v1/chat/completions."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationInfo

from api_server.protocol.common import GenerationRequest, Strict, Text
from api_server.protocol.fields import given_fields, ignored_of
from api_server.protocol.known_fields import MESSAGE_NEUTRAL, PART_NEUTRAL
from proto.errors import InvalidRequestError
from proto.sampling_params import MAX_LOGPROBS

MAX_MESSAGES: Final = 4096

_LATER_ROLES: Final = ("tool", "function")


def _joined(content: Any, info: ValidationInfo) -> Any:
    """Text parts as one text, a line each."""
    if not isinstance(content, list):
        return content
    if not content:
        raise ValueError("must not be an empty list")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError("takes a string or parts of type text; no other parts yet")
        where = "messages.content."
        try:
            given_fields(part, ("type", "text"), PART_NEUTRAL, ignored_of(info), where)
        except InvalidRequestError as error:
            raise ValueError(error.message) from None
        texts.append(part["text"])
    return "\n".join(texts)


def not_too_many(messages: Any) -> Any:
    """Before any of them is looked at."""
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise ValueError(f"at most {MAX_MESSAGES} messages, got {len(messages)}")
    return messages


def message_fields(message: Any, info: ValidationInfo) -> Any:
    """Those that are not null; raises ValueError for what no message may have."""
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    if isinstance(role, str) and role in _LATER_ROLES:
        raise ValueError(f"messages of the role {role} are not available yet")
    if "content" in message and message["content"] is None:
        raise ValueError("content must not be null")
    try:
        return given_fields(
            message, Message.model_fields, MESSAGE_NEUTRAL, ignored_of(info), "messages."
        )
    except InvalidRequestError as error:
        raise ValueError(error.message) from None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_joined)]
    name: Text | None = None

    def for_template(self) -> dict[str, Any]:
        """What a template sees: only fields that were given."""
        return self.model_dump(exclude_none=True)


class ChatCompletionRequest(GenerationRequest):
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
