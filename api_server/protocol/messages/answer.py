"""Answers of /v1/messages: the whole message, and the events of a stream.

    message_start ─ blocks, one after the other ─ message_delta ─ message_stop
                      │                         └ error
                      └ content_block_start ─ content_block_delta … ─ content_block_stop

Owns the order of events and their words. A delta that only adds text is put together from pieces
prepared once per block. Output is ASCII: no line separator of Unicode can split an event.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from api_server.errors import message_error_body, public_message
from api_server.parsers.parts import (
    PLAIN_TEXT,
    CallArguments,
    CallBegins,
    Content,
    Part,
    PartsParser,
    Reasoning,
)
from api_server.request_stream import Delta, Usage
from proto.errors import RequestError

Json = dict[str, Any]

PING: Final = 'event: ping\ndata: {"type": "ping"}\n\n'
SIGNATURE: Final = "unsigned"
"""Of thoughts: clients send only those back that have one. Nothing is signed, nothing checked."""
_encode_string = json.encoder.encode_basestring_ascii
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block → type of its deltas, and their field."""


class MessageAnswer:
    """An answer that grows by deltas of one choice. Implements `Answer`.

    name: the id. num_prompt_tokens: sent before the number of cached tokens is known.
    max_tokens: as requested, which may be more than the context leaves.
    shows_thoughts: otherwise their blocks are empty.
    in_client_names: an error with the names that the client knows.
    """

    keep_alive = PING

    def __init__(
        self,
        name: str,
        model: str,
        parser: PartsParser,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        shows_thoughts: bool,
        in_client_names: Callable[[RequestError], RequestError],
    ) -> None:
        self._name = name
        self._model = model
        self._parser = parser
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = max_tokens
        self._shows_thoughts = shows_thoughts
        self._reworded = in_client_names
        self._blocks: list[_Block] = []
        self._open = False
        self._call = -1
        self._last = Delta(0, "", [], [], 0)
        self._events: list[str] = []

    def begin(self) -> str:
        usage = _usage(Usage(self._num_prompt_tokens, 0))
        message = self._message([], None, None, usage)
        return _event("message_start", message=message)

    def chunk(self, delta: Delta) -> str:
        if self._open and self._parser is PLAIN_TEXT and delta.finish_reason is None:
            return self._blocks[-1].grow(delta.text) if delta.text else ""
        self._feed(delta)
        events = "".join(self._events)
        self._events.clear()
        return events

    def end(self, usage: Usage) -> str:
        self._close()
        reason, sequence = self._stop()
        self._tell(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=_usage(usage),
        )
        self._tell("message_stop")
        return "".join(self._events)

    def failure(self, error: RequestError) -> str:
        error = self._reworded(error)
        body = message_error_body(error.status, public_message(error), self._name)
        return f"event: error\ndata: {json.dumps(body)}\n\n"

    def body(self, deltas: Sequence[Delta], usage: Usage) -> Json:
        for delta in deltas:
            self._feed(delta)
        self._close()
        content = [block.json() for block in self._blocks]
        return self._message(content, *self._stop(), _usage(usage))

    def _feed(self, delta: Delta) -> None:
        """Take in what the choice gained."""
        self._last = delta
        parts = list(self._parser.feed(delta.text))
        if delta.finish_reason is not None:
            parts += self._parser.end()
        for part in parts:
            self._take(part)

    def _take(self, part: Part) -> None:
        match part:
            case Content(text):
                self._enter_text("text")
                self._grow(text)
            case Reasoning(text):
                self._enter_text("thinking")
                self._grow(text if self._shows_thoughts else "")
            case CallBegins(index, call_id, name):
                fields = {"id": call_id, "name": name, "input": {}}
                self._enter(_Block("tool_use", len(self._blocks), fields))
                self._call = index
            case CallArguments(index, text):
                assert index == self._call, "calls come one after the other"
                self._grow(text)

    def _enter_text(self, kind: str) -> None:
        """Text of this kind comes: into the block that is open, if it is of that kind."""
        if not self._open or self._blocks[-1].kind != kind:
            fields = {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
            self._enter(_Block(kind, len(self._blocks), fields))

    def _enter(self, block: "_Block") -> None:
        """The next block; the one before is complete."""
        self._close()
        self._open = True
        self._blocks.append(block)
        self._events.append(block.start())

    def _grow(self, text: str) -> None:
        if text:
            self._events.append(self._blocks[-1].grow(text))

    def _close(self) -> None:
        if self._open:
            self._events.append(self._blocks[-1].stop())
            self._open = False

    def _stop(self) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        last = self._last
        if last.finish_reason == "length":
            is_full = last.num_tokens < self._max_tokens
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        if last.finish_reason == "abort":
            return "pause_turn", None
        if last.finish_reason == "stop" and isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        calls = any(block.kind == "tool_use" for block in self._blocks)
        return ("tool_use" if calls else "end_turn"), None

    def _message(
        self, content: list[Json], reason: str | None, sequence: str | None, usage: Json
    ) -> Json:
        return {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _tell(self, name: str, /, **fields: Any) -> None:
        self._events.append(_event(name, **fields))


class _Block:
    """One block of the answer. fields: with which it begins, beside its type."""

    def __init__(self, kind: str, index: int, fields: Json) -> None:
        self.kind = kind
        self._index = index
        self._fields = fields
        self._texts: list[str] = []
        delta_type, field = _DELTAS[kind]
        delta = {"type": delta_type, field: ""}
        event = _event("content_block_delta", index=index, delta=delta)
        self._head, self._tail = event[: event.rindex('""')], event[event.rindex('""') + 2 :]

    def start(self) -> str:
        block = {"type": self.kind, **self._fields}
        return _event("content_block_start", index=self._index, content_block=block)

    def grow(self, text: str) -> str:
        """Return the event of more text."""
        self._texts.append(text)
        return f"{self._head}{_encode_string(text)}{self._tail}"

    def stop(self) -> str:
        """Thoughts are signed at their end."""
        signature = ""
        if self.kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signature = _event("content_block_delta", index=self._index, delta=delta)
        return signature + _event("content_block_stop", index=self._index)

    def json(self) -> Json:
        """All of it."""
        text = "".join(self._texts)
        if self.kind == "text":
            return {"type": "text", "text": text}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
        return {"type": "tool_use", **self._fields, "input": _arguments(text)}


def _arguments(text: str) -> Json:
    """Of a call; of one that was cut short what cannot be read is nothing."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}


def _usage(usage: Usage) -> Json:
    """input_tokens are those that were not found in a cache."""
    counts: Json = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def _event(name: str, /, **fields: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n"
