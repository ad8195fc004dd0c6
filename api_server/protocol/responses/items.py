"""The items of a conversation of /v1/responses, as messages of a chat.

    message user            "weather?"           user       "weather?"
    reasoning               "Paris, then"      ┐
    message assistant       "Let me look."     ├ assistant  reasoning, "Let me look.", tool_calls
    function_call           weather(…)         ┘
    function_call_output    "21 °C"              tool       "21 °C"

Owns that reading: what belongs together in one message, and which items have no place in one.
"""

import json
from collections.abc import Sequence
from typing import Any, Final, Protocol

from api_server.protocol.chat import Message
from api_server.protocol.fields import IgnoredFields, not_shown
from proto.errors import InvalidRequestError, shown

Item = dict[str, Any]
MAX_ITEMS: Final = 4096
CUSTOM_INPUT: Final = "input"
"""The one argument of the function that stands for a custom tool."""

_ROLES: Final = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
"""Templates know one kind of instructions."""
_TEXT_PARTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}
"""Type of a part → the field with its text."""
_PICTURES: Final = {"input_image": "image", "input_file": "document"}
"""Kind of a tool's non-text output → how the model sees it."""
_SKIPPED: Final = frozenset(
    {
        *("web_search_call", "file_search_call", "image_generation_call", "computer_call"),
        *("code_interpreter_call", "mcp_call", "mcp_list_tools", "mcp_approval_request"),
        *("mcp_approval_response", "tool_search_call", "tool_search_output", "ghost_snapshot"),
    }
)
"""Records of what another server's tools did."""


_FIELDS: Final = frozenset(
    {
        *("type", "id", "status", "role", "content", "phase", "summary", "encrypted_content"),
        *("call_id", "name", "namespace", "arguments", "input", "output", "caller", "async"),
    }
)
"""That items have, with or without a meaning here."""


class ToolNames(Protocol):
    """What the model calls a tool."""

    def name_of(self, name: str, namespace: str | None) -> str:
        """Of the tool that the client knows by these."""
        ...


class _Messages:
    """Messages so far; `assistant` is the one that further items of the same turn go into."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[Item] = []
        self._assistant: Item | None = None
        self._instructions = [] if instructions is None else [instructions]

    def add(self, message: Item) -> None:
        """A message of its own. Instructions at the beginning are one."""
        if message["role"] == "system" and not self.messages:
            self._instructions.append(message["content"])
            return
        self._lead()
        self.messages.append(message)
        self._assistant = None

    def assistant(self) -> Item:
        """The message of the turn that goes on, or a new one."""
        self._lead()
        if self._assistant is None:
            self._assistant = {"role": "assistant"}
            self.messages.append(self._assistant)
        return self._assistant

    def all(self) -> list[Item]:
        """Those of the assistant have a content, or calls."""
        self._lead()
        for message in self.messages:
            if "tool_calls" not in message:
                message.setdefault("content", "")
        return self.messages

    def _lead(self) -> None:
        if self._instructions:
            content = "\n\n".join(self._instructions)
            self._instructions = []
            self.messages.append({"role": "system", "content": content})


def messages_of(
    items: Sequence[Item], instructions: str | None, tools: ToolNames, ignored: IgnoredFields
) -> list[Item]:
    """What a chat takes as its messages.

    instructions: stand before them, in one message with those that the items begin with.
    ignored: collects items that are not supported. Raises InvalidRequestError naming the item.
    """
    found = _Messages(instructions)
    for number, item in enumerate(items):
        where = f"input[{number}]"
        for name in item:
            if name not in _FIELDS:
                ignored.add(f"input.{name}")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            _add_message(found, item, where)
        elif kind == "reasoning":
            _add_reasoning(found, item, where, ignored)
        elif kind in ("function_call", "custom_tool_call"):
            _add_call(found, item, kind, where, tools)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _result(item.get("output"), f"{where}.output", ignored)
            call_id = _string(item, "call_id", where)
            found.add({"role": "tool", "tool_call_id": call_id, "content": content})
        elif isinstance(kind, str) and kind in _SKIPPED:
            ignored.add(f"input.{kind}")
        else:
            raise InvalidRequestError(
                f"{where}: items of the type {shown(kind)} are not available here", "input"
            )
    return found.all()


def _add_message(found: _Messages, item: Item, where: str) -> None:
    role = _ROLES.get(_string(item, "role", where))
    if role is None:
        raise InvalidRequestError(
            f"{where}.role must be 'user', 'assistant', 'system' or 'developer'", "input"
        )
    content = _content(item.get("content"), f"{where}.content")
    if role != "assistant":
        found.add({"role": role, "content": content})
        return
    message = found.assistant()
    message["content"] = message.get("content", "") + content


def _add_reasoning(found: _Messages, item: Item, where: str, ignored: IgnoredFields) -> None:
    """What was thought, where it can be read and the chat has a place for it."""
    text = _content(item.get("content") or item.get("summary") or "", f"{where}.content")
    if text and "reasoning" in Message.model_fields:
        message = found.assistant()
        message["reasoning"] = message.get("reasoning", "") + text
    elif text or item.get("encrypted_content"):
        ignored.add("input.reasoning")


def _add_call(found: _Messages, item: Item, kind: str, where: str, tools: ToolNames) -> None:
    name = _string(item, "name", where)
    namespace = item.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise InvalidRequestError(f"{where}.namespace must be a string", "input")
    if kind == "function_call":
        arguments = _arguments(_string(item, "arguments", where))
    else:
        arguments = json.dumps({CUSTOM_INPUT: _string(item, "input", where)})
    call = {
        "id": _string(item, "call_id", where),
        "type": "function",
        "function": {"name": tools.name_of(name, namespace), "arguments": arguments},
    }
    found.assistant().setdefault("tool_calls", []).append(call)


def _arguments(text: str) -> str:
    """As templates read them: of a call that was cut short, what there was of it."""
    try:
        is_object = isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    return text if is_object else json.dumps({"arguments": text})


def _result(value: Any, where: str, ignored: IgnoredFields) -> str:
    """Of a tool. Where it is an image, a text says that it cannot be shown: a refusal would
    end the agent, which sends all it has again each time.
    """
    if not isinstance(value, list):
        return _content(value, where)
    parts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _PICTURES:
            ignored.add(f"input.output.{kind}")
            part = {"type": "input_text", "text": not_shown(_PICTURES[kind])}
        parts.append(part)
    return _content(parts, where)


def _content(value: Any, where: str) -> str:
    """Text, or the texts of parts, joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError(f"{where} must be a string or a list of parts", "input")
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise InvalidRequestError(
                f"{where}[{number}]: takes parts of text, not of the type {shown(kind)}", "input"
            )
        texts.append(_string(part, field, f"{where}[{number}]"))
    return "\n".join(texts)


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be a string", "input")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{where}.{name} holds half of a surrogate pair, which is no text", "input"
        ) from None
    return value
