"""The encoder of /v1/chat/completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from api_server.generation.encoders.base import (
    PLACEHOLDER,
    OpenAIStreamEncoder,
    ResponseOptions,
    json_string,
    last_chunk_fields,
    sse_event,
    sse_event_parts,
    text_chunk_parts,
    transfer_params,
    usage_object,
    with_usage,
)
from api_server.generation.request_stream import Delta, RequestStream, Usage
from api_server.parsers.output import (
    TOOL_CALLS,
    ChoiceParser,
    ContentText,
    OutputPart,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from api_server.text.logprobs import ChatLogprobs


class ChatEncoder(OpenAIStreamEncoder):
    """Encoder of /v1/chat/completions.

    prompt_text: None if not requested. choice_parsers: one for each choice.
    """

    object_name = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        options: ResponseOptions,
        stream: RequestStream,
        prompt_text: str | None,
        choice_parsers: Sequence[ChoiceParser],
    ) -> None:
        super().__init__(options, self.chunk_object)
        self._stream = stream
        self._prompt_text = {} if prompt_text is None else {"prompt_text": prompt_text}
        self._choice_parsers = choice_parsers
        self._opened: set[int] = set()
        self._is_text_only = options.is_text_only
        choice = {"index": PLACEHOLDER, "delta": {"content": PLACEHOLDER}, "logprobs": None}
        self._chunk_head, self._chunk_tail = text_chunk_parts(
            {**options.envelope(self.chunk_object), "choices": [choice]}, '"finish_reason": null'
        )

    def encode_delta(self, delta: Delta) -> str:
        index = delta.index
        opening = "" if index in self._opened else self._opening_chunk(index)
        parser = self._choice_parsers[index]
        is_last = delta.finish_reason is not None
        if self._is_text_only and not is_last:
            if parser.is_plain:
                before, between = self._chunk_head
                text = json_string(delta.text)
                return f"{opening}{before}{index}{between}{text}{self._chunk_tail}"
            parts = parser.parse_delta(delta.text, None, delta.num_certain)
            return opening + self._parts_chunk(delta, parts) if parts else opening
        parts = parser.parse_delta(delta.text, delta.finish_reason, delta.num_certain)
        return opening + self._parts_chunk(delta, parts)

    async def encode_body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = map(self._whole_choice, deltas)
        body = self._options.envelope(self.object_name) | {
            "choices": choices,
            "usage": usage_object(usage),
            **transfer_params([self._stream]),
        }
        body["prompt_logprobs"] = self._options.prompt_logprobs(self._stream)
        if self._options.request.return_token_ids:
            body["prompt_token_ids"] = list(self._stream.prompt_token_ids)
        return body | self._prompt_text

    def _whole_choice(self, delta: Delta) -> dict[str, Any]:
        parser = self._choice_parsers[delta.index]
        parts = parser.parse_delta(delta.text, delta.finish_reason, delta.num_certain)
        choice = {"index": delta.index, "message": full_message(parts)}
        return choice | self._choice_fields(delta)

    def _opening_chunk(self, index: int) -> str:
        """Return the chunk with the role; that of the first choice has the prompt's ids too.

        Its content is null if the choice may begin with reasoning or a call: some clients begin a
        text with an empty string.
        """
        is_first = not self._opened
        self._opened.add(index)
        content = "" if self._choice_parsers[index].is_plain else None
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": content},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._options.envelope(self.chunk_object) | {"choices": [choice]}
        if self._options.request.return_token_ids and is_first:
            chunk["prompt_token_ids"] = list(self._stream.prompt_token_ids)
        if is_first:
            chunk |= self._prompt_text
        no_tokens = Delta(index, "", [], [], 0)
        return sse_event(with_usage(chunk, self._options, self._stream, no_tokens))

    def _parts_chunk(self, delta: Delta, parts: Sequence[OutputPart]) -> str:
        choice = {"index": delta.index, "delta": delta_message(parts)}
        choice |= self._choice_fields(delta)
        chunk = self._options.envelope(self.chunk_object) | {"choices": [choice]}
        chunk = with_usage(chunk, self._options, self._stream, delta)
        return "".join(sse_event_parts(chunk | last_chunk_fields(delta, [self._stream])))

    def _choice_fields(self, delta: Delta) -> dict[str, Any]:
        """Return the fields of a choice beside its message."""
        options = self._options
        logprobs = None
        if options.num_logprobs is not None:
            entries = ChatLogprobs(delta.tokens, options.num_logprobs, options.token_names)
            logprobs = {"content": entries, "refusal": None}
        reason = delta.finish_reason
        if reason == "stop" and self._choice_parsers[delta.index].has_tool_calls:
            reason = TOOL_CALLS
        fields: dict[str, Any] = {"logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            fields["stop_reason"] = delta.stop_reason
        if options.request.return_token_ids:
            fields["token_ids"] = delta.token_ids
        fields |= options.accepted_drafts(self._stream, delta)
        return fields | options.routed_experts(self._stream, delta)


def delta_message(parts: Sequence[OutputPart]) -> dict[str, Any]:
    """Return the `delta` of a chunk with these parts."""
    message = _texts(parts)
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            calls.append({"index": part.index, **_tool_call(part.call_id, part.name, "")})
        elif isinstance(part, ToolCallArguments):
            if not calls or calls[-1]["index"] != part.index:
                calls.append({"index": part.index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += part.text
    return message | {"tool_calls": calls} if calls else message


def full_message(parts: Sequence[OutputPart]) -> dict[str, Any]:
    """Return the `message` of a choice with these parts."""
    texts = _texts(parts)
    starts = {part.index: part for part in parts if isinstance(part, ToolCallStart)}
    arguments: dict[int, list[str]] = {index: [] for index in starts}
    for part in parts:
        if isinstance(part, ToolCallArguments):
            arguments[part.index].append(part.text)
    calls = [
        _tool_call(start.call_id, start.name, "".join(arguments[index]))
        for index, start in starts.items()
    ]
    content = texts.get("content", None if calls or texts else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if "reasoning" in texts:
        message["reasoning"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(parts: Iterable[OutputPart]) -> dict[str, Any]:
    """Return `content` and `reasoning`, each only if there is any."""
    pieces: dict[str, list[str]] = {}
    for part in parts:
        if isinstance(part, ContentText | ReasoningText):
            name = "content" if isinstance(part, ContentText) else "reasoning"
            pieces.setdefault(name, []).append(part.text)
    return {name: "".join(texts) for name, texts in pieces.items()}


def _tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
