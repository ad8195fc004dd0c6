"""The requests of the pooling endpoints, and the bodies of their responses."""

from base64 import b64encode
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, WithJsonSchema

from api_server.protocol.common import (
    INT64_MAX,
    INT64_MIN,
    MAX_TIMEOUT_MS,
    REQUEST_ID,
    Salt,
    Strict,
    Text,
)
from proto.pooling import MAX_INPUTS, MAX_VECTOR, PoolingTask

Vector = npt.NDArray[np.float32]

_TEXT: Final = {"type": "string", "minLength": 1}
_IDS: Final = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_INPUT: Final = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _TEXT},
        {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _IDS},
    ]
}


class PoolingFields(Strict):
    """Fields of all pooling endpoints."""

    model: Text | None = None
    """Name of a served model; by default the one there is."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT64_MAX)
    """Keep at most this many tokens of each text; -1: as many as the model takes."""
    truncation_side: Literal["left", "right"] = "right"
    """The end of a text that is cut."""
    add_special_tokens: bool = True
    """Let the tokenizer add what it adds to every text, such as an end token."""
    priority: int = Field(default=0, ge=INT64_MIN, le=INT64_MAX)
    """Requests with a lower value are scheduled first; needs --scheduling-policy priority."""
    cache_salt: Salt | None = None
    """Texts share cached KV only with texts of the same salt; 1 to 1024 characters."""
    timeout_ms: int | None = Field(default=None, ge=1, le=MAX_TIMEOUT_MS)
    """Milliseconds after arrival at which the request is aborted."""
    queue_timeout_ms: int | None = Field(default=None, ge=1, le=MAX_TIMEOUT_MS)
    """Milliseconds after arrival at which the request is refused if it is still queued."""
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)
    """Part of the answer's id and of the log line; also as X-Request-Id."""


class EmbeddingRequest(PoolingFields):
    input: Annotated[Any, WithJsonSchema(_INPUT)]
    """A string, a list of up to 8192 strings, a list of token ids, or a list of such lists."""
    encoding_format: Literal["float", "base64"] = "float"
    """How the numbers are written: as JSON, or as base64 of float32, little-endian."""
    dimensions: int | None = Field(default=None, ge=1, le=MAX_VECTOR)
    """Return the first so many numbers of each embedding, normalised again (Matryoshka)."""
    normalize: bool | None = None
    """Whether embeddings have length 1; by default as the model's folder says."""


class PoolingRequest(EmbeddingRequest):
    task: PoolingTask | None = None
    """embed, classify, or token_embed for a vector of each token; by default the model's own."""


def pooling_usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}


def encoded(vector: Vector, encoding_format: str) -> Any:
    """Return the numbers as the client wants them."""
    if encoding_format == "base64":
        return b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
    return vector.tolist()
