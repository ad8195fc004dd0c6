"""Answers of /v1/chat/completions, as OpenAI shapes them: content, reasoning and tool calls.

Owns the words for the parts that a parser finds in the text of a choice. A chunk that only adds
content, of an answer that is nothing else, is put together from pieces prepared per request.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from api_server.outputs.choice import Delta
from api_server.outputs.generation import Usage
from api_server.outputs.logprobs import chat_logprobs
from api_server.outputs.parts import (
    PLAIN_TEXT,
    CallArguments,
    CallBegins,
    Content,
    Part,
    PartsParser,
    Reasoning,
)
from api_server.outputs.request_stream import RequestStream
from api_server.protocol.answers import (
    HOLE,
    OpenAIStream,
    Shape,
    around,
    at_end,
    encode_string,
    event_of,
    transfer_params,
    usage_object,
    with_usage,
)

TOOL_CALLS: Final = "tool_calls"
"""The finish_reason of a choice that ended by itself and calls a tool."""


class ChatAnswer(OpenAIStream):
    """Shapes of /v1/chat/completions.

    prompt_text: None is not shown. make_parser: of the text of one choice.
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        shape: Shape,
        stream: RequestStream,
        prompt_text: str | None,
        make_parser: Callable[[], PartsParser] = lambda: PLAIN_TEXT,
    ) -> None:
        super().__init__(shape, self.chunk_kind)
        self._stream = stream
        self._prompt = {} if prompt_text is None else {"prompt_text": prompt_text}
        self._make_parser = make_parser
        self._readers: dict[int, _Reader] = {}
        self._head, self._tail = around(
            {
                **shape.envelope(self.chunk_kind),
                "choices": [{"index": HOLE, "delta": {"content": HOLE}, "logprobs": None}],
            },
            '"finish_reason": null',
        )

    def chunk(self, delta: Delta) -> str:
        index = delta.index
        opening = "" if index in self._readers else self._opening(index)
        reader = self._readers[index]
        if self._shape.plain and delta.finish_reason is None:
            if reader.is_plain:
                head, text = self._head, encode_string(delta.text)
                return f"{opening}{head[0]}{index}{head[1]}{text}{self._tail}"
            parts = reader.read(delta)
            return opening + self._parts_event(delta, parts) if parts else opening
        return opening + self._parts_event(delta, reader.read(delta))

    def body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = []
        for delta in deltas:
            reader = _Reader(self._make_parser())
            message = whole_message(reader.read(delta))
            choices.append(
                {"index": delta.index, "message": message} | self._rest(delta, reader.has_calls)
            )
        body = self._shape.envelope(self.kind) | {
            "choices": choices,
            "usage": usage_object(usage),
            **transfer_params([self._stream]),
        }
        body["prompt_logprobs"] = self._shape.prompt_logprobs(self._stream)
        if self._shape.token_ids:
            body["prompt_token_ids"] = list(self._stream.prompt_token_ids)
        return body | self._prompt

    def _opening(self, index: int) -> str:
        """The chunk that tells the role; the first of all has the prompt's ids too."""
        first = not self._readers
        self._readers[index] = _Reader(self._make_parser())
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        event = self._shape.envelope(self.chunk_kind) | {"choices": [choice]}
        if self._shape.token_ids and first:
            event["prompt_token_ids"] = list(self._stream.prompt_token_ids)
        if first:
            event |= self._prompt
        nothing = Delta(index, "", [], [], 0)
        return event_of(with_usage(event, self._shape, self._stream, nothing))

    def _parts_event(self, delta: Delta, parts: Sequence[Part]) -> str:
        has_calls = self._readers[delta.index].has_calls
        choice = {"index": delta.index, "delta": delta_fields(parts)}
        choice |= self._rest(delta, has_calls)
        event = self._shape.envelope(self.chunk_kind) | {"choices": [choice]}
        event = with_usage(event, self._shape, self._stream, delta)
        return event_of(event | at_end(delta, [self._stream]))

    def _rest(self, delta: Delta, has_calls: bool) -> dict[str, Any]:
        shape = self._shape
        logprobs = None
        if shape.top is not None:
            logprobs = chat_logprobs(delta.tokens, shape.top, shape.names)
        reason = delta.finish_reason
        if has_calls and reason == "stop":
            reason = TOOL_CALLS
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            rest["stop_reason"] = delta.stop_reason
        if shape.token_ids:
            rest["token_ids"] = delta.token_ids
        return rest


class _Reader:
    """A choice on its way into parts."""

    def __init__(self, parser: PartsParser) -> None:
        self._parser = parser
        self.is_plain = parser is PLAIN_TEXT
        self.has_calls = False

    def read(self, delta: Delta) -> list[Part]:
        parts = [*self._parser.feed(delta.text)]
        if delta.finish_reason is not None:
            parts += self._parser.end()
        self.has_calls = self.has_calls or any(isinstance(each, CallBegins) for each in parts)
        return parts


def delta_fields(parts: Sequence[Part]) -> dict[str, Any]:
    """The `delta` of a chunk that tells these parts."""
    fields = _texts(parts)
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallBegins):
            calls.append({"index": part.index, **_call(part.call_id, part.name, "")})
        elif isinstance(part, CallArguments):
            if not calls or calls[-1]["index"] != part.index:
                calls.append({"index": part.index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += part.text
    return fields | {"tool_calls": calls} if calls else fields


def whole_message(parts: Iterable[Part]) -> dict[str, Any]:
    """The `message` of an answer that has these parts."""
    parts = list(parts)
    texts = _texts(parts)
    begins = {part.index: part for part in parts if isinstance(part, CallBegins)}
    arguments: dict[int, list[str]] = {index: [] for index in begins}
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index].append(part.text)
    calls = [
        _call(begun.call_id, begun.name, "".join(arguments[index]))
        for index, begun in begins.items()
    ]
    content = texts.get("content", None if calls or texts else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if "reasoning" in texts:
        message["reasoning"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(parts: Iterable[Part]) -> dict[str, Any]:
    """content and reasoning, where there is any."""
    found: dict[str, list[str]] = {}
    for part in parts:
        if isinstance(part, Content | Reasoning):
            name = "content" if isinstance(part, Content) else "reasoning"
            found.setdefault(name, []).append(part.text)
    return {name: "".join(texts) for name, texts in found.items()}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
