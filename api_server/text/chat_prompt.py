"""A chat request's fields as the conversation that its template is given.

Owns what a client may say to a template, and what is an error of the client's.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, Protocol

from api_server.protocol.fields import IgnoredFields
from api_server.text.chat_template import Conversation, TemplateFacts
from proto.errors import InvalidRequestError, shown

# Ids of tool calls as the chat template takes them.
#
#     call_d38175f2a077c9e32ea553d9      5d1f09c3e       where the template wants 9 characters
#     aB3dE6gH9                          aB3dE6gH9       as it is: it has so many


def with_ids_of_length(
    messages: Sequence[Mapping[str, Any]], length: int
) -> Sequence[Mapping[str, Any]]:
    """length: of an id, in characters; 0 for any, which changes nothing."""
    return [_with_ids(message, length) for message in messages] if length else messages


def _with_ids(message: Mapping[str, Any], length: int) -> Mapping[str, Any]:
    changed = dict(message)
    if isinstance(changed.get("tool_call_id"), str):
        changed["tool_call_id"] = _fitting(changed["tool_call_id"], length)
    if changed.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "id": _fitting(call["id"], length)} if "id" in call else call
            for call in changed["tool_calls"]
        ]
    return changed


def _fitting(given: str, length: int) -> str:
    if len(given) == length and given.isascii() and given.isalnum():
        return given
    return blake2b(given.encode(), digest_size=32).hexdigest()[:length]


RESERVED: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "tokenize",
        "tools",
    }
)
"""Names that chat_template_kwargs may not use: they have fields of their own, or none."""
MAX_VARIABLES: Final = 64


class TemplateMessage(Protocol):
    """A message of a request."""

    def for_template(self, *, takes_parts: bool) -> dict[str, Any]:
        """takes_parts: a content of several parts stays so; otherwise it becomes one text."""
        ...


class TemplateFields(Protocol):
    """A request that a template makes a prompt of."""

    @property
    def messages(self) -> Sequence[TemplateMessage]: ...

    @property
    def add_generation_prompt(self) -> bool: ...

    @property
    def continue_final_message(self) -> bool: ...

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]: ...

    @property
    def documents(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def model_fields_set(self) -> set[str]: ...


def conversation_of(
    asked: TemplateFields,
    facts: TemplateFacts,
    ignored: IgnoredFields,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> Conversation:
    """variables: of the template, beside those of the client, which win.

    ignored: collects variables that the template does not read. Raises InvalidRequestError for
    what would have no effect though it should.
    """
    continues = asked.continue_final_message
    if (
        continues
        and asked.add_generation_prompt
        and "add_generation_prompt" in asked.model_fields_set
    ):
        raise InvalidRequestError(
            "continue_final_message does not go with add_generation_prompt",
            "continue_final_message",
        )
    if asked.documents and "documents" not in facts.names:
        raise InvalidRequestError("the model's chat template knows no documents", "documents")
    messages = [each.for_template(takes_parts=facts.takes_parts) for each in asked.messages]
    return Conversation(
        messages=with_ids_of_length(messages, facts.call_id_length),
        tools=tools,
        documents=asked.documents or None,
        add_generation_prompt=asked.add_generation_prompt and not continues,
        continue_final_message=continues,
        variables={**variables, **_variables(asked.chat_template_kwargs, facts, ignored)},
    )


def num_characters(value: Any) -> int:
    """Of all texts in a JSON value, the names in it too."""
    total, level = 0, [value]
    while level:
        each = level.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, Mapping):
            level += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            level += each
    return total


def _variables(
    given: Mapping[str, Any], facts: TemplateFacts, ignored: IgnoredFields
) -> dict[str, Any]:
    """Those that the template reads."""
    if len(given) > MAX_VARIABLES:
        raise InvalidRequestError(
            f"chat_template_kwargs takes at most {MAX_VARIABLES} names, got {len(given)}",
            "chat_template_kwargs",
        )
    for name in given:
        if name in RESERVED:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {shown(name)}", "chat_template_kwargs"
            )
        if name not in facts.names:
            ignored.add(f"chat_template_kwargs.{name}")
    return {name: value for name, value in given.items() if name in facts.names}
