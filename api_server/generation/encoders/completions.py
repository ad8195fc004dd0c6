"""The encoder of /v1/completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from api_server.generation.encoders.base import (
    PLACEHOLDER,
    OpenAIStreamEncoder,
    ResponseOptions,
    json_string,
    last_chunk_fields,
    sse_event_parts,
    text_chunk_parts,
    transfer_params,
    usage_object,
    with_usage,
)
from api_server.generation.request_stream import Delta, RequestStream, Usage
from api_server.text.logprobs import TextToken, completion_logprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt at the beginning of each choice.

    offsets: text offset of each prompt token, [num_prompt_tokens]; empty without logprobs.
    """

    text: str = ""
    offsets: Sequence[int] = ()


class CompletionEncoder(OpenAIStreamEncoder):
    """Encoder of /v1/completions.

    streams, echoes, prompt_texts: one for each prompt. prompt_texts: None if not requested.
    only_echoes: leave out the output, of which the engine generates one token in any case.
    """

    object_name = "text_completion"

    def __init__(
        self,
        options: ResponseOptions,
        streams: Sequence[RequestStream],
        echoes: Sequence[Echo],
        prompt_texts: Sequence[str | None],
        only_echoes: bool = False,
    ) -> None:
        super().__init__(options, self.object_name)
        self._streams = streams
        self._echoes = echoes
        self._prompt_texts = prompt_texts
        self._only_echoes = only_echoes
        self._n = len(streams[0].choices)
        self._opened: set[int] = set()
        self._is_text_only = options.is_text_only and not only_echoes
        self._chunk_head, self._chunk_tail = text_chunk_parts(
            {
                **options.envelope(self.object_name),
                "choices": [{"index": PLACEHOLDER, "text": PLACEHOLDER, "logprobs": None}],
            },
            '"finish_reason": null, "stop_reason": null',
        )

    def encode_delta(self, delta: Delta) -> str | Iterator[str]:
        index = delta.index
        if self._is_text_only and delta.finish_reason is None and index in self._opened:
            before, between = self._chunk_head
            return f"{before}{index}{between}{json_string(delta.text)}{self._chunk_tail}"
        opens_with_echo = index not in self._opened and bool(self._echoes[index // self._n].text)
        delta = self._reported_delta(delta)
        choices = iter([self._choice(delta)])
        chunk = self._options.envelope(self.object_name) | {"choices": choices}
        stream = self._streams[index // self._n]
        chunk = with_usage(chunk, self._options, stream, delta)
        parts = sse_event_parts(chunk | last_chunk_fields(delta, [stream]))
        return parts if opens_with_echo else "".join(parts)

    async def encode_body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        return self._options.envelope(self.object_name) | {
            "choices": map(self._whole_choice, deltas),
            "usage": usage_object(self._reported_usage(usage)),
            **transfer_params(self._streams),
        }

    def _whole_choice(self, delta: Delta) -> dict[str, Any]:
        choice = self._choice(self._reported_delta(delta))
        stream = self._streams[delta.index // self._n]
        return choice | {"prompt_logprobs": self._options.prompt_logprobs(stream)}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        is_first = delta.index not in self._opened
        self._opened.add(delta.index)
        stream = self._streams[delta.index // self._n]
        echo = self._echoes[delta.index // self._n] if is_first else Echo()
        choice: dict[str, Any] = {"index": delta.index, "text": echo.text + delta.text}
        start = len(self._echoes[delta.index // self._n].text)
        choice["logprobs"] = self._logprobs(stream, echo, delta.tokens, start)
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        if self._options.request.return_token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = list(stream.prompt_token_ids) if is_first else None
        choice |= self._options.accepted_drafts(stream, delta)
        choice |= self._options.routed_experts(stream, delta)
        prompt_text = self._prompt_texts[delta.index // self._n]
        if is_first and prompt_text is not None:
            choice["prompt_text"] = prompt_text
        return choice

    def _logprobs(
        self, stream: RequestStream, echo: Echo, tokens: Sequence[TextToken], start: int
    ) -> dict[str, Iterator[Any]] | None:
        """Return the field `logprobs`; None if it was not requested. start: of the output."""
        options = self._options
        if options.num_logprobs is None:
            return None
        output = [TextToken(each.token_id, start + each.text_offset, each.row) for each in tokens]
        prompt = [
            TextToken(token_id, offset, row)
            for token_id, offset, row in zip(
                stream.prompt_token_ids, echo.offsets, stream.prompt_rows, strict=False
            )
        ]
        return completion_logprobs([*prompt, *output], options.num_logprobs, options.token_names)

    def _reported_delta(self, delta: Delta) -> Delta:
        """Return the delta that the client sees."""
        if self._only_echoes:
            return Delta(delta.index, "", [], [], 0, delta.finish_reason and "length")
        return delta

    def _reported_usage(self, usage: Usage) -> Usage:
        if self._only_echoes:
            return Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return usage
