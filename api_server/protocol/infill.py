"""POST /infill in llama.cpp's format: the request and the encoder of its response."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from api_server.errors import error_body
from api_server.protocol.common import (
    INT64_MAX,
    INT64_MIN,
    ComputedRequest,
    LogitBias,
    SamplingNumbers,
    StopField,
    Strict,
    Text,
)
from api_server.protocol.completions import CompletionRequest
from api_server.protocol.encoder import (
    KEEP_ALIVE,
    ResponseOptions,
    sse_event,
    sse_event_parts,
)
from api_server.protocol.fields import (
    LLAMA_CPP_NEUTRAL,
    IgnoredFields,
    nested_fields,
    parse,
)
from api_server.protocol.structured import StructuredFields
from api_server.request_stream import Delta, RequestStream, Usage
from api_server.text.logprobs import TextToken, TokenNames
from proto.errors import RequestError
from proto.logit_edits import MAX_BIAS
from proto.sampling_params import MAX_LOGPROBS

MAX_FILES: Final = 1024
MAX_RESPONSE_FIELDS: Final = 64
MAX_FIELD_CHARACTERS: Final = 256
_ALIASES: Final = {
    "max_tokens": "n_predict",
    "max_completion_tokens": "n_predict",
    "logprobs": "n_probs",
    "n": "n_cmpl",
}
"""Names of OpenAI's API that llama.cpp takes where a request lacks its own."""


class InfillFile(Strict):
    """An entry of `input_extra`."""

    text: Text
    filename: Text = "tmp"


def _file(value: Any, info: Any) -> Any:
    return nested_fields(value, InfillFile, {}, info, "input_extra.")


def _bias(value: Any) -> Any:
    """Return llama.cpp's pairs of token id and bias as an object; false forbids a token."""
    if not isinstance(value, list):
        return value
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError("takes pairs of a token id and a number")
    return {str(key): -MAX_BIAS if bias is False else bias for key, bias in value}


class InfillRequest(StructuredFields, SamplingNumbers, ComputedRequest):
    input_prefix: Text
    """Text before the output."""
    input_suffix: Text
    """Text after the output."""
    input_extra: Annotated[
        list[Annotated[InfillFile, BeforeValidator(_file)]],
        Field(fail_fast=True, max_length=MAX_FILES),
    ] = []
    """Other files, each with a text and a filename, which the model reads before."""
    prompt: Text = ""
    """The beginning of the output, which the model continues; it may have special tokens."""
    n_predict: int = Field(default=-1, ge=-1, le=INT64_MAX)
    """Most output tokens; -1: as many as the context leaves, 0: none, the prompt is only cached."""
    stream: bool = False
    """Answer with server-sent events."""
    seed: int = Field(default=-1, ge=INT64_MIN, le=INT64_MAX)
    """Makes sampling repeatable; -1: another one for each request."""
    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_k: int = Field(default=40, ge=-1)
    """Sample from this many likeliest tokens; 0 and -1 for all."""
    top_p: float = 0.95
    """Draw from the smallest set of tokens with this probability."""
    min_p: float = 0.05
    """Leave out tokens less likely than this part of the likeliest."""
    stop: StopField = []
    """Strings at which the output ends, without them."""
    ignore_eos: bool = False
    """Continue after the tokens that end an output."""
    logit_bias: Annotated[LogitBias, BeforeValidator(_bias)] = {}
    """Token id → number that is added to its logit; also as pairs, false for -100."""
    n_probs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    """Add the log-probabilities of each token and of this many likeliest ones."""
    return_tokens: bool = False
    """Add the token ids to an answer that is not streamed."""
    cache_prompt: bool = True
    """Use the KV of an earlier prompt with the same beginning."""
    response_fields: Annotated[
        list[Annotated[str, Field(max_length=MAX_FIELD_CHARACTERS)]],
        Field(fail_fast=True, max_length=MAX_RESPONSE_FIELDS),
    ] = []
    """The only fields of the answer; `timings/prompt_n` names one inside another."""

    def as_completion(self, defaults: Mapping[str, Any]) -> CompletionRequest:
        """Return the fields that a completion has. defaults: the model's, which precede ours."""
        given = self.model_fields_set | (_OWN_DEFAULTS - defaults.keys())
        fields = {name: getattr(self, name) for name in given & _PASSED}
        if self.seed < 0:
            fields.pop("seed", None)
        fields["skip_reading_prefix_cache"] = (
            self.skip_reading_prefix_cache or not self.cache_prompt
        )
        return CompletionRequest.model_construct(set(fields), prompt=[], **fields)


_OWN_DEFAULTS: Final = {"temperature", "top_k", "top_p", "min_p"}
"""Sampling parameters whose defaults are llama.cpp's, unless the model has some."""
_PASSED: Final = (InfillRequest.model_fields.keys() & CompletionRequest.model_fields) - {"prompt"}


def parse_infill(body: Any, ignored: IgnoredFields) -> InfillRequest:
    """Return the body as a model; raise InvalidRequestError that names the first invalid field."""
    if isinstance(body, dict):
        for alias, name in _ALIASES.items():
            value = body.pop(alias, None)
            if body.get(name) is None:
                body[name] = value
        if body.get("grammar") == "":
            del body["grammar"]
    return parse(InfillRequest, body, LLAMA_CPP_NEUTRAL, ignored)


class InfillEncoder:
    """Encoder of /infill.

    prompt: text of the whole prompt, special tokens included. settings: content of
    `generation_settings`. context: most tokens of prompt and output together.
    """

    keep_alive = KEEP_ALIVE

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

    def encode_start(self) -> str:
        return ""

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

    def client_error(self, error: RequestError) -> RequestError:
        return error

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
