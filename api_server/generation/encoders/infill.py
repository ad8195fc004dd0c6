"""The encoder of /infill, in llama.cpp's format."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from api_server.errors import error_body
from api_server.generation.encoders.base import (
    ResponseEncoder,
    ResponseOptions,
    sse_event,
    sse_event_parts,
)
from api_server.generation.request_stream import Delta, RequestStream, Usage
from api_server.protocol.infill import InfillRequest
from api_server.text.logprobs import TextToken, TokenNames
from proto.errors import RequestError


class InfillEncoder(ResponseEncoder):
    """Encoder of /infill.

    prompt: text of the whole prompt, special tokens included. settings: content of
    `generation_settings`. context: most tokens of prompt and output together.
    """

    def __init__(
        self,
        options: ResponseOptions,
        body: InfillRequest,
        stream: RequestStream,
        prompt: str,
        settings: Mapping[str, Any],
        context: int,
    ) -> None:
        self._options = options
        self._body = body
        self._stream = stream
        self._prompt = prompt
        self._settings = settings
        self._context = context
        self._last: Delta | None = None
        self._has_line_end = False

    def encode_delta(self, delta: Delta) -> str | Iterator[str]:
        delta = self._reported(delta)
        if delta.finish_reason is not None:
            self._last = delta
        if not (delta.text or delta.token_ids):
            return ""
        event = self._output(delta) | {"stop": False, **self._counts(delta)}
        return sse_event_parts(event | self._probabilities(delta))

    def encode_end(self, usage: Usage) -> str:
        assert self._last is not None, "a stream ends with a finish reason"
        end = Delta(0, "", [], [], self._last.num_tokens, self._last.finish_reason)
        end.stop_reason = self._last.stop_reason
        return sse_event(self._chosen(self._whole(end, usage)))

    def encode_error(self, error: RequestError) -> str:
        return sse_event(error_body(error))

    async def encode_body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        (delta,) = map(self._reported, deltas)
        whole = self._whole(delta, usage)
        if not self._body.return_tokens:
            whole["tokens"] = []
        return self._chosen(whole | self._probabilities(delta))

    def _reported(self, delta: Delta) -> Delta:
        """Return the delta that the client sees, and note whether it has the end of a line."""
        if self._body.n_predict == 0:
            return Delta(delta.index, "", [], [], 0, delta.finish_reason and "length")
        self._has_line_end = self._has_line_end or "\n" in delta.text
        return delta

    def _output(self, delta: Delta) -> dict[str, Any]:
        return {"index": 0, "content": delta.text, "tokens": delta.token_ids}

    def _counts(self, delta: Delta) -> dict[str, int]:
        num_prompt = len(self._stream.prompt_token_ids)
        return {"tokens_predicted": delta.num_tokens, "tokens_evaluated": num_prompt}

    def _whole(self, delta: Delta, usage: Usage) -> dict[str, Any]:
        is_word = isinstance(delta.stop_reason, str) and delta.finish_reason == "stop"
        stop_type = "word" if is_word else "eos" if delta.finish_reason == "stop" else "limit"
        num_tokens = len(self._stream.prompt_token_ids) + delta.num_tokens
        return {
            **self._output(delta),
            "stop": True,
            "model": self._options.model,
            **self._counts(delta),
            "generation_settings": dict(self._settings),
            "prompt": self._prompt,
            "has_new_line": self._has_line_end,
            "truncated": stop_type == "limit" and num_tokens >= self._context,
            "stop_type": stop_type,
            "stopping_word": delta.stop_reason if is_word else "",
            "tokens_cached": usage.cached_tokens,
            "timings": self._timings(delta.num_tokens),
        }

    def _timings(self, num_output: int) -> dict[str, float]:
        timeline, last = self._stream.timeline, self._stream.last_token_time
        cached = self._stream.num_cached_tokens
        first = timeline.first_token
        begun = timeline.arrival if timeline.scheduled is None else timeline.scheduled
        prompt_ms = 0.0 if first is None else 1000 * (first - begun)
        output_ms = 0.0 if first is None or last is None else 1000 * (last - first)
        return {
            "cache_n": cached,
            **_rates("prompt", len(self._stream.prompt_token_ids) - cached, prompt_ms),
            **_rates("predicted", num_output, output_ms),
        }

    def _probabilities(self, delta: Delta) -> dict[str, Any]:
        if not self._options.num_logprobs:
            return {}
        entry = partial(
            _probability, top=self._options.num_logprobs, names=self._options.token_names
        )
        return {"completion_probabilities": map(entry, delta.tokens)}

    def _chosen(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the client asks for; all if it names none."""
        if not self._body.response_fields:
            return whole
        chosen = {}
        for path in self._body.response_fields:
            value: Any = whole
            for name in path.split("/"):
                value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
            if value is not _MISSING:
                chosen[path] = value
        return chosen


_MISSING: Final = object()


def _rates(name: str, number: int, milliseconds: float) -> dict[str, float]:
    """Return number, duration and rates of tokens; rates are 0 if nothing was measured."""
    return {
        f"{name}_n": number,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / number if number else 0.0,
        f"{name}_per_second": 1000 * number / milliseconds if milliseconds > 0 else 0.0,
    }


def _probability(token: TextToken, top: int, names: TokenNames) -> dict[str, Any]:
    assert token.row is not None, "only prompts have tokens without log-probabilities"
    columns = list(zip(token.row.token_ids, token.row.logprobs, strict=True))
    first, *others = (
        {
            "id": token_id,
            "token": names.token_text(token_id),
            "bytes": names.token_bytes(token_id),
            "logprob": logprob,
        }
        for token_id, logprob in columns[: top + 1]
    )
    return first | {"top_logprobs": others}
