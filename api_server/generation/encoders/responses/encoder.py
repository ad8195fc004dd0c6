"""The encoder of /v1/responses, and the order of its stream events.

created ─ in_progress ─ items (see output_items.py), one after the other ─ completed
                                                                         ├ incomplete
                                                                         └ error ─ failed
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from api_server.errors import error_body, public_message
from api_server.generation.encoders.base import ResponseEncoder, ResponseOptions
from api_server.generation.encoders.responses.output_items import (
    CallItem,
    ContentTokens,
    EventBuffer,
    MessageItem,
    OutputItem,
    ReasoningItem,
    Status,
)
from api_server.generation.encoders.responses.stored import ResponseRecord
from api_server.generation.request_stream import Delta, Usage
from api_server.parsers.output import (
    ChoiceParser,
    ContentText,
    OutputPart,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from api_server.parsers.tools.call_parser import read_arguments
from api_server.protocol.responses.input import (
    SUMMARY_MARK,
    Item,
    is_message,
    listed_item,
    split_pending_calls,
    with_id,
)
from api_server.protocol.responses.request import ResponsesRequest, ResponsesTranslation
from api_server.text.logprobs import ChatLogprobs
from proto.errors import InternalRequestError, OverloadedError, RequestError

Json = dict[str, Any]
FinalStatus = Literal["completed", "incomplete", "cancelled", "failed"]
_FINAL_STATUS: Final[dict[str, tuple[FinalStatus, str | None]]] = {
    "length": ("incomplete", "max_output_tokens"),
    "abort": ("cancelled", None),
}
"""finish_reason → (status, reason of an incomplete response); every other one is completed."""
_PIECES_PER_TURN: Final = 256
"""Pieces of text that are added to a response before others get their turn, 10 µs each."""


class ResponsesEncoder(ResponseEncoder):
    """Encoder of /v1/responses, for the only choice of a request.

    translation: knows the client's tools and field names. record: stores the finished response;
    None if it is not stored. final_response: the finished response; None while it is generated.
    """

    def __init__(
        self,
        options: ResponseOptions,
        request: ResponsesRequest,
        parser: ChoiceParser,
        translation: ResponsesTranslation,
        record: ResponseRecord | None = None,
    ) -> None:
        self._options = options
        self._envelope = _envelope(options, request, is_stored=record is not None)
        self._envelope |= translation.ignored_fields()
        self._has_summary = request.returns_summary
        self._parser = parser
        self._translation = translation
        self.record = record
        self._closed_items: list[Json] = []
        self._open_item: OutputItem | None = None
        self._call_index = -1
        self._content_tokens = ContentTokens()
        self._finish_reason = ""
        self.final_response: Json | None = None
        self._events = EventBuffer()

    def encode_start(self) -> str | Iterator[str]:
        self._events.add_event("created", response=self.snapshot())
        self._events.add_event("in_progress", response=self.snapshot())
        return self._events.pop_events()

    def encode_delta(self, delta: Delta) -> str | Iterator[str]:
        self._add_delta(delta)
        return self._events.pop_events()

    def encode_end(self, usage: Usage) -> str | Iterator[str]:
        response = self._finish_response(usage)
        name = "completed" if response["status"] == "completed" else "incomplete"
        self._events.add_event(name, response=response)
        return self._events.pop_events()

    def encode_error(self, error: RequestError) -> str | Iterator[str]:
        self._close_item("incomplete")
        body = error_body(self.client_error(error))["error"]
        code, message, param = _error_code(error), body["message"], body["param"]
        details = {"type": body["type"], "code": code, "message": message, "param": param}
        self._events.add_unprefixed_event(
            "error", code=code, message=message, param=param, error=details
        )
        return self.encode_failure(error)

    def client_error(self, error: RequestError) -> RequestError:
        return self._translation.translate_error(error)

    def encode_failure(self, error: RequestError) -> str | Iterator[str]:
        """Return the last events of a failed response where an event `error` is not part of it."""
        self._close_item("incomplete")
        message = public_message(self.client_error(error))
        failure = {"code": _error_code(error), "message": message}
        response = self.snapshot("failed") | {"error": failure}
        self._save(response)
        self._events.add_event("failed", response=response)
        return self._events.pop_events()

    async def encode_body(self, deltas: Sequence[Delta], usage: Usage) -> Json:
        for delta in deltas:
            for number, _ in enumerate(self._read_delta(delta), start=1):
                if number % _PIECES_PER_TURN == 0:
                    self._events.clear()
                    await asyncio.sleep(0)
        return self._finish_response(usage)

    def snapshot(self, status: FinalStatus | Literal["in_progress"] = "in_progress") -> Json:
        """Return the response with all output so far."""
        output = list(self._closed_items)
        if self._open_item is not None:
            output.append(self._open_item.full_item("in_progress"))
        return self._envelope | {"status": status, "output": output}

    def _finish_response(self, usage: Usage) -> Json:
        status, reason = _FINAL_STATUS.get(self._finish_reason, ("completed", None))
        if self._open_item is None and not self._closed_items:
            self._replace_item(self._new_message(0))
        if isinstance(self._open_item, MessageItem):
            # the token that ended the choice has a log-probability but no text
            self._open_item.append_tokens(self._content_tokens.pop_last_tokens())
        self._close_item("completed" if status == "completed" else "incomplete")
        response = self.snapshot(status)
        if reason is not None:
            response["incomplete_details"] = {"reason": reason}
        if status == "completed":
            response["completed_at"] = int(time.time())
        response["usage"] = _usage_object(usage)
        self._save(response)
        return response

    def _save(self, response: Json) -> None:
        self.final_response = response
        if self.record is not None:
            self.record.save_response(response)

    def _add_delta(self, delta: Delta) -> None:
        for _ in self._read_delta(delta):
            pass

    def _read_delta(self, delta: Delta) -> Iterator[None]:
        """Add a delta; yields after each piece of its text."""
        for text in self._content_tokens.split_delta(delta):
            self._add_parts(self._parser.parse_delta(text, None, delta.num_certain))
            yield
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            parts = self._parser.parse_delta("", delta.finish_reason, delta.num_certain)
            self._add_parts(parts)

    def _add_parts(self, parts: Sequence[OutputPart]) -> None:
        for part in parts:
            self._add_part(part)

    def _add_part(self, part: OutputPart) -> None:
        item = self._open_item
        index = len(self._closed_items) + (item is not None)
        match part:
            case ContentText(text):
                if not isinstance(item, MessageItem):
                    item = self._new_message(index)
                    self._replace_item(item)
                item.append_content(text, self._content_tokens.pop_tokens(text))
            case ReasoningText(text):
                if not isinstance(item, ReasoningItem):
                    item = ReasoningItem(self._events, index, has_summary=self._has_summary)
                    self._replace_item(item)
                item.append_reasoning(text)
            case ToolCallStart(call_index, call_id, name):
                tool = self._translation.tools.client_tool(name)
                self._replace_item(CallItem(self._events, index, call_id, tool))
                self._call_index = call_index
            case ToolCallArguments(call_index, text):
                assert isinstance(item, CallItem)
                assert call_index == self._call_index, "calls come one after the other"
                item.append_arguments(text)

    def _replace_item(self, item: OutputItem) -> None:
        """Close the open item and open another."""
        self._close_item("completed")
        self._open_item = item
        item.open_item()

    def _close_item(self, status: Status) -> None:
        """Close the open item. A call with all its arguments is completed in any case."""
        item = self._open_item
        if item is None:
            return
        if isinstance(item, CallItem) and read_arguments(item.text):
            status = "completed"
        item.close_item(status)
        self._closed_items.append(item.full_item(status))
        self._open_item = None

    def _new_message(self, index: int) -> MessageItem:
        options = self._options
        make_logprobs = partial(
            ChatLogprobs, top=options.num_logprobs or 0, names=options.token_names
        )
        return MessageItem(self._events, index, make_logprobs)


class WarmupEncoder(ResponsesEncoder):
    """Encoder of a response without output, whose request only computes the KV of its prompt."""

    def _read_delta(self, delta: Delta) -> Iterator[None]:
        """Drop the output: the engine generates at least one token."""
        return iter(())

    def _finish_response(self, usage: Usage) -> Json:
        response = self.snapshot("completed") | {
            "completed_at": int(time.time()),
            "usage": _usage_object(replace(usage, completion_tokens=0, reasoning_tokens=0)),
        }
        self._save(response)
        return response


class CompactionEncoder(ResponsesEncoder):
    """Encoder of a compaction: the summary becomes an item of the window.

    items: of the conversation. max_characters: of the user's messages that stay.
    """

    def __init__(
        self,
        options: ResponseOptions,
        request: ResponsesRequest,
        parser: ChoiceParser,
        translation: ResponsesTranslation,
        record: ResponseRecord | None = None,
        *,
        items: Sequence[Item],
        max_characters: int,
    ) -> None:
        super().__init__(options, request, parser, translation, record)
        self._items = items
        self._max_characters = max_characters

    async def encode_body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        response = await super().encode_body(deltas, usage)
        summary = "".join(
            part["text"]
            for item in response["output"]
            if item["type"] == "message"
            for part in item["content"]
        ).strip()
        if not summary:
            raise InternalRequestError("the model wrote no summary; the conversation is unchanged")
        compaction = with_id({"type": "compaction", "encrypted_content": SUMMARY_MARK + summary})
        _, pending = split_pending_calls(self._items)
        window = [*_kept_messages(self._items, self._max_characters), compaction, *pending]
        return {
            "id": response["id"],
            "object": "response.compaction",
            "created_at": response["created_at"],
            "output": [listed_item(item) for item in window],
            "usage": response["usage"],
        }


def _kept_messages(items: Sequence[Item], max_characters: int) -> list[Item]:
    """Return the system's messages, and the newest of the user's up to a number of characters."""
    kept: list[Item] = []
    left = max_characters
    for item in reversed(items):
        if not is_message(item) or item["role"] == "assistant":
            continue
        if item["role"] == "user":
            left -= len(str(item["content"]))
            if left < 0:
                continue
        kept.append(item)
    return kept[::-1]


def _error_code(error: RequestError) -> str:
    """Return the code of the error in a response, one of the few that OpenAI defines."""
    return "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"


def _usage_object(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _envelope(options: ResponseOptions, request: ResponsesRequest, *, is_stored: bool) -> Json:
    """Return the fields that do not change while the response grows."""
    text: Json = {"format": {"type": "text"}, "verbosity": "medium"}
    if request.text is not None:
        text_format = request.text.format or text["format"]
        if text_format["type"] == "json_schema":
            text_format = {"description": None, "strict": False} | text_format
        text = {"format": text_format, "verbosity": request.text.verbosity or "medium"}
    reasoning: Json = {"effort": None, "summary": None}
    if request.reasoning is not None:
        summary = request.reasoning.summary or request.reasoning.generate_summary
        reasoning = {"effort": request.reasoning.effort, "summary": summary}
    return {
        "id": options.id,
        "object": "response",
        "created_at": options.created,
        "completed_at": None,
        "status": "in_progress",
        "background": request.background,
        "error": None,
        "frequency_penalty": request.frequency_penalty,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": dict(request.metadata),
        "model": options.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "presence_penalty": request.presence_penalty,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": reasoning,
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": request.temperature,
        "text": text,
        "tool_choice": request.tool_choice,
        "tools": [_complete_tool(tool) for tool in request.tools],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation,
        "usage": None,
        "user": request.user,
    }


def _complete_tool(tool: Json) -> Json:
    """Return a tool of the request; a function gets the fields that the request leaves out."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False} | tool
