"""The request of POST /v1/chat/completions."""

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from api_server.protocol.common import GenerationRequest, Text
from api_server.protocol.decoding import num_values
from api_server.protocol.fields import (
    MESSAGE_NEUTRAL,
    PART_NEUTRAL,
    IgnoredFields,
    NestedFields,
    Strict,
    given_fields,
    ignored_of,
    is_nested_deeper,
    most_elements,
    most_members,
    no_text,
)
from api_server.protocol.images import DETAILS, MAX_UUID_CHARACTERS, read_image_part
from api_server.protocol.schemas import STRING, a_list, an_object
from api_server.protocol.tools import ToolFields
from proto.errors import InvalidRequestError, shown
from proto.messages.sampling_params import MAX_BUDGET, MAX_LOGPROBS

MAX_MESSAGES: Final = 4096
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
REASONING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables by which chat templates switch reasoning on or off."""

ROLES: Final = (
    *("system", "developer", "user", "assistant", "tool", "function"),
    *("ipython", "observation", "critic"),
)
"""Roles of OpenAI's API, and others that chat templates know."""
MAX_PARTS: Final = 4096
"""Most content parts of one message."""
MAX_VARIABLES: Final = 64
MAX_DOCUMENTS: Final = 1024
MAX_ARGUMENT_VALUES: Final = 1 << 17
"""Most values in the arguments of all calls together."""
MAX_CALLS: Final = 1024
"""Most tool calls of one message."""


def _content_parts(content: Any, info: ValidationInfo) -> Any:
    """Return a list of content as parts of texts and images; a string unchanged.

    Raises ValueError.
    """
    if not isinstance(content, list):
        return content
    if len(content) > MAX_PARTS:
        raise ValueError(f"takes at most {MAX_PARTS} parts, got {len(content)}")
    parts, ignored = [], ignored_of(info)
    for index, part in enumerate(content):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            kind, part = "text", {"type": "text", "text": part.get("refusal")}
        if kind == "image_url" and ignored.takes_images:
            try:
                parts.append(read_image_part(part, ignored))
            except ValueError as error:
                raise ValueError(f"[{index}]{error}") from None
            continue
        if isinstance(kind, str) and kind != "text":
            reason = no_text(kind, takes_images=ignored.takes_images)
            raise ValueError(f"[{index}]: {reason}")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError("takes a string or parts with the type text and a string as text")
        where = "messages.content."
        try:
            fields = given_fields(part, ("type", "text"), PART_NEUTRAL, ignored, where)
        except InvalidRequestError as error:
            raise ValueError(f".{error.message.removeprefix(where)}") from None
        parts.append(fields)
    return parts


def _known_role(role: str) -> str:
    """Raise ValueError for a role that no chat template knows: most would leave its message out."""
    if role not in ROLES:
        raise ValueError(f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    return role


def _with_content(message: Any, ignored: IgnoredFields) -> Any:
    """Return a message with its refusal as content, and "" for content that may be missing.

    Raises ValueError for other content that is missing.
    """
    if not isinstance(message, dict):
        return message
    content, role = message.get("content"), message.get("role")
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
            raise ValueError(f".content must not be {what}")
        message = {**message, "content": ""}
    if message.get("annotations"):
        ignored.add("messages.annotations")
        message = {**message, "annotations": None}
    return message


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
_PART_SCHEMA: Final = an_object(type={"const": "text"}, text=STRING)
_IMAGE_SCHEMA: Final = {
    "description": "An image, for a model that reads images: a data URI, or an address that the "
    "operator allows. With a uuid, image_url may be null: the image that was sent with it before.",
    **an_object(
        type={"const": "image_url"},
        optional={
            "image_url": {
                "anyOf": [
                    STRING,
                    an_object(url=STRING, optional={"detail": {"enum": list(DETAILS)}}),
                    {"type": "null"},
                ]
            },
            "uuid": STRING | {"minLength": 1, "maxLength": MAX_UUID_CHARACTERS},
        },
    ),
}
_PARTS_SCHEMA: Final = {"anyOf": [STRING, _PART_SCHEMA, _IMAGE_SCHEMA]}
_CONTENT_SCHEMA: Final = {"anyOf": [STRING, a_list(_PARTS_SCHEMA, minItems=1, maxItems=MAX_PARTS)]}
_ARGUMENTS_SCHEMA: Final = {"anyOf": [STRING, {"type": "object"}]}


class ContentPart(Strict):
    """A text, or an image with what `read_image_part` returns of it."""

    type: Literal["text", "image_url"]
    text: Text = ""
    url: Text | None = None
    detail: str = ""
    uuid: str | None = None

    @property
    def is_image(self) -> bool:
        return self.type == "image_url"

    def for_template(self, placeholder: str) -> dict[str, str]:
        """Return the part for a chat template. placeholder: as of `Message.for_template`."""
        if self.is_image and not placeholder:
            return {"type": "image"}
        return {"type": "text", "text": placeholder if self.is_image else self.text}


class CalledFunction(NestedFields):
    """The function of a tool call. arguments: a text only if they are no JSON."""

    where = "messages.tool_calls.function."

    name: Text
    arguments: Annotated[Any, BeforeValidator(_arguments), WithJsonSchema(_ARGUMENTS_SCHEMA)] = {}


class CalledTool(NestedFields):
    """A tool call in an earlier answer."""

    where = "messages.tool_calls."

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(NestedFields):
    where, neutral = "messages.", MESSAGE_NEUTRAL

    role: Annotated[str, AfterValidator(_known_role), WithJsonSchema({"enum": list(ROLES)})]
    content: Annotated[
        Text | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)],
        BeforeValidator(_content_parts),
        WithJsonSchema(_CONTENT_SCHEMA),
    ] = ""
    """Text of the message, with images for a model that reads them; may be empty or null in
    messages of the roles assistant and tool."""
    name: Text | None = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True, max_length=MAX_CALLS)] = []
    """Calls of tools; only in messages of the assistant."""
    tool_call_id: Text | None = None
    """Id of the call whose result this is; in messages of the role tool, or of a custom role."""
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    """The older name of reasoning."""

    @classmethod
    def known_fields(cls, value: Any, info: ValidationInfo) -> Any:
        return super().known_fields(_with_content(value, ignored_of(info)), info)

    @model_validator(mode="after")
    def _check_reasoning(self) -> Self:
        if self.role != "assistant" and (self.reasoning or self.reasoning_content):
            raise ValueError(".reasoning is for messages of the assistant only")
        return self

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        if self.role != "assistant" and self.tool_calls:
            raise ValueError(".tool_calls are for messages of the assistant only")
        if self.role in _ROLES_WITHOUT_RESULTS and self.tool_call_id is not None:
            raise ValueError(".tool_call_id is for messages of the role tool only")
        return self

    @property
    def parts(self) -> list[ContentPart]:
        """The parts of the content; none of a content that is a text."""
        return self.content if isinstance(self.content, list) else []

    @property
    def texts(self) -> list[str]:
        """The texts of the content."""
        if isinstance(self.content, str):
            return [self.content]
        return [part.text for part in self.content if not part.is_image]

    @property
    def is_result(self) -> bool:
        """The message is the result of a tool."""
        return self.role not in _ROLES_WITHOUT_RESULTS

    @property
    def has_images(self) -> bool:
        return any(part.is_image for part in self.parts)

    def for_template(
        self, *, takes_parts: bool, needs_parts: bool = False, placeholder: str = ""
    ) -> dict[str, Any]:
        """Return the message for a chat template, with only the fields that were given.

        takes_parts: keep a list of content parts; otherwise join their texts by line breaks.
        needs_parts: make a list of a text. placeholder: text in place of an image; "" for a
        template that takes parts with images.
        """
        fields = self.model_dump(exclude_none=True)
        if not self.tool_calls:
            del fields["tool_calls"]  # templates test whether the field exists
        content: Any = self.content
        if isinstance(content, list):
            content = [part.for_template(placeholder) for part in content]
            if not takes_parts:
                content = "\n".join(part["text"] for part in content)
        if needs_parts and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        return {**fields, "content": content}


class ConversationFields(ToolFields):
    """Fields of a request from which the chat template renders a prompt."""

    messages: Annotated[
        list[Message],
        Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        most_elements(MAX_MESSAGES, "messages"),
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
