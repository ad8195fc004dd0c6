"""POST /v1/completions: the request and the encoder of its response."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, WithJsonSchema

from api_server.protocol.common import GenerationRequest, Text
from api_server.protocol.encoder import (
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
from api_server.request_stream import Delta, RequestStream, Usage
from api_server.text.logprobs import TextToken, completion_logprobs
from api_server.text.prompts import MAX_PROMPTS

DEFAULT_MAX_TOKENS: Final = 16


_TEXT_SCHEMA: Final = {"type": "string", "minLength": 1}
_IDS_SCHEMA: Final = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0},
}
_PROMPT_SCHEMA: Final = {
    "anyOf": [
        _TEXT_SCHEMA,
        _IDS_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TEXT_SCHEMA},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS_SCHEMA},
    ]
}


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Most output tokens; by default 16, or less when the context leaves less."""
    echo: bool = False
    """Begin each choice with its prompt; with logprobs, also those of the prompt's tokens."""
    logprobs: int | None = Field(default=None)
    """Log-probabilities of the sampled tokens, with this many alternatives (0 to 20)."""
    add_special_tokens: bool = True
    """Let the tokenizer add what it adds to every text, such as a first token."""
    suffix: Text = ""
    """Text after the output, which the model fills in between prompt and suffix; needs a model
    whose vocabulary has tokens for it. In both texts special tokens are read as plain text."""

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each output token; None for no log-probabilities."""
        return self.logprobs

    @property
    def requested_max_tokens(self) -> int | None:
        """`max_tokens` if the request has it, else None."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else None

    @property
    def only_echoes(self) -> bool:
        """The response contains the prompt and no output: `echo` with a `max_tokens` of 0."""
        return self.echo and self.max_tokens == 0


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
        choice["logprobs"] = self._logprobs(stream, echo, delta.tokens)
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        if self._options.returns_token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = list(stream.prompt_token_ids) if is_first else None
        choice |= self._options.accepted_drafts(stream, delta)
        choice |= self._options.routed_experts(stream, delta)
        prompt_text = self._prompt_texts[delta.index // self._n]
        if is_first and prompt_text is not None:
            choice["prompt_text"] = prompt_text
        return choice

    def _logprobs(
        self, stream: RequestStream, echo: Echo, tokens: Sequence[TextToken]
    ) -> dict[str, Iterator[Any]] | None:
        options = self._options
        if options.num_logprobs is None:
            return None
        prompt = [
            TextToken(token_id, offset, row)
            for token_id, offset, row in zip(
                stream.prompt_token_ids, echo.offsets, stream.prompt_rows, strict=False
            )
        ]
        return completion_logprobs([*prompt, *tokens], options.num_logprobs, options.token_names)

    def _reported_delta(self, delta: Delta) -> Delta:
        """Return the delta that the client sees."""
        if self._only_echoes:
            return Delta(delta.index, "", [], [], 0, delta.finish_reason and "length")
        return delta

    def _reported_usage(self, usage: Usage) -> Usage:
        if self._only_echoes:
            return Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return usage
