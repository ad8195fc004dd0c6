"""Request fields that several endpoints share, with the limits of their values.

Limits that depend on the model are checked in `generation/`. Types are strict: a number in
quotes is not a number.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema

from api_server.protocol.agents import AgentFields, printable
from api_server.protocol.fields import STREAM_OPTIONS_NEUTRAL, NestedFields, Strict, is_encodable
from api_server.protocol.schemas import INTEGER, STRING, a_list
from api_server.protocol.structured import StructuredFields
from proto.messages.engine_io import MAX_CHOICES
from proto.messages.logit_edits import LOGIT_EDIT_NUMBERS, MAX_BAD_WORDS, MAX_BIASED_TOKENS
from proto.messages.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
    SAMPLING_NUMBERS,
    EarlyStopping,
)

MAX_PROMPTS: Final = 1024
"""Most prompts of a completion request."""
MAX_CHOICES_PER_REQUEST: Final = 1024
"""Most choices of all prompts of a request together."""
MAX_STOP_STRINGS: Final = 1024
MAX_STOP_BYTES: Final = 64 << 10
"""Of all stop strings together, in UTF-8."""
MAX_BAD_WORD_CHARACTERS: Final = 256
MAX_SALT_CHARACTERS: Final = 1024
MAX_ALLOWED_TOKENS: Final = 1 << 20
"""More tokens than any vocabulary has."""
REQUEST_ID: Final = r"^[A-Za-z0-9._:-]{1,128}$"
MAX_LORA_SCALES: Final = 4096
MAX_TIMEOUT_MS: Final = (1 << 31) - 1
INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1


def _as_list(value: Any) -> Any:
    """Return a text as the list of it; raises ValueError for "", which is no member of any list."""
    if value == "":
        raise ValueError("must not be empty")
    return [value] if isinstance(value, str) else value


def _encodable(text: str) -> str:
    """Raise ValueError for an unpaired surrogate, which JSON can express but UTF-8 cannot."""
    if not is_encodable(text):
        raise ValueError("holds half of a surrogate pair, which is no text")
    return text


def _logit_bias(value: Any) -> Any:
    """Return token id → bias; JSON has only strings as keys. Raises ValueError."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"names at most {MAX_BIASED_TOKENS} tokens, got {len(value)}")
    for key in value:
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20):
            raise ValueError("must map token ids to numbers")
    bias = {int(key): number for key, number in value.items()}
    if len(bias) != len(value):
        raise ValueError("names a token more than once")
    return bias


Text = Annotated[str, AfterValidator(_encodable)]
BadWord = Annotated[Text, StringConstraints(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
Salt = Annotated[
    Text,
    StringConstraints(min_length=1, max_length=MAX_SALT_CHARACTERS),
    AfterValidator(printable),
]


def _check_stops(strings: list[str]) -> list[str]:
    num_bytes = sum(len(string.encode()) for string in strings)
    if num_bytes > MAX_STOP_BYTES:
        raise ValueError(f"takes {MAX_STOP_BYTES} bytes of strings together, got {num_bytes}")
    return strings


StopStringList = Annotated[
    list[Annotated[Text, StringConstraints(min_length=1)]],
    Field(fail_fast=True, max_length=MAX_STOP_STRINGS),
    AfterValidator(_check_stops),
]
TEXT_SCHEMA: Final = STRING | {"minLength": 1}
StopField = Annotated[
    StopStringList,
    BeforeValidator(_as_list),
    WithJsonSchema({"anyOf": [TEXT_SCHEMA, a_list(TEXT_SCHEMA, maxItems=MAX_STOP_STRINGS)]}),
]
LogitBias = Annotated[dict[int, float], BeforeValidator(_logit_bias)]


def prompts_schema(most: int) -> WithJsonSchema:
    """Return the schema of a text, token ids, or a list of up to `most` of either."""
    ids = a_list(INTEGER | {"minimum": 0}, minItems=1)
    lists = [a_list(each, minItems=1, maxItems=most) for each in (TEXT_SCHEMA, ids)]
    return WithJsonSchema({"anyOf": [TEXT_SCHEMA, ids, *lists]})


class StreamOptions(NestedFields):
    where, neutral = "stream_options.", STREAM_OPTIONS_NEUTRAL

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionPattern(NestedFields):
    """The field `repetition_detection`."""

    where = "repetition_detection."

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int


REQUEST_NUMBERS: Final = SAMPLING_NUMBERS | LOGIT_EDIT_NUMBERS
"""Sampling parameters that are one number, with their bounds."""


class SamplingNumbers(Strict):
    """A field for each of REQUEST_NUMBERS."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this probability."""
    min_p: float = 0.0
    """Leave out tokens less likely than this part of the likeliest."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that is among the outputs (-2 to 2)."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token each time it is among the outputs (-2 to 2)."""
    repetition_penalty: float = 1.0
    """Divides logits of tokens of prompt and outputs, multiplies those below 0 (0.01 to 100)."""


class ComputedRequest(Strict):
    """Fields of all endpoints that the engine computes."""

    model: Text | None = None
    """Name of a served model; by default the one there is."""
    priority: int = Field(default=0, ge=INT64_MIN, le=INT64_MAX)
    """Requests with a lower value are scheduled first; needs --scheduling-policy priority."""
    cache_salt: Salt | None = None
    """Requests share drafts and KV, also a draft model's, within a salt; 1 to 1024 characters."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt, also where its KV is cached."""
    timeout_ms: int | None = Field(default=None, ge=1, le=MAX_TIMEOUT_MS)
    """Milliseconds after arrival at which the request is aborted."""
    queue_timeout_ms: int | None = Field(default=None, ge=1, le=MAX_TIMEOUT_MS)
    """Milliseconds after arrival at which the request is refused if it is still queued."""
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)
    """Part of the answer's id and of the log line; also as X-Request-Id."""
    data_parallel_rank: int | None = Field(default=None, ge=0, le=INT64_MAX)
    """Index of the engine that computes the request; by default the router chooses one. Also as
    X-data-parallel-rank."""


class LoRAScale(NestedFields):
    """An entry of llama.cpp's field `lora`."""

    where = "lora."

    id: int
    scale: float = 1.0


LoRAScales = Annotated[list[LoRAScale], Field(fail_fast=True, max_length=MAX_LORA_SCALES)]
"""Of all adapters that are served."""


class GenerationRequest(AgentFields, StructuredFields, SamplingNumbers, ComputedRequest):
    """Fields of both /v1/completions and /v1/chat/completions."""

    lora: LoRAScales | None = None
    """llama.cpp's choice of an adapter: its id of GET /lora-adapters and a factor (scale). One at
    most; [] for the model alone. `model` names an adapter, too."""
    stream: bool = False
    """Answer with server-sent events."""
    stream_options: StreamOptions | None = None
    """The usage in a stream: include_usage, continuous_usage_stats; only with stream."""
    stream_interval: int | None = Field(default=None, ge=1, le=INT64_MAX)
    """Tokens of a choice between two of its events, after the first; by default the value of
    --stream-interval."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Choices for each prompt; more than one needs a temperature above 0, or beam search."""
    use_beam_search: bool = False
    """Search for the n likeliest answers with n beams, without sampling and streaming."""
    length_penalty: float = 1.0
    """Beams are ranked by log-probability / length ** length_penalty (-5 to 5)."""
    early_stopping: EarlyStopping = False
    """When the search ends: at n finished beams (true), when no better beam is likely (false), or
    when none is possible ("never")."""
    seed: int | None = Field(default=None, ge=INT64_MIN, le=INT64_MAX)
    """Makes sampling repeatable."""
    stop: StopField = []
    """Up to 1024 strings, of 64 KiB together, at which a choice ends; its content does not contain
    them. The first in the list counts if several end at the same character."""
    include_stop_str_in_output: bool = False
    """Include the stop string, or the text of the stop token, at the end of the text."""
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] = []
    """Tokens at which a choice ends."""
    top_k: int = Field(default=0, ge=-1)
    """Sample from this many likeliest tokens; 0 and -1 for all."""
    logit_bias: LogitBias = {}
    """Token id → number that is added to its logit (-100 to 100); up to 1024 tokens."""
    bad_words: Annotated[list[BadWord], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] = []
    """Up to 128 texts that an answer must not contain, with or without a space before them."""
    allowed_token_ids: Annotated[
        list[int], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_TOKENS)
    ] = []
    """The only tokens that can be sampled."""
    min_tokens: int = 0
    """Output tokens before which no stop token, stop string or repetition ends a choice."""
    ignore_eos: bool = False
    """Continue after the model's own end token."""
    repetition_detection: RepetitionPattern | None = None
    """End a choice that ends with a pattern of min_pattern_size to max_pattern_size tokens
    min_count times in a row; its finish_reason is repetition."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens, with this many alternatives (0 to 20)."""
    logprob_token_ids: Annotated[
        list[int], Field(fail_fast=True, max_length=MAX_LOGPROB_TOKEN_IDS)
    ] = []
    """Up to 128 tokens whose log-probabilities replace those of the likeliest."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT64_MAX)
    """Keep at most this many tokens of a prompt; -1: as many as the context leaves."""
    truncation_side: Literal["left", "right"] = "left"
    """The end of the prompt that is cut."""
    detokenize: bool = True
    """Return text; false returns token ids only, and logprobs without text and offsets."""
    skip_special_tokens: bool = True
    """Remove special tokens from the text."""
    spaces_between_special_tokens: bool = True
    """Let the tokenizer put spaces between special tokens, where it does."""
    return_token_ids: bool = False
    """Add token_ids and prompt_token_ids to the answer."""
    return_tokens_as_token_ids: bool = False
    """Write tokens of logprobs as token_id:N."""
    return_routed_experts: bool = False
    """Add routed_experts to each choice of a mixture of experts: the experts that computed each
    token. Needs --enable-return-routed-experts."""
    return_accepted_drafts: bool = False
    """Add accepted_drafts to each choice: for each output token, whether it was an accepted
    draft."""
    return_prompt_text: bool = False
    """Add prompt_text to the answer, as the model saw it."""
    kv_transfer_params: dict[str, Any] | None = None
    """Prefill and decode in two daemons: do_remote_decode keeps the prompt's KV for another one;
    the kv_transfer_params of that answer load it there. Needs --kv-transfer-config."""

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_continuous_usage(self) -> bool:
        """Every chunk contains the usage so far."""
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )
