"""The request of POST /infill, in llama.cpp's format."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from api_server.protocol.common import (
    INT64_MAX,
    INT64_MIN,
    ComputedRequest,
    LogitBias,
    LoRAScales,
    SamplingNumbers,
    StopField,
    Text,
)
from api_server.protocol.completions import CompletionRequest
from api_server.protocol.fields import LLAMA_CPP_NEUTRAL, IgnoredFields, NestedFields, parse
from api_server.protocol.structured import StructuredFields
from proto.messages.logit_edits import MAX_BIAS
from proto.messages.sampling_params import MAX_LOGPROBS

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


class InfillFile(NestedFields):
    """An entry of `input_extra`."""

    where = "input_extra."

    text: Text
    filename: Text = "tmp"


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
    input_extra: Annotated[list[InfillFile], Field(fail_fast=True, max_length=MAX_FILES)] = []
    """Other files, each with a text and a filename, which the model reads before."""
    prompt: Text = ""
    """The beginning of the output, which the model continues; it may have special tokens."""
    n_predict: int = Field(default=-1, ge=-1, le=INT64_MAX)
    """Most output tokens; -1: as many as the context leaves, 0: none, the prompt is only cached."""
    lora: LoRAScales | None = None
    """The adapter: its id of GET /lora-adapters and a factor (scale). One at most."""
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
