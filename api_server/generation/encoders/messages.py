"""The encoder of /v1/messages, and the order of its stream events.

    message_start ─ blocks, one after the other ─ message_delta ─ message_stop
                      │                         └ error
                      └ content_block_start ─ content_block_delta … ─ content_block_stop

An event that only adds text is assembled from strings that are prepared once per block. The output
is ASCII, so that no Unicode line separator can split an event.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from api_server.errors import message_error_body, public_message
from api_server.generation.encoders.base import ResponseEncoder, ResponseOptions, json_string
from api_server.generation.request_stream import Delta, Usage
from api_server.parsers.output import (
    ChoiceParser,
    ContentText,
    OutputPart,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from api_server.protocol.messages.request import (
    MessagesRequest,
    MessagesTranslation,
    shows_reasoning,
)
from proto.errors import RequestError

Json = dict[str, Any]

PING: Final = 'event: ping\ndata: {"type": "ping"}\n\n'
UNSIGNED: Final = "unsigned"
"""Signature of reasoning blocks. Clients send only signed ones back; this server checks none."""
_DELTA_TYPES: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block → (type of its deltas, field with the text of a delta)."""


class MessageEncoder(ResponseEncoder):
    """Encoder of /v1/messages, for the only choice of a request.

    num_prompt_tokens: sent before the number of cached tokens is known. translation: gives errors
    the field names of this API.
    """

    keep_alive = PING

    def __init__(
        self,
        options: ResponseOptions,
        request: MessagesRequest,
        parser: ChoiceParser,
        translation: MessagesTranslation,
        num_prompt_tokens: int,
    ) -> None:
        self._message_id = options.id
        self._model = options.model
        self._parser = parser
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = request.max_tokens  # the context may leave fewer
        self._shows_reasoning = shows_reasoning(request)  # otherwise its blocks are empty
        self._translation = translation
        self._blocks: list[_Block] = []
        self._is_block_open = False
        self._call_index = -1
        self._last_delta = Delta(0, "", [], [], 0)
        self._events: list[str] = []

    def encode_start(self) -> str:
        usage = _usage_object(Usage(self._num_prompt_tokens, 0))
        message = self._message([], None, None, usage)
        return _event("message_start", message=message)

    def encode_delta(self, delta: Delta) -> str:
        if self._is_block_open and self._parser.is_plain and delta.finish_reason is None:
            return self._blocks[-1].append_text(delta.text) if delta.text else ""
        self._add_delta(delta)
        return self._pop_events()

    def encode_end(self, usage: Usage) -> str:
        self._close_block()
        stop_reason, stop_sequence = self._stop_fields()
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        self._events.append(_event("message_delta", delta=delta, usage=_usage_object(usage)))
        self._events.append(_event("message_stop"))
        return self._pop_events()

    def encode_error(self, error: RequestError) -> str:
        error = self.client_error(error)
        body = message_error_body(error.status, public_message(error), self._message_id)
        return f"event: error\ndata: {json.dumps(body)}\n\n"

    def client_error(self, error: RequestError) -> RequestError:
        return self._translation.translate_error(error)

    async def encode_body(self, deltas: Sequence[Delta], usage: Usage) -> Json:
        for delta in deltas:
            self._add_delta(delta)
        self._close_block()
        content = [block.full_block() for block in self._blocks]
        return self._message(content, *self._stop_fields(), _usage_object(usage))

    def _add_delta(self, delta: Delta) -> None:
        self._last_delta = delta
        parts = self._parser.parse_delta(delta.text, delta.finish_reason, delta.num_certain)
        for part in parts:
            self._add_part(part)

    def _add_part(self, part: OutputPart) -> None:
        match part:
            case ContentText(text):
                self._ensure_block("text", {"text": ""})
                self._append_text(text)
            case ReasoningText(text):
                self._ensure_block("thinking", {"thinking": "", "signature": ""})
                self._append_text(text if self._shows_reasoning else "")
            case ToolCallStart(index, call_id, name):
                self._open_block("tool_use", {"id": call_id, "name": name, "input": {}})
                self._call_index = index
            case ToolCallArguments(index, text):
                assert index == self._call_index, "calls come one after the other"
                self._append_text(text)

    def _ensure_block(self, block_type: str, fields: Json) -> None:
        """Open a block of this type unless the open block already is of this type."""
        if not self._is_block_open or self._blocks[-1].type != block_type:
            self._open_block(block_type, fields)

    def _open_block(self, block_type: str, fields: Json) -> None:
        """Close the open block and open another."""
        self._close_block()
        block = _Block(block_type, len(self._blocks), fields)
        self._is_block_open = True
        self._blocks.append(block)
        self._events.append(block.start_event())

    def _append_text(self, text: str) -> None:
        if text:
            self._events.append(self._blocks[-1].append_text(text))

    def _close_block(self) -> None:
        if self._is_block_open:
            self._events.append(self._blocks[-1].stop_events())
            self._is_block_open = False

    def _pop_events(self) -> str:
        events = "".join(self._events)
        self._events.clear()
        return events

    def _stop_fields(self) -> tuple[str, str | None]:
        """Return (stop_reason, stop_sequence)."""
        last = self._last_delta
        if last.finish_reason == "length":
            is_context_full = last.num_tokens < self._max_tokens
            return ("model_context_window_exceeded" if is_context_full else "max_tokens"), None
        if last.finish_reason == "abort":
            return "pause_turn", None
        if last.finish_reason == "stop" and isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        return ("tool_use" if self._parser.has_tool_calls else "end_turn"), None

    def _message(
        self, content: list[Json], stop_reason: str | None, stop_sequence: str | None, usage: Json
    ) -> Json:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
            **self._translation.ignored_fields(),
        }


class _Block:
    """One content block. fields: its fields at the start, without its type."""

    def __init__(self, block_type: str, index: int, fields: Json) -> None:
        self.type = block_type
        self._index = index
        self._fields = fields
        self._texts: list[str] = []
        delta_type, field = _DELTA_TYPES[block_type]
        delta = {"type": delta_type, field: ""}
        event = _event("content_block_delta", index=index, delta=delta)
        self._before, self._after = event[: event.rindex('""')], event[event.rindex('""') + 2 :]

    def start_event(self) -> str:
        block = {"type": self.type, **self._fields}
        return _event("content_block_start", index=self._index, content_block=block)

    def append_text(self, text: str) -> str:
        self._texts.append(text)
        return f"{self._before}{json_string(text)}{self._after}"

    def stop_events(self) -> str:
        """Return the last events of the block; a reasoning block receives its signature."""
        signature = ""
        if self.type == "thinking":
            delta = {"type": "signature_delta", "signature": UNSIGNED}
            signature = _event("content_block_delta", index=self._index, delta=delta)
        return signature + _event("content_block_stop", index=self._index)

    def full_block(self) -> Json:
        text = "".join(self._texts)
        if self.type == "text":
            return {"type": "text", "text": text}
        if self.type == "thinking":
            return {"type": "thinking", "thinking": text, "signature": UNSIGNED}
        return {"type": "tool_use", **self._fields, "input": _input_object(text)}


def _input_object(arguments: str) -> Json:
    """Return the arguments of a call; {} if they were cut off and are not valid JSON."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _usage_object(usage: Usage) -> Json:
    """Return the `usage` of a message, where input_tokens excludes cached tokens."""
    body: Json = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        body["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return body


def _event(name: str, /, **fields: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n"
