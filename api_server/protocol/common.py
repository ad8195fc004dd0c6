"""What the requests of both endpoints have in common.

Owns the fields, their types and those limits that do not depend on the model.
Values are taken strictly: a number in quotes is not a number.
"""

from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
)

from api_server.protocol.structured import StructuredFields
from proto.engine_io import MAX_CHOICES
from proto.sampling_params import MAX_STOP_TOKEN_IDS, EarlyStopping

MAX_CHOICES_PER_REQUEST: Final = 1024
"""Most choices of all prompts of a request together."""
MAX_LOGPROB_ENTRIES: Final = 1 << 20
"""Most log-probabilities in an answer: choices times tokens times (alternatives and the token)."""
MAX_STOP_STRINGS: Final = 4
MAX_STOP_CHARACTERS: Final = 1024
MAX_TIMEOUT_MS: Final = (1 << 31) - 1
INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _whole(text: str) -> str:
    """JSON can spell half of a surrogate pair; no tokenizer and no response can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no text") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]
StopString = Annotated[Text, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class Strict(BaseModel):
    """Nothing is converted and nothing unknown is taken."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(StructuredFields, Strict):
    """Fields of /v1/completions and /v1/chat/completions alike."""

    model: Text | None = None
    """Name of a served model; by default the one there is."""
    stream: bool = False
    """Answer with server-sent events."""
    stream_options: StreamOptions | None = None
    """What a stream tells of its usage; only with stream."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Choices for each prompt; more than one needs a temperature above 0, or beam search."""
    use_beam_search: bool = False
    """Search for the n likeliest answers with n beams; nothing is drawn, nothing streamed."""
    length_penalty: float = 1.0
    """Beams are ranked by log-probability / length ** length_penalty (-5 to 5)."""
    early_stopping: EarlyStopping = False
    """End the search at n finished beams (true), at no better one (false), or at none possible
    ("never")."""
    seed: int | None = Field(default=None, ge=INT64_MIN, le=INT64_MAX)
    """Makes the draws repeatable."""
    priority: int = Field(default=0, ge=INT64_MIN, le=INT64_MAX)
    """The lower goes first; only with --scheduling-policy priority."""
    stop: Annotated[
        list[StopString],
        FailFast(),
        BeforeValidator(_one_or_many),
        Field(max_length=MAX_STOP_STRINGS),
    ] = []
    """Up to 4 strings at which a choice ends; they are not part of its text."""
    stop_token_ids: Annotated[list[int], FailFast(), Field(max_length=MAX_STOP_TOKEN_IDS)] = []
    """Tokens at which a choice ends."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this probability."""
    top_k: int = Field(default=0, ge=-1)
    """Draw from this many likeliest tokens; 0 and -1 for all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this part of the likeliest."""
    min_tokens: int = 0
    """Neither a stop token nor a stop string ends a choice before."""
    ignore_eos: bool = False
    """Go on after the model's own end token."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens, with so many alternatives."""
    return_token_ids: bool = False
    """Add token_ids and prompt_token_ids to the answer."""
    timeout_ms: int | None = Field(default=None, ge=1, le=MAX_TIMEOUT_MS)
    """Milliseconds after its arrival at which the request is ended, however far it is."""
    queue_timeout_ms: int | None = Field(default=None, ge=1, le=MAX_TIMEOUT_MS)
    """Milliseconds after its arrival at which it is refused if nothing of it was computed."""
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    """Part of the answer's id and of the log line."""

    @property
    def includes_usage(self) -> bool:
        """A last chunk with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_continuous_usage(self) -> bool:
        """The usage so far in every chunk."""
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )
