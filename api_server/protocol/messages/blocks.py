"""The messages of /v1/messages, as messages of a chat.

    user        "weather?"                          user       "weather?"
    assistant   thinking "Paris, then"            ┐
                text "Let me look."               ├ assistant  reasoning, "Let me look.", tool_calls
                tool_use weather(…)               ┘
    user        tool_result "21 °C"                 tool       "21 °C"
                text "And tomorrow?"                user       "And tomorrow?"
    system      "40,000 tokens left"                system     where it stands

Owns that reading: which blocks belong in one message, and which have no place. Turns of the same
role in a row are one. Messages of the role system stay where they are, so that what was computed
for all before them is found again.

Some templates take neither such messages nor a user's words right after a tool's. For these the
conversation can be `folded`: then a later system message is the user's, and what follows the
result of a tool is a part of it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from api_server.protocol.fields import IgnoredFields, given_fields, not_shown
from proto.errors import InvalidRequestError, shown

Json = dict[str, Any]

ERROR_MARK: Final = "Error: "
"""What the result of a tool that failed begins with: templates have no other word for it."""
_PICTURES: Final = frozenset({"image", "document"})
_ROLES: Final = ("user", "assistant", "system")
_UNSEEN: Final = frozenset(
    {
        *("redacted_thinking", "server_tool_use", "web_search_tool_result", "mcp_tool_use"),
        *("web_fetch_tool_result", "code_execution_tool_result", "mcp_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result"),
        *("tool_search_tool_result", "container_upload", "compaction", "fallback"),
    }
)
"""Blocks that another server wrote for itself: nothing of them can be shown to the model."""
_BILLING: Final = re.compile(r"x-anthropic-billing-header:")
"""A block of the system prompt that is none. It differs from request to request, and nothing that
stands behind it could be found in a cache."""


def system_text(system: Any, ignored: IgnoredFields) -> str:
    """The system prompt, a text or blocks of it; empty for none. Raises InvalidRequestError."""
    if system is None or isinstance(system, str):
        return _text(system or "", "system")
    blocks = _blocks(system, "system")
    texts = [_text_of(block, f"system.{place}") for place, block in enumerate(blocks)]
    shown_texts = [text for text in texts if not _BILLING.match(text)]
    if len(shown_texts) < len(texts):
        ignored.add("system.x-anthropic-billing-header")
    return "\n\n".join(shown_texts)


class ChatMessages:
    """Messages of a chat, made of those of a request. folded: see above.

    places: of each message, the place in the request where it begins; -1 for the system prompt.
    """

    def __init__(self, system: str, ignored: IgnoredFields, *, folded: bool) -> None:
        self.messages: list[Json] = []
        self.places: list[int] = []
        self._ignored = ignored
        self._folded = folded
        self._place = -1
        if system:
            self._add({"role": "system", "content": system})

    def read(self, messages: Sequence[Json]) -> None:
        """Raises InvalidRequestError with the place of what is wrong."""
        for place, message in enumerate(messages):
            self._place = place
            where = f"messages.{place}"
            role = message.get("role")
            if role not in _ROLES:
                raise _wrong(f"{where}.role", "must be 'user', 'assistant' or 'system'")
            for name in message:
                if name not in ("role", "content"):
                    self._ignored.add(f"messages.{name}")
            content = message.get("content")
            if isinstance(content, str):
                blocks = [{"type": "text", "text": _text(content, f"{where}.content")}]
            else:
                blocks = _blocks(content, f"{where}.content")
            if role == "assistant":
                self._assistant(blocks, where)
            else:
                self._words(str(role), blocks, where)
        if messages and messages[-1].get("role") == "assistant":
            self._check_last(len(messages) - 1)

    @property
    def continues(self) -> bool:
        """The answer goes on with the last message."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def _check_last(self, place: int) -> None:
        if not self.continues or self.messages[-1].get("tool_calls"):
            raise _wrong(f"messages.{place}", "calls a tool, and its result does not follow")
        if not self.messages[-1]["content"].strip():
            raise _wrong(f"messages.{place}", "is the last, and has no text to go on with")

    def _assistant(self, blocks: list[Json], where: str) -> None:
        """One message: reasoning, text, calls."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            message = self.messages[-1]
        else:
            message = {"role": "assistant", "content": ""}
            self._add(message)
        for number, block in enumerate(blocks):
            place = f"{where}.content.{number}"
            kind = block["type"]
            if kind == "text":
                message["content"] += _text_of(block, place)
            elif kind == "thinking":
                thought = _string(block, "thinking", place)
                if thought:
                    message["reasoning"] = message.get("reasoning", "") + thought
            elif kind == "tool_use":
                message.setdefault("tool_calls", []).append(_call(block, place))
            else:
                self._pass_over(kind, place)

    def _words(self, role: str, blocks: list[Json], where: str) -> None:
        """Results of tools are messages of their own."""
        for number, block in enumerate(blocks):
            place = f"{where}.content.{number}"
            kind = block["type"]
            if kind == "text":
                self._say(role, _text_of(block, place))
            elif kind == "tool_result" and role == "user":
                content = self._result(block.get("content", ""), f"{place}.content")
                if block.get("is_error") is True and not content.startswith(ERROR_MARK):
                    content = ERROR_MARK + content
                call_id = _string(block, "tool_use_id", place)
                self._add({"role": "tool", "tool_call_id": call_id, "content": content})
            else:
                self._pass_over(kind, place)

    def _say(self, role: str, text: str) -> None:
        if self._folded and self.messages:
            role = "user" if self.messages[-1]["role"] != "tool" else "tool"
        if self.messages and self.messages[-1]["role"] == role:
            message = self.messages[-1]
            message["content"] = "\n".join(each for each in (message["content"], text) if each)
        else:
            self._add({"role": role, "content": text})

    def _result(self, content: Any, where: str) -> str:
        """A text, or the texts of blocks; names of tools that were found are their own text.

        Where the result is an image, a text says that it cannot be shown: a refusal would end
        the agent, which sends all it has again each time.
        """
        if content is None or isinstance(content, str):
            return _text(content or "", where)
        texts = []
        for number, block in enumerate(_blocks(content, where)):
            place = f"{where}.{number}"
            if block["type"] == "tool_reference":
                texts.append(_string(block, "tool_name", place))
            elif block["type"] in _PICTURES:
                self._ignored.add(f"messages.content.tool_result.{block['type']}")
                texts.append(not_shown(block["type"]))
            else:
                texts.append(_text_of(block, place))
        return "\n".join(texts)

    def _pass_over(self, kind: str, where: str) -> None:
        if kind not in _UNSEEN:
            raise _wrong(where, f"blocks of the type {shown(kind)} are not available here")
        self._ignored.add(f"messages.content.{kind}")

    def _add(self, message: Json) -> None:
        self.messages.append(message)
        self.places.append(self._place)


def _call(block: Json, where: str) -> Json:
    given = block.get("input", {})
    if not isinstance(given, dict):
        raise _wrong(f"{where}.input", "must be an object")
    arguments = json.dumps(given, ensure_ascii=False)
    _text(arguments, f"{where}.input")
    return {
        "id": _string(block, "id", where),
        "type": "function",
        "function": {"name": _string(block, "name", where), "arguments": arguments},
    }


def _blocks(value: Any, where: str) -> list[Json]:
    """Objects that have a type."""
    if not isinstance(value, list):
        raise _wrong(where, "must be a string or a list of blocks")
    for number, block in enumerate(value):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise _wrong(f"{where}.{number}", "must be an object with a type")
    return value


def _text_of(block: Mapping[str, Any], where: str) -> str:
    """Of a block that has to be text."""
    if block["type"] != "text":
        raise _wrong(where, f"takes text, not blocks of the type {shown(block['type'])}")
    return _string(block, "text", where)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "must be a string")
    return _text(value, f"{where}.{name}")


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(where, "holds half of a surrogate pair, which is no text") from None
    return value


def _wrong(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {what}", where)


# The tools of a request to /v1/messages, and the same in the words of a chat.
#
#   {name, description, input_schema}      {"type": "function", "function": {name, description, …}}
#     tool_choice auto, any, tool, none      auto, required, a function by its name, none
#     disable_parallel_tool_use              parallel_tool_calls


_TAKEN: Final = ("name", "description", "input_schema", "strict")
_WITHOUT_EFFECT: Final = frozenset(
    {"type", "cache_control", "eager_input_streaming", "defer_loading", "allowed_callers"}
)
"""How a tool is kept, streamed, or found by others than the model."""
_MODES: Final = {"auto": "auto", "any": "required", "none": "none"}
_CHOICE: Final = ("type", "name", "disable_parallel_tool_use")


class MessageTools:
    """What the model may call.

    tools, choice: as in the request. ignored: collects what is left out. Raises
    InvalidRequestError.
    """

    def __init__(self, tools: Sequence[Json], choice: Json | None, ignored: IgnoredFields) -> None:
        self._functions: list[Json] = []
        self.places: list[int] = []
        for place, tool in enumerate(tools):
            kind = tool.get("type")
            if kind not in (None, "custom"):
                ignored.add(f"tools.{kind}")
                continue
            self._functions.append(_function(tool, f"tools.{place}", ignored))
            self.places.append(place)
        self._choice, self._parallel = self._as_in_chat(choice or {"type": "auto"}, ignored)

    def chat_fields(self) -> Json:
        """The fields of a chat completion."""
        if not self._functions:
            return {}
        return {
            "tools": self._functions,
            "tool_choice": self._choice,
            "parallel_tool_calls": self._parallel,
        }

    def _as_in_chat(self, choice: Json, ignored: IgnoredFields) -> tuple[Any, bool]:
        kind = choice.get("type")
        given = given_fields(choice, _CHOICE, {}, ignored, "tool_choice.")
        once = given.get("disable_parallel_tool_use", False)
        if not isinstance(once, bool):
            raise InvalidRequestError(
                "tool_choice.disable_parallel_tool_use must be true or false", "tool_choice"
            )
        if kind in ("any", "tool") and not self._functions:
            raise InvalidRequestError(f"tool_choice {kind} needs tools", "tool_choice")
        if kind == "tool":
            name = given.get("name")
            if name not in [each["function"]["name"] for each in self._functions]:
                raise InvalidRequestError(
                    f"tool_choice: there is no tool {shown(name)} in tools", "tool_choice"
                )
            return {"type": "function", "function": {"name": name}}, not once
        if not isinstance(kind, str) or kind not in _MODES:
            raise InvalidRequestError(
                "tool_choice.type must be 'auto', 'any', 'tool' or 'none'", "tool_choice"
            )
        return _MODES[kind], not once


def _function(tool: Json, where: str, ignored: IgnoredFields) -> Json:
    rest = {name: value for name, value in tool.items() if name not in _WITHOUT_EFFECT}
    given = given_fields(rest, _TAKEN, {}, ignored, "tools.")
    if not isinstance(given.get("name"), str):
        raise InvalidRequestError(f"{where}.name must be a string", f"{where}.name")
    if not isinstance(given.get("input_schema"), dict):
        raise InvalidRequestError(
            f"{where}.input_schema must be a JSON schema of an object", f"{where}.input_schema"
        )
    given["parameters"] = given.pop("input_schema")
    return {"type": "function", "function": given}
