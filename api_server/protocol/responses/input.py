"""The items of a conversation of /v1/responses, as messages of a chat.

message user            "weather?"           user       "weather?"
reasoning               "Paris, then"      ┐
message assistant       "Let me look."     ├ assistant  reasoning, "Let me look.", tool_calls
function_call           weather(…)         ┘
function_call_output    "21 °C"              tool       "21 °C"
agent_message           "done"               user       "Message from /root/a to /root:\ndone"
web_search_call                              passed over, named in ignored_fields

An item of any type is taken, because an agent sends its whole conversation again with each request:
an error would end it for good. What has text is rendered, what has none is passed over.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from api_server.protocol.chat import MAX_PARTS
from api_server.protocol.fields import IgnoredFields, is_encodable, media_placeholder, no_text
from api_server.protocol.images import joined_content, read_input_image
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
_RESULT_FIELDS: Final = ("text", "refusal", "logs", "stdout", "stderr")
"""Fields with text in a part of a tool's result."""

_CALLS: Final = {
    "function_call": ("name", "arguments"),
    "custom_tool_call": ("name", "input"),
    "multi_agent_call": ("action", "arguments"),
    "local_shell_call": ("", "action"),
    "shell_call": ("", "action"),
    "apply_patch_call": ("", "operation"),
    "program": ("", "code"),
    "mcp_call": ("name", "arguments"),
    "code_interpreter_call": ("", "code"),
    "file_search_call": ("", "queries"),
}
"""Type of an item that calls a tool → (field with the tool's name, field with the arguments).

A tool without such a field has the name of the type: shell, apply_patch.
"""
_RESULTS: Final = {
    "function_call_output": ("output",),
    "custom_tool_call_output": ("output",),
    "multi_agent_call_output": ("output",),
    "local_shell_call_output": ("output",),
    "shell_call_output": ("output",),
    "apply_patch_call_output": ("output", "status"),
    "program_output": ("result",),
    "mcp_call": ("output", "error"),
    "code_interpreter_call": ("outputs",),
    "file_search_call": ("results",),
}
"""Type of an item with a tool's result → fields with the result, of which the first given counts.

Calls among them hold their own result. Without one they are passed over.
"""
_STRICT_RESULTS: Final = ("function_call_output", "custom_tool_call_output")
"""Items whose result must be a text or a list of parts: clients make them themselves."""
_COMPACTIONS: Final = ("compaction", "compaction_summary", "context_compaction")

SUMMARY_MARK: Final = "tokend-summary:"
"""Begins the `encrypted_content` of a compaction item that this server made."""
_SUMMARY_TITLE: Final = "Summary of the conversation up to here:"

_ITEM_FIELDS: Final = frozenset(
    {
        *("type", "id", "status", "role", "content", "phase", "summary", "encrypted_content"),
        *("call_id", "name", "namespace", "caller", "async", "author", "recipient", "environment"),
        *("max_output_length", "container_id", "server_label", "fingerprint"),
        *(name for fields in (*_CALLS.values(), *_RESULTS.values()) for name in fields),
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


def is_reference(item: Item) -> bool:
    """Return whether an item stands for another one, which has its id."""
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def readable_summary(item: Item) -> str | None:
    """Return the summary of a compaction item of this server, None for other items."""
    content = item.get("encrypted_content")
    if item.get("type") in _COMPACTIONS and isinstance(content, str):
        return content.removeprefix(SUMMARY_MARK) if content.startswith(SUMMARY_MARK) else None
    return None


def is_unreadable_summary(item: Item) -> bool:
    """Return whether an item replaces messages that only the server that made it can read."""
    return item.get("type") in _COMPACTIONS and readable_summary(item) is None


def _call_id(item: Item) -> Any:
    """Return the id of the call that an item is, or is the result of; some have no field for it."""
    call_id = item.get("call_id")
    return item["id"] if call_id is None else call_id


def split_pending_calls(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Return (the items without calls of tools that have no result, these calls)."""
    answered = {str(_call_id(item)) for item in items if _type(item) in _RESULTS}
    rest: list[Item] = []
    pending: list[Item] = []
    for item in items:
        is_pending = _type(item) in _CALLS and str(_call_id(item)) not in answered
        (pending if is_pending else rest).append(item)
    return rest, pending


class ItemTranslator:
    """Translates the items of a conversation into chat messages.

    instructions: a system message, joined with system items at the beginning. tools: give the
    names of called functions. ignored: collects items that are passed over. places: where the
    client finds each message, for errors: the item that began it, or the instructions. call_paths:
    where it finds the arguments of each call, by the indices of the message and of the call in it.
    image_paths: where it finds all images, in their order.
    """

    def __init__(
        self, instructions: str | None, tools: ResponseTools, ignored: IgnoredFields
    ) -> None:
        self._tools = tools
        self._ignored = ignored
        self._messages: list[Item] = []
        self.places: list[str] = []
        self.call_paths: dict[tuple[int, int], str] = {}
        self.image_paths: list[str] = []
        self._place = ""  # of the current item
        self._assistant: Item | None = None  # the message of the assistant's turn that continues
        self._instructions = [] if instructions is None else [instructions]
        self._call_ids: set[str] = set()
        self._passed_over: dict[str, None] = {}

    def append_items(self, items: Sequence[Item], places: Mapping[str, str]) -> None:
        """Translate the items; raise InvalidRequestError that names the invalid item.

        places: of the items of this request, by their ids; others are of earlier responses.
        """
        for item in items:
            where = self._place = places.get(item["id"], "an item of previous_response_id")
            if self._append_item(item, where):
                for name in item:
                    if name not in _ITEM_FIELDS and item[name] is not None:
                        self._ignored.add(f"input.{name}")
            else:
                kind = "item_reference" if is_reference(item) else item.get("type")
                if not isinstance(kind, str):
                    raise InvalidRequestError(
                        f"{where}: items of the type {shown(kind)} are not available here", "input"
                    )
                self._passed_over[shown(kind)] = None
                self._ignored.add(f"input.{kind}")

    def _append_item(self, item: Item, where: str) -> bool:
        """Translate an item; return False for one without text that can be read here."""
        kind = _type(item)
        if is_message(item):
            self._append_message_item(item, where)
        elif kind == "reasoning":
            self._append_reasoning(item, where)
        elif kind == "agent_message":
            return self._append_agent_message(item, where)
        elif (summary := readable_summary(item)) is not None:
            content = f"{_SUMMARY_TITLE}\n{_valid_text(summary, where)}"
            self._append_message({"role": "user", "content": content})
        elif kind in _CALLS and kind in _RESULTS:
            if all(item.get(name) is None for name in _RESULTS[kind]):
                return False
            self._append_call(item, kind, where)
            self._append_result(item, kind, where)
        elif kind in _CALLS:
            self._append_call(item, kind, where)
        elif kind in _RESULTS:
            self._append_result(item, kind, where)
        else:
            return False
        return True

    def build_messages(self) -> list[Item]:
        """Return the chat messages; each has content or tool calls.

        Raises InvalidRequestError if all items were passed over.
        """
        self._append_instructions()
        if self._passed_over and not self._messages:
            kinds = ", ".join(self._passed_over)
            raise InvalidRequestError(f"input: holds no text, only items of type {kinds}", "input")
        for message in self._messages:
            if message["role"] == "assistant":
                for name in ("content", "reasoning"):  # once: a text that grows would be copied
                    if name in message:
                        message[name] = "".join(message[name])
            if "tool_calls" not in message:
                message.setdefault("content", "")
        return self._messages

    def _append_message_item(self, item: Item, where: str) -> None:
        role = _ROLES.get(_string(item, "role", where))
        if role is None:
            raise InvalidRequestError(
                f"{where}.role must be 'user', 'assistant', 'system' or 'developer'", "input"
            )
        content = item.get("content")
        if content is None and role == "assistant":
            content = ""
        if role != "assistant":
            images = self.image_paths if role == "user" and self._ignored.takes_images else None
            content = _content(content, f"{where}.content", images)
            self._append_message({"role": role, "content": content})
            return
        content = _content(content, f"{where}.content")
        message = self._assistant_message()
        message.setdefault("content", []).append(content)

    def _append_reasoning(self, item: Item, where: str) -> None:
        """Add readable reasoning to the assistant's message; encrypted reasoning is left out."""
        field = "content" if item.get("content") else "summary"
        text = self._readable_text(item.get(field) or "", f"{where}.{field}", f"input.{field}")
        if text:
            message = self._assistant_message()
            message.setdefault("reasoning", []).append(text)
        elif item.get("encrypted_content"):
            self._ignored.add("input.reasoning")

    def _append_agent_message(self, item: Item, where: str) -> bool:
        """Add a message between two agents as the user's; return False for one without text."""
        content = item.get("content") or ""
        text = self._readable_text(content, f"{where}.content", "input.content")
        if not text:
            return False
        author, recipient = (_string(item, name, where) for name in ("author", "recipient"))
        content = f"Message from {author} to {recipient}:\n{text}"
        self._append_message({"role": "user", "content": content})
        return True

    def _append_call(self, item: Item, kind: str, where: str) -> None:
        name_field, field = _CALLS[kind]
        name = _string(item, name_field, where) if name_field else kind.removesuffix("_call")
        namespace = item.get("namespace")
        if namespace is not None and not isinstance(namespace, str):
            raise InvalidRequestError(f"{where}.namespace must be a string", "input")
        if field not in item:
            raise InvalidRequestError(f"{where}.{field} is missing", "input")
        call_id = self._text_id(item, where)
        self._call_ids.add(call_id)
        function = {
            "name": self._tools.function_name(name, namespace),
            "arguments": _arguments(field, item[field]),
        }
        calls = self._assistant_message().setdefault("tool_calls", [])
        self.call_paths[len(self._messages) - 1, len(calls)] = f"{where}.{field}"
        calls.append({"id": call_id, "type": "function", "function": function})

    def _append_result(self, item: Item, kind: str, where: str) -> None:
        given = [name for name in _RESULTS[kind] if item.get(name) is not None]
        field = given[0] if given else _RESULTS[kind][0]
        value = item.get(field)
        if kind not in _STRICT_RESULTS and not isinstance(value, str | list | dict):
            value = "" if value is None else json.dumps(value)
        content = self._result_content(value, f"{where}.{field}", f"input.{field}")
        call_id = self._text_id(item, where)
        message = {"role": "tool", "tool_call_id": call_id, "content": content}
        if call_id not in self._call_ids:
            if not self._passed_over:
                what = f": no call before it has the call_id {shown(call_id)}"
                if item.get("call_id") is None:  # the id may be one that the server made
                    what = " is missing"
                raise InvalidRequestError(f"{where}.call_id{what}", "input")
            message = {"role": "user", "content": content}  # the call may have been passed over
        self._append_message(message)

    def _text_id(self, item: Item, where: str) -> str:
        return _string({"call_id": _call_id(item)}, "call_id", where)

    def _result_content(self, value: Any, where: str, name: str) -> str | list[Item]:
        """Return a tool's result, with its images if the model reads images."""
        is_list = isinstance(value, list) and len(value) <= MAX_PARTS
        if not (is_list and self._ignored.takes_images):
            return self._readable_text(value, where, name)
        pieces: list[str | Item] = []
        for index, part in enumerate(value):
            if isinstance(part, dict) and part.get("type") == "input_image":
                self.image_paths.append(f"{where}[{index}]")
                pieces.append(read_input_image(part, f"{where}[{index}]"))
            else:
                pieces.append(self._part_text(part, f"{where}[{index}]", name))
        return joined_content(pieces)

    def _readable_text(self, value: Any, where: str, name: str) -> str:
        """Return the text of a tool's result, of reasoning or of another agent's message.

        A text replaces images and documents. Parts without text are passed over. name: of the
        field, for the names of both in `ignored`.
        """
        if isinstance(value, dict):
            return _valid_text(json.dumps(value, ensure_ascii=False), where)
        if not isinstance(value, list) or len(value) > MAX_PARTS:
            text = _content(value, where)
            assert isinstance(text, str)
            return text
        texts = [
            self._part_text(part, f"{where}[{index}]", name) for index, part in enumerate(value)
        ]
        return "\n".join(filter(None, texts))

    def _part_text(self, part: Any, where: str, name: str) -> str:
        """Return the text of one part; "" for one that is passed over."""
        if not isinstance(part, dict):
            raise InvalidRequestError(f"{where} must be an object", "input")
        kind = str(part.get("type"))
        found = [part[field] for field in _RESULT_FIELDS if isinstance(part.get(field), str)]
        if kind in _MEDIA_PARTS:
            found = [media_placeholder(_MEDIA_PARTS[kind])]
        if kind in _MEDIA_PARTS or not found:
            self._ignored.add(f"{name}.{kind}")
        return _valid_text("\n".join([*filter(None, found), *_outcome(part)]), where)

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


def _type(item: Item) -> str:
    """Return the type of an item; "" for none."""
    kind = item.get("type")
    return kind if isinstance(kind, str) else ""


def _arguments(field: str, value: Any) -> Any:
    """Return the arguments of a call as chat completions take them; those of a chat unchanged."""
    if field == "arguments" or value is None:
        return value
    if isinstance(value, dict):
        value = {name: member for name, member in value.items() if member is not None}
    else:
        value = {CUSTOM_INPUT if field == "input" else field: value}
    return json.dumps(value)


def _outcome(part: Item) -> list[str]:
    """Return the exit code or time-out of a shell command that failed."""
    outcome = part.get("outcome")
    if not isinstance(outcome, dict) or outcome.get("exit_code") == 0:
        return []
    return [f"exit code {outcome['exit_code']}" if "exit_code" in outcome else "timeout"]


def _content(value: Any, where: str, image_paths: list[str] | None = None) -> str | list[Item]:
    """Return a text, or content parts: texts joined by line breaks, and images.

    image_paths: gets the paths of the images; None where they are refused.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        raise InvalidRequestError(
            f"{where} must be a string or a list of at most {MAX_PARTS} parts", "input"
        )
    pieces: list[str | Item] = []
    for index, part in enumerate(value):
        kind, path = part.get("type") if isinstance(part, dict) else None, f"{where}[{index}]"
        if kind == "input_image" and image_paths is not None:
            image_paths.append(path)
            pieces.append(read_input_image(part, path))
            continue
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            reason = no_text(kind, takes_images=image_paths is not None)
            raise InvalidRequestError(f"{path}: {reason}", "input")
        pieces.append(_string(part, field, path))
    texts = [piece for piece in pieces if isinstance(piece, str)]
    return "\n".join(texts) if len(texts) == len(pieces) else joined_content(pieces)


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be a string", "input")
    return _valid_text(value, f"{where}.{name}")


def _valid_text(value: str, where: str) -> str:
    if not is_encodable(value):
        raise InvalidRequestError(
            f"{where} holds half of a surrogate pair, which is no text", "input"
        )
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
                previous["content"] += _pieces(message["content"])
                continue
            role = "user"
        merged.append({**message, "role": role})
        if role in ("user", "tool"):
            merged[-1]["content"] = _pieces(message["content"])
    for message in merged:
        if message["role"] in ("user", "tool"):
            message["content"] = joined_content(message["content"])
    return merged


def _pieces(content: str | list[Item]) -> list[str | Item]:
    """Return the texts and images of a content."""
    if isinstance(content, str):
        return [content]
    return [part["text"] if part["type"] == "text" else part for part in content]
