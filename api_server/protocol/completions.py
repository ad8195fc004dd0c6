"""POST /v1/completions: the request and its answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, WithJsonSchema

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
from api_server.protocol.common import GenerationRequest
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
    """Begin each choice with its prompt; with logprobs, the prompt's tokens have them too."""
    logprobs: int | None = Field(default=None)
    """Log-probabilities of the chosen tokens, with so many alternatives (0 to 20)."""
    add_special_tokens: bool = True
    """Let the tokenizer add what it adds to every text, such as a first token."""

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each token, None for no log-probabilities."""
        return self.logprobs

    @property
    def wanted_max_tokens(self) -> int | None:
        """None: not given."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else None

    @property
    def only_echoes(self) -> bool:
        """max_tokens 0 with echo: the prompt, perhaps with its log-probabilities, and no more."""
        return self.echo and self.max_tokens == 0


@dataclass(frozen=True, slots=True)
class Echo:
    """What a choice of a completion begins with.

    text: the prompt. offsets: where each of its tokens begins, [num_prompt_tokens].
    """

    text: str = ""
    offsets: Sequence[int] = ()


class CompletionAnswer(OpenAIStream):
    """Shapes of /v1/completions.

    streams, echoes, prompt_texts: one for each prompt; a text that is None is not shown.
    only_echoes: leave out what was generated.
    """

    kind = "text_completion"

    def __init__(
        self,
        shape: Shape,
        streams: Sequence[RequestStream],
        echoes: Sequence[Echo],
        prompt_texts: Sequence[str | None],
        only_echoes: bool = False,
    ) -> None:
        super().__init__(shape, self.kind)
        self._streams = streams
        self._echoes = echoes
        self._prompt_texts = prompt_texts
        self._only_echoes = only_echoes
        self._n = len(streams[0].choices)
        self._opened: set[int] = set()
        self._plain = shape.plain and not only_echoes
        self._head, self._tail = around(
            {
                **shape.envelope(self.kind),
                "choices": [{"index": HOLE, "text": HOLE, "logprobs": None}],
            },
            '"finish_reason": null, "stop_reason": null',
        )

    def chunk(self, delta: Delta) -> str:
        index = delta.index
        if self._plain and delta.finish_reason is None and index in self._opened:
            return f"{self._head[0]}{index}{self._head[1]}{encode_string(delta.text)}{self._tail}"
        delta = self._seen(delta)
        event = self._shape.envelope(self.kind) | {"choices": [self._choice(delta)]}
        stream = self._streams[index // self._n]
        return event_of(with_usage(event, self._shape, stream, delta) | at_end(delta, [stream]))

    def body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = []
        for delta in deltas:
            choice = self._choice(self._seen(delta))
            stream = self._streams[delta.index // self._n]
            choice["prompt_logprobs"] = self._shape.prompt_logprobs(stream)
            choices.append(choice)
        return self._shape.envelope(self.kind) | {
            "choices": choices,
            "usage": usage_object(self._counted(usage)),
            **transfer_params(self._streams),
        }

    def _choice(self, delta: Delta) -> dict[str, Any]:
        opening = delta.index not in self._opened
        self._opened.add(delta.index)
        stream = self._streams[delta.index // self._n]
        echo = self._echoes[delta.index // self._n] if opening else Echo()
        choice: dict[str, Any] = {"index": delta.index, "text": echo.text + delta.text}
        choice["logprobs"] = self._logprobs(stream, echo, delta.tokens)
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        if self._shape.token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = list(stream.prompt_token_ids) if opening else None
        prompt_text = self._prompt_texts[delta.index // self._n]
        if opening and prompt_text is not None:
            choice["prompt_text"] = prompt_text
        return choice

    def _logprobs(
        self, stream: RequestStream, echo: Echo, tokens: Sequence[TextToken]
    ) -> dict[str, Any] | None:
        shape = self._shape
        if shape.top is None:
            return None
        prompt = [
            TextToken(token_id, offset, row)
            for token_id, offset, row in zip(
                stream.prompt_token_ids, echo.offsets, stream.prompt_rows, strict=False
            )
        ]
        return completion_logprobs([*prompt, *tokens], shape.top, shape.names)

    def _seen(self, delta: Delta) -> Delta:
        """What the client is to see of a delta."""
        if self._only_echoes:
            return Delta(delta.index, "", [], [], 0, delta.finish_reason and "length")
        return delta

    def _counted(self, usage: Usage) -> Usage:
        if self._only_echoes:
            return Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return usage
