"""The items of a conversation of /v1/responses, as messages of a chat.

message user            "weather?"           user       "weather?"
reasoning               "Paris, then"      ┐
message assistant       "Let me look."     ├ assistant  reasoning, "Let me look.", tool_calls
function_call           weather(…)         ┘
function_call_output    "21 °C"              tool       "21 °C"
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from api_server.protocol.fields import IgnoredFields, media_placeholder, no_text
from api_server.protocol.responses.tools import CUSTOM_INPUT, ResponseTools
from proto.errors import InvalidRequestError, shown

Item = dict[str, Any]
MAX_ITEMS: Final = 4096

_ROLES: Final = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
"""Role of an item → role in the chat; templates know no developer."""
_TEXT_PARTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}
"""Type of a content part → the field with its text."""
_MEDIA_PARTS: Final = {"input_image": "image", "input_file": "document"}
"""Type of a content part without text → what the model reads that it was."""
_SERVER_ITEMS: Final = frozenset(
    {
        *("web_search_call", "file_search_call", "image_generation_call", "computer_call"),
        *("code_interpreter_call", "mcp_call", "mcp_list_tools", "mcp_approval_request"),
        *("mcp_approval_response", "tool_search_call", "tool_search_output", "ghost_snapshot"),
    }
)
"""Items about tools of OpenAI's servers. They contain nothing that this model can read."""


_CALLS: Final = ("function_call", "custom_tool_call")
_RESULTS: Final = ("function_call_output", "custom_tool_call_output")

SUMMARY_MARK: Final = "tokend-summary:"
"""Begins the `encrypted_content` of a compaction item that this server made."""
_SUMMARY_TITLE: Final = "Summary of the conversation up to here:"

_ITEM_FIELDS: Final = frozenset(
    {
        *("type", "id", "status", "role", "content", "phase", "summary", "encrypted_content"),
        *("call_id", "name", "namespace", "arguments", "input", "output", "caller", "async"),
    }
)
"""Fields of items in OpenAI's API; some have no effect here."""


_ID_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
"""Type of an item → prefix of its id."""


def with_id(item: Item) -> Item:
    """Return the item with an id; one that the client has given stays."""
    if isinstance(item.get("id"), str):
        return item
    kind = item.get("type") or "message"
    prefix = _ID_PREFIXES.get(kind, "item") if isinstance(kind, str) else "item"
    return {**item, "id": f"{prefix}_{secrets.token_hex(16)}"}


def listed_item(item: Item) -> Item:
    """Return an input item with the fields that it has in responses of OpenAI's API."""
    kind = item.get("type") or "message"
    listed = {"type": kind, **item}
    if kind in ("message", "function_call", "custom_tool_call", "function_call_output"):
        listed.setdefault("status", "completed")
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part: Item = {"type": "input_text", "text": content}
        if item["role"] == "assistant":
            part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
        listed["content"] = [part]
    return listed


def is_message(item: Item) -> bool:
    """Return whether an item is a message; messages need not name their type."""
    return (item.get("type") or ("message" if "role" in item else None)) == "message"


def split_pending_calls(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Return (the items without calls of tools that have no result, these calls)."""
    answered = {str(item.get("call_id")) for item in items if item.get("type") in _RESULTS}
    rest: list[Item] = []
    pending: list[Item] = []
    for item in items:
        is_pending = item.get("type") in _CALLS and str(item.get("call_id")) not in answered
        (pending if is_pending else rest).append(item)
    return rest, pending


class ItemTranslator:
    """Translates the items of a conversation into chat messages.

    instructions: a system message, joined with system items at the beginning. tools: give the
    names of called functions. ignored: collects items that are left out. places: where the client
    finds each message, for errors: the item that began it, or the instructions.
    """

    def __init__(
        self, instructions: str | None, tools: ResponseTools, ignored: IgnoredFields
    ) -> None:
        self._tools = tools
        self._ignored = ignored
        self._messages: list[Item] = []
        self.places: list[str] = []
        self._place = ""  # of the current item
        self._assistant: Item | None = None  # the message of the assistant's turn that continues
        self._instructions = [] if instructions is None else [instructions]
        self._call_ids: set[str] = set()

    def append_items(self, items: Sequence[Item], places: Mapping[str, str]) -> None:
        """Translate the items; raise InvalidRequestError that names the invalid item.

        places: of the items of this request, by their ids; others are of earlier responses.
        """
        for item in items:
            where = self._place = places.get(item["id"], "an item of previous_response_id")
            for name in item:
                if name not in _ITEM_FIELDS:
                    self._ignored.add(f"input.{name}")
            kind = item.get("type")
            if is_message(item):
                self._append_message_item(item, where)
            elif kind == "reasoning":
                self._append_reasoning(item, where)
            elif kind in _CALLS:
                self._append_call(item, kind, where)
            elif kind in _RESULTS:
                self._append_call_output(item, where)
            elif kind == "compaction":
                self._append_summary(item, where)
            elif isinstance(kind, str) and kind in _SERVER_ITEMS:
                self._ignored.add(f"input.{kind}")
            else:
                raise InvalidRequestError(
                    f"{where}: items of the type {shown(kind)} are not available here", "input"
                )

    def build_messages(self) -> list[Item]:
        """Return the chat messages; each has content or tool calls."""
        self._append_instructions()
        for message in self._messages:
            if "tool_calls" not in message:
                message.setdefault("content", "")
        return self._messages

    def _append_message_item(self, item: Item, where: str) -> None:
        role = _ROLES.get(_string(item, "role", where))
        if role is None:
            raise InvalidRequestError(
                f"{where}.role must be 'user', 'assistant', 'system' or 'developer'", "input"
            )
        content = _content(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._append_message({"role": role, "content": content})
            return
        message = self._assistant_message()
        message["content"] = message.get("content", "") + content

    def _append_reasoning(self, item: Item, where: str) -> None:
        """Add readable reasoning to the assistant's message; encrypted reasoning is left out."""
        text = _content(item.get("content") or item.get("summary") or "", f"{where}.content")
        if text:
            message = self._assistant_message()
            message["reasoning"] = message.get("reasoning", "") + text
        elif item.get("encrypted_content"):
            self._ignored.add("input.reasoning")

    def _append_call(self, item: Item, kind: str, where: str) -> None:
        name = _string(item, "name", where)
        namespace = item.get("namespace")
        if namespace is not None and not isinstance(namespace, str):
            raise InvalidRequestError(f"{where}.namespace must be a string", "input")
        if kind == "function_call":
            arguments = _arguments(_string(item, "arguments", where))
        else:
            arguments = json.dumps({CUSTOM_INPUT: _string(item, "input", where)})
        call_id = _string(item, "call_id", where)
        self._call_ids.add(call_id)
        call = {
            "id": call_id,
            "type": "function",
            "function": {
                "name": self._tools.function_name(name, namespace),
                "arguments": arguments,
            },
        }
        self._assistant_message().setdefault("tool_calls", []).append(call)

    def _append_summary(self, item: Item, where: str) -> None:
        content = _string(item, "encrypted_content", where)
        if not content.startswith(SUMMARY_MARK):
            raise InvalidRequestError(
                f"{where}.encrypted_content: this server cannot read it, another one made it",
                "input",
            )
        summary = content.removeprefix(SUMMARY_MARK)
        self._append_message({"role": "user", "content": f"{_SUMMARY_TITLE}\n{summary}"})

    def _append_call_output(self, item: Item, where: str) -> None:
        content = self._tool_result(item.get("output"), f"{where}.output")
        call_id = _string(item, "call_id", where)
        if call_id not in self._call_ids:
            raise InvalidRequestError(
                f"{where}.call_id: no call before it has the call_id {shown(call_id)}", "input"
            )
        self._append_message({"role": "tool", "tool_call_id": call_id, "content": content})

    def _tool_result(self, value: Any, where: str) -> str:
        """Return a tool's result as text.

        A text replaces images and documents: an error would end the agent for good, because it
        sends the whole conversation again each time.
        """
        if not isinstance(value, list):
            return _content(value, where)
        parts = []
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in _MEDIA_PARTS:
                self._ignored.add(f"input.output.{kind}")
                part = {"type": "input_text", "text": media_placeholder(_MEDIA_PARTS[kind])}
            parts.append(part)
        return _content(parts, where)

    def _append_message(self, message: Item) -> None:
        """Add a message that is not the assistant's; system messages at the start are joined."""
        if message["role"] == "system" and not self._messages:
            self._instructions.append(message["content"])
            return
        self._append_instructions()
        self._messages.append(message)
        self.places.append(self._place)
        self._assistant = None

    def _assistant_message(self) -> Item:
        """Return the message of the assistant's turn that continues, or a new one."""
        self._append_instructions()
        if self._assistant is None:
            self._assistant = {"role": "assistant"}
            self._messages.append(self._assistant)
            self.places.append(self._place)
        return self._assistant

    def _append_instructions(self) -> None:
        if self._instructions:
            content = "\n\n".join(self._instructions)
            self._instructions = []
            self._messages.append({"role": "system", "content": content})
            self.places.append("instructions")


def _arguments(text: str) -> str:
    """Return the arguments of a call as a JSON object, also if they were cut off."""
    try:
        is_object = isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    return text if is_object else json.dumps({"arguments": text})


def _content(value: Any, where: str) -> str:
    """Return a text, or the texts of content parts joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError(f"{where} must be a string or a list of parts", "input")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise InvalidRequestError(f"{where}[{index}]: {no_text(kind)}", "input")
        texts.append(_string(part, field, f"{where}[{index}]"))
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


# Merged roles, for chat templates that accept few orders of roles.
#
#     system       "be brief"                        system       "be brief"
#     user         "on a Linux machine"            ┐ user         "on a Linux machine
#     user         "weather?"                      ┘               weather?"
#     assistant    weather(…)                        assistant    weather(…)
#     tool         "21 °C"                         ┐ tool         "21 °C
#     user         "And tomorrow?"                 ┘               And tomorrow?"


def with_merged_roles(messages: Sequence[Item]) -> list[Item]:
    """Return chat messages in which no user or system message follows a user's or a tool's."""
    merged: list[Item] = []
    for message in messages:
        role = message["role"]
        if merged and role in ("system", "user"):
            previous = merged[-1]
            if previous["role"] in ("user", "tool"):
                texts = (previous["content"], message["content"])
                merged[-1] = previous | {"content": "\n".join(text for text in texts if text)}
                continue
            role = "user"
        merged.append({**message, "role": role})
    return merged
