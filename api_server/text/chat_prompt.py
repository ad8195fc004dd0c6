"""From the fields of a chat request to the input of the chat template.

Start reading at `build_conversation`.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

from api_server.protocol.chat import ConversationFields
from api_server.protocol.fields import IgnoredFields
from api_server.text.chat_template import Conversation, TemplateFacts
from proto.errors import InvalidRequestError, shown

# Ids of tool calls for a chat template that demands a length of 9 characters:
#
#     call_d38175f2a077c9e32ea553d9      5d1f09c3e       a hash
#     aB3dE6gH9                          aB3dE6gH9       unchanged


def with_call_ids_of_length(
    messages: Sequence[Mapping[str, Any]], length: int
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with ids of this length in characters; 0 changes nothing."""
    return [_with_call_ids(message, length) for message in messages] if length else messages


def _with_call_ids(message: Mapping[str, Any], length: int) -> Mapping[str, Any]:
    changed = dict(message)
    if isinstance(changed.get("tool_call_id"), str):
        changed["tool_call_id"] = _call_id(changed["tool_call_id"], length)
    if changed.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "id": _call_id(call["id"], length)} if "id" in call else call
            for call in changed["tool_calls"]
        ]
    return changed


def _call_id(client_id: str, length: int) -> str:
    if len(client_id) == length and client_id.isascii() and client_id.isalnum():
        return client_id
    return blake2b(client_id.encode(), digest_size=32).hexdigest()[:length]


RESERVED_VARIABLES: Final = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("documents", "messages", "tokenize", "tools"),
    }
)
"""Names that chat_template_kwargs may not set; most have request fields of their own."""


def build_conversation(
    request: ConversationFields,
    facts: TemplateFacts,
    ignored: IgnoredFields,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
    *,
    image_placeholder: str = "",
    joins_results: bool = False,
) -> Conversation:
    """Return the input of the chat template.

    variables: of the template, beside those of the client, which override them. ignored: collects
    the client's variables that the template does not read. image_placeholder: stands for an image
    in a template that takes no parts with images. joins_results: and in results of tools.
    Raises InvalidRequestError for a field that the template cannot follow.
    """
    continues = request.continue_final_message
    asks_for_prompt = (
        request.add_generation_prompt and "add_generation_prompt" in request.model_fields_set
    )
    if continues and asks_for_prompt:
        raise InvalidRequestError(
            "continue_final_message does not go with add_generation_prompt",
            "continue_final_message",
        )
    if request.documents and "documents" not in facts.names:
        raise InvalidRequestError("the model's chat template knows no documents", "documents")
    messages = []
    for message in request.messages:
        takes_parts, takes_images = facts.takes_parts, facts.takes_images
        if joins_results and message.is_result:
            takes_parts, takes_images = facts.needs_parts, False
        fields = message.for_template(
            takes_parts=takes_parts,
            needs_parts=facts.needs_parts,
            placeholder="" if takes_images else image_placeholder,
        )
        messages.append(fields)
    return Conversation(
        messages=with_call_ids_of_length(messages, facts.call_id_length),
        tools=tools,
        documents=request.documents or None,
        add_generation_prompt=request.add_generation_prompt and not continues,
        continue_final_message=continues,
        variables={**variables, **_client_variables(request.chat_template_kwargs, facts, ignored)},
    )


def num_characters(value: Any) -> int:
    """Return the length of all strings in a JSON value, including the names of members."""
    total, pending = 0, [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, Mapping):
            pending += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            pending += part
    return total


def _client_variables(
    given: Mapping[str, Any], facts: TemplateFacts, ignored: IgnoredFields
) -> dict[str, Any]:
    """Return those of the client's variables that the template reads."""
    for name in given:
        if name in RESERVED_VARIABLES:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {shown(name)}", "chat_template_kwargs"
            )
        if name not in facts.names:
            ignored.add(f"chat_template_kwargs.{name}")
    return {name: value for name, value in given.items() if name in facts.names}
