"""The messages of /v1/messages, as messages of a chat.

    user        "weather?"                          user       "weather?"
    assistant   thinking "Paris, then"            ┐
                text "Let me look."               ├ assistant  reasoning, "Let me look.", tool_calls
                tool_use weather(…)               ┘
    user        tool_result "21 °C"                 tool       "21 °C"
                text "And tomorrow?"                user       "And tomorrow?"
    system      "40,000 tokens left"                system     in the same position

Blocks of other types have a text (documents, search results, a summary), or are passed over and
named: of tools of Anthropic's servers, of changes of the tools, of later versions of the API. An
agent sends its whole conversation again with each request, so an error would end it for good. A
model that reads no images gets a text in place of an image in a tool's result; others are refused.

Consecutive turns of one role become one message. System messages keep their position, so that the
cached prefix before them stays valid. Some templates accept neither these nor a user's message
right after a tool's; with `merge_roles`, a later system message becomes part of the user's, and
what follows a tool's result becomes part of the result.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from api_server.protocol.chat import MAX_PARTS
from api_server.protocol.fields import (
    IgnoredFields,
    is_encodable,
    is_media,
    media_placeholder,
    no_text,
)
from api_server.protocol.images import joined_content, read_image_block
from proto.errors import InvalidRequestError, shown

Json = dict[str, Any]

ERROR_PREFIX: Final = "Error: "
"""Prefix of the result of a tool that failed; templates have no other way to express it."""
_ROLES: Final = ("user", "assistant", "system")
_CLIENT_BLOCKS: Final = frozenset({"text", "thinking", "tool_use", "tool_result"})
"""Types of blocks that are refused in a message of the wrong role."""
_SUMMARY_TITLE: Final = "Summary of the conversation up to here:"
_BILLING_HEADER: Final = re.compile(r"x-anthropic-billing-header:")
"""A system block that is no instruction. It differs in each request, so it is dropped: it would
keep the text after it from being found in the prefix cache."""


def system_text(system: Any, ignored: IgnoredFields) -> str:
    """Return the system prompt, from a string or text blocks; "" for none.

    Raises InvalidRequestError.
    """
    if system is None or isinstance(system, str):
        return _text(system or "", "system")
    blocks = _blocks(system, "system")
    texts = [_block_text(block, f"system[{index}]") for index, block in enumerate(blocks)]
    kept_texts = [text for text in texts if not _BILLING_HEADER.match(text)]
    if len(kept_texts) < len(texts):
        ignored.add("system.x-anthropic-billing-header")
    return "\n\n".join(kept_texts)


class BlockTranslator:
    """Translates the messages of a request, which consist of blocks, into chat messages.

    merge_roles: see the top of this file. places: for each chat message, the path in the request of
    the message with which it starts, or of the system prompt. call_paths: of the arguments of each
    call, path in the request, by the indices of the chat message and of the call in it.
    image_paths: paths in the request of all images, in their order.
    """

    def __init__(self, system: str, ignored: IgnoredFields, *, merge_roles: bool) -> None:
        self.messages: list[Json] = []
        self.places: list[str] = []
        self.call_paths: dict[tuple[int, int], str] = {}
        self.image_paths: list[str] = []
        self._ignored = ignored
        self._merge_roles = merge_roles
        self._place = "system"
        self._role = ""
        self._passed_over: dict[str, None] = {}
        if system:
            self._append_message({"role": "system", "content": [system]})

    def append_messages(self, messages: Sequence[Json]) -> None:
        """Translate the messages; raise InvalidRequestError that names the invalid field."""
        for index, message in enumerate(messages):
            where = self._place = f"messages[{index}]"
            role = self._role = str(message.get("role"))
            if role not in _ROLES:
                raise _invalid(f"{where}.role", "must be 'user', 'assistant' or 'system'")
            for name in message:
                if name not in ("role", "content"):
                    self._ignored.add(f"messages.{name}")
            content = message.get("content")
            if isinstance(content, str):
                blocks = [{"type": "text", "text": _text(content, f"{where}.content")}]
            else:
                blocks = _blocks(content, f"{where}.content")
            if role == "assistant":
                self._append_assistant_blocks(blocks, where)
            else:
                self._append_other_blocks(role, blocks, where)
        for message in self.messages:
            _join_texts(message)
        if self._passed_over and {*self.places} <= {"system"}:
            kinds = ", ".join(self._passed_over)
            raise _invalid("messages", f"hold no text, only blocks of the type {kinds}")
        if self._role == "assistant":
            self._check_last_message(len(messages) - 1)

    @property
    def continues_last_message(self) -> bool:
        """The last message is the assistant's, so the answer continues it."""
        roles = [self._role, *(message["role"] for message in self.messages[-1:])]
        return roles == ["assistant", "assistant"]

    def _check_last_message(self, index: int) -> None:
        """Raise InvalidRequestError if an answer cannot continue the assistant's last message."""
        if not self.continues_last_message or self.messages[-1].get("tool_calls"):
            raise _invalid(f"messages[{index}]", "calls a tool, and its result does not follow")
        if not self.messages[-1]["content"].strip():
            raise _invalid(f"messages[{index}]", "is the last, and has no text to go on with")

    def _append_assistant_blocks(self, blocks: list[Json], where: str) -> None:
        """Add blocks to the assistant's message: reasoning, text and calls."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            message = self.messages[-1]
        else:
            message = {"role": "assistant", "content": []}
            self._append_message(message)
        for index, block in enumerate(blocks):
            path = f"{where}.content[{index}]"
            kind = block["type"]
            if kind == "text":
                message["content"].append(_block_text(block, path))
            elif kind == "thinking":
                reasoning = _string(block, "thinking", path)
                if reasoning:
                    message.setdefault("reasoning", []).append(reasoning)
            elif kind == "tool_use":
                calls = message.setdefault("tool_calls", [])
                self.call_paths[len(self.messages) - 1, len(calls)] = f"{path}.input"
                calls.append(_tool_call(block, path))
            else:
                text = self._readable_text(block, path)
                message["content"].append("" if text is None else f"{text}\n")

    def _append_other_blocks(self, role: str, blocks: list[Json], where: str) -> None:
        """Add blocks of user or system; each tool result is a message of its own."""
        for index, block in enumerate(blocks):
            path = f"{where}.content[{index}]"
            kind = block["type"]
            if kind == "tool_result" and role == "user":
                content = self._tool_result(block.get("content", ""), f"{path}.content")
                if block.get("is_error") is True:
                    content = _with_error_prefix(content)
                call_id = _string(block, "tool_use_id", path)
                message = {"role": "tool", "tool_call_id": call_id, "content": content}
                self._append_message(message)
            elif kind == "image" and role == "user" and self._ignored.takes_images:
                self._append_piece(role, self._image(block, path))
            elif (text := self._readable_text(block, path)) is not None:
                self._append_piece(role, text)

    def _append_piece(self, role: str, piece: str | Json) -> None:
        """Add a text or an image to the last message, or as a new one."""
        if self._merge_roles and self.messages:
            role = "user" if self.messages[-1]["role"] != "tool" else "tool"
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"].append(piece)
        else:
            self._append_message({"role": role, "content": [piece]})

    def _image(self, block: Json, where: str) -> Json:
        self.image_paths.append(f"{where}.source")
        return read_image_block(block, where)

    def _tool_result(self, content: Any, where: str) -> list[str | Json]:
        """Return a tool's result as texts and images.

        A text replaces documents, and images if the model reads none: an error would end the agent
        for good, because it sends the whole conversation again each time.
        """
        if content is None or isinstance(content, str):
            return [_text(content or "", where)]
        pieces: list[str | Json] = []
        for index, block in enumerate(_blocks(content, where)):
            path = f"{where}[{index}]"
            if block["type"] == "image" and self._ignored.takes_images:
                pieces.append(self._image(block, path))
            elif (text := self._readable_text(block, path, in_result=True)) is not None:
                pieces.append(text)
        texts = [piece for piece in pieces if isinstance(piece, str)]
        return pieces if len(texts) < len(pieces) else ["\n".join(texts)]

    def _readable_text(self, block: Json, where: str, *, in_result: bool = False) -> str | None:
        """Return the text of a block, None for one that is passed over.

        in_result: the block is part of a tool's result. Raises InvalidRequestError.
        """
        kind, name = block["type"], "messages.content."
        if in_result:
            name += "tool_result."
        if kind == "text":
            return _string(block, "text", where)
        if kind == "tool_reference" and in_result:
            return _string(block, "tool_name", where)
        texts = _other_texts(block)
        if texts:
            return _text("\n".join(texts), where)
        if kind in _CLIENT_BLOCKS and not in_result:
            raise _invalid(where, f"blocks of the type {kind} are not available here")
        if is_media(kind) and not in_result:
            raise _invalid(where, no_text(kind, takes_images=self._ignored.takes_images))
        self._ignored.add(f"{name}{kind}")
        self._passed_over[shown(kind)] = None
        return media_placeholder(kind) if is_media(kind) else None

    def _append_message(self, message: Json) -> None:
        self.messages.append(message)
        self.places.append(self._place)


def _join_texts(message: Json) -> None:
    """Join the texts of a message, once: a text that grows is copied again and again."""
    if message["role"] == "assistant":
        message["content"] = "".join(message["content"])
        if "reasoning" in message:
            message["reasoning"] = "".join(message["reasoning"])
    else:
        message["content"] = joined_content(message["content"])


def _with_error_prefix(pieces: list[str | Json]) -> list[str | Json]:
    """Return the result of a tool that failed, which begins by saying so."""
    first = pieces[0] if pieces else ""
    if not isinstance(first, str):
        return [ERROR_PREFIX.rstrip(), *pieces]
    return pieces if first.startswith(ERROR_PREFIX) else [ERROR_PREFIX + first, *pieces[1:]]


def _tool_call(block: Json, where: str) -> Json:
    given = block.get("input")
    arguments = given if isinstance(given, str) else json.dumps({} if given is None else given)
    return {
        "id": _string(block, "id", where),
        "type": "function",
        "function": {"name": _string(block, "name", where), "arguments": arguments},
    }


def _other_texts(block: Json) -> list[str]:
    """Return the texts of a document, a search result or a summary; none for other blocks."""
    kind, content = block["type"], block.get("content")
    if kind == "compaction" and isinstance(content, str):
        return [f"{_SUMMARY_TITLE}\n{content}"]
    if kind == "document" and isinstance(source := block.get("source"), dict):
        content = source.get("data" if source.get("type") == "text" else "content")
    elif kind != "search_result":
        return []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [
        part["text"] if isinstance(part.get("text"), str) else media_placeholder(str(part["type"]))
        for part in (parts if isinstance(parts, list) else [])
        if isinstance(part, dict) and "type" in part
    ]
    heads = [block.get(name) for name in ("title", "source", "context")]
    return [*(head for head in heads if isinstance(head, str)), *texts] if texts else []


def _blocks(value: Any, where: str) -> list[Json]:
    """Return content blocks; raise InvalidRequestError unless each is an object with a type."""
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        raise _invalid(where, f"must be a string or a list of at most {MAX_PARTS} blocks")
    for index, block in enumerate(value):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise _invalid(f"{where}[{index}]", "must be an object with a type")
    return value


def _block_text(block: Mapping[str, Any], where: str) -> str:
    """Return the text of a block; raise InvalidRequestError if it is no text block."""
    if block["type"] != "text":
        raise _invalid(where, no_text(block["type"]))
    return _string(block, "text", where)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{where}.{name}", "must be a string")
    return _text(value, f"{where}.{name}")


def _text(value: str, where: str) -> str:
    """Return a text; raise InvalidRequestError if it cannot be encoded as UTF-8."""
    if not is_encodable(value):
        raise _invalid(where, "holds half of a surrogate pair, which is no text")
    return value


def _invalid(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {what}", where)
