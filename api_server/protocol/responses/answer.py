"""Answers of /v1/responses: the whole object, and the events of a stream.

    created ─ in_progress ─ items (see response_output), one after the other ─ completed
                                                                             ├ incomplete
                                                                             └ error ─ failed

Owns the order of events.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from api_server.errors import error_body
from api_server.parsers.parts import (
    CallArguments,
    CallBegins,
    Content,
    Part,
    PartsParser,
    Reasoning,
)
from api_server.protocol.answers import KEEP_ALIVE_COMMENT, Shape
from api_server.protocol.responses.items import Item
from api_server.protocol.responses.output import (
    CallItem,
    EventLog,
    MessageItem,
    OutputItem,
    ReasoningItem,
    Status,
    TokensOfText,
    call_item,
)
from api_server.protocol.responses.request import ResponsesRequest, in_client_names
from api_server.protocol.responses.tools import OfferedTools
from api_server.request_stream import Delta, Usage
from api_server.text.logprobs import TextToken, chat_logprobs
from proto.errors import InvalidRequestError, OverloadedError, RequestError

Json = dict[str, Any]
End = Literal["completed", "incomplete", "cancelled", "failed"]
_ENDS: Final[dict[str, tuple[End, str | None]]] = {
    "length": ("incomplete", "max_output_tokens"),
    "abort": ("cancelled", None),
}
"""finish_reason → status and the reason why it is incomplete; all others are completed."""


class ResponsesAnswer:
    """An answer that grows by deltas of one choice. Implements `Answer`.

    request: as the client put it. parser: for the text. tools: what the model could call.
    ended: is called with the whole response at the end.
    """

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(
        self,
        shape: Shape,
        request: ResponsesRequest,
        parser: PartsParser,
        tools: OfferedTools,
        ended: Callable[[Json], None],
    ) -> None:
        self._shape = shape
        self._frame = _frame(shape, request)
        self._summarised = request.wants_summary
        self._parser = parser
        self._tools = tools
        self._ended = ended
        self._items: list[OutputItem] = []
        self._over: list[Json] = []
        self._open: MessageItem | ReasoningItem | CallItem | None = None
        self._call = -1
        self._tokens = TokensOfText()
        self._finish_reason = ""
        self._log = EventLog()

    def begin(self) -> str:
        for name in ("created", "in_progress"):
            self._log.tell(name, response=self.so_far())
        return self._log.take()

    def chunk(self, delta: Delta) -> str:
        self._feed(delta)
        return self._log.take()

    def end(self, usage: Usage) -> str:
        response = self._end(usage)
        name = "completed" if response["status"] == "completed" else "incomplete"
        self._log.tell(name, response=response)
        return self._log.take()

    def failure(self, error: RequestError) -> str:
        if isinstance(error, InvalidRequestError):
            error = in_client_names(error, self._tools)
        body = error_body(error)["error"]
        code = "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"
        message, param = body["message"], body["param"]
        self._close("incomplete")
        response = self._response("failed") | {"error": {"code": code, "message": message}}
        self._ended(response)
        self._log.tell_as("error", code=code, message=message, param=param)
        self._log.tell("failed", response=response)
        return self._log.take()

    def body(self, deltas: Sequence[Delta], usage: Usage) -> Json:
        for delta in deltas:
            self._feed(delta)
        return self._end(usage)

    def so_far(self, status: Literal["in_progress", "cancelled"] = "in_progress") -> Json:
        """The response with what there is of it by now."""
        return self._response(status)

    def _end(self, usage: Usage) -> Json:
        status, reason = _ENDS.get(self._finish_reason, ("completed", None))
        if self._open is None and not self._items:
            self._enter(MessageItem(self._log, 0))
        if isinstance(self._open, MessageItem):
            # of a token that ended it, without text
            self._open.add_logprobs(self._logprobs(self._tokens.rest()))
        self._close("completed" if status == "completed" else "incomplete")
        response = self._response(status)
        if reason is not None:
            response["incomplete_details"] = {"reason": reason}
        if status == "completed":
            response["completed_at"] = int(time.time())
        response["usage"] = _usage(usage)
        self._ended(response)
        return response

    def _feed(self, delta: Delta) -> None:
        """Take in what the choice gained."""
        for piece in self._tokens.pieces(delta):
            for part in self._parser.feed(piece):
                self._take(part)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            for part in self._parser.end():
                self._take(part)

    def _take(self, part: Part) -> None:
        match part:
            case Content(text):
                if not isinstance(self._open, MessageItem):
                    self._enter(MessageItem(self._log, len(self._items)))
                assert isinstance(self._open, MessageItem)
                self._open.add(text, self._logprobs(self._tokens.of_content(text)))
            case Reasoning(text):
                if not isinstance(self._open, ReasoningItem):
                    place, summarised = len(self._items), self._summarised
                    self._enter(ReasoningItem(self._log, place, summarised=summarised))
                assert isinstance(self._open, ReasoningItem)
                self._open.add(text)
            case CallBegins(index, call_id, name):
                tool = self._tools.tool_of(name)
                self._enter(call_item(self._log, len(self._items), call_id, tool))
                self._call = index
            case CallArguments(index, text):
                assert not isinstance(self._open, MessageItem | ReasoningItem | None)
                assert index == self._call, "calls come one after the other"
                self._open.add(text)

    def _enter(self, item: MessageItem | ReasoningItem | CallItem) -> None:
        """The next item; the one before is complete."""
        self._close("completed")
        self._open = item
        self._items.append(item)
        item.open()

    def _close(self, status: Status) -> None:
        if self._open is not None:
            self._open.close(status)
            self._over.append(self._open.json(status))
            self._open = None

    def _logprobs(self, tokens: list[TextToken]) -> list[Json]:
        """None if they were not requested."""
        shape = self._shape
        if shape.top is None:
            return []
        content: list[Json] = chat_logprobs(tokens, shape.top, shape.names)["content"]
        return content

    def _response(self, status: End | Literal["in_progress"]) -> Json:
        output = list(self._over)
        if self._open is not None:
            output.append(self._open.json("in_progress"))
        return self._frame | {"status": status, "output": output}


def _usage(usage: Usage) -> Json:
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


def _frame(shape: Shape, request: ResponsesRequest) -> Json:
    """What does not change while the response grows."""
    text: Json = {"format": {"type": "text"}}
    if request.text is not None and request.text.format is not None:
        text = {"format": request.text.format}
    reasoning: Json = {"effort": None, "summary": None}
    if request.reasoning is not None:
        summary = request.reasoning.summary or request.reasoning.generate_summary
        reasoning = {"effort": request.reasoning.effort, "summary": summary}
    return {
        "id": shape.id,
        "object": "response",
        "created_at": shape.created,
        "completed_at": None,
        "status": "in_progress",
        "background": request.background,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": dict(request.metadata),
        "model": shape.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "reasoning": reasoning,
        "service_tier": "default",
        "store": request.store,
        "temperature": request.temperature,
        "text": text,
        "tool_choice": request.tool_choice,
        "tools": request.tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation,
        "usage": None,
    }


def conversation_after(items: Sequence[Item], response: Json) -> list[Item]:
    """The items that a next turn goes on from."""
    return [*items, *response["output"]]
