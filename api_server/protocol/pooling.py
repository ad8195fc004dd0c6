"""The requests of the pooling endpoints, and the bodies of their responses."""

from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, WithJsonSchema

from api_server.protocol.common import INT64_MAX, TEXT_SCHEMA, ComputedRequest, Text, prompts_schema
from api_server.protocol.schemas import a_list
from proto.errors import InvalidRequestError
from proto.messages.pooling import MAX_INPUTS, MAX_VECTOR, PoolingTask

Vector = npt.NDArray[np.float32]

_DOCUMENT: Final = {"anyOf": [TEXT_SCHEMA, {"type": "object", "properties": {"text": TEXT_SCHEMA}}]}
_DOCUMENTS: Final = {"anyOf": [_DOCUMENT, a_list(_DOCUMENT, minItems=1)]}


class PoolingFields(ComputedRequest):
    """Fields of all pooling endpoints."""

    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT64_MAX)
    """Keep at most this many tokens of each text; -1: as many as the model takes."""
    truncation_side: Literal["left", "right"] = "right"
    """The end of a text that is cut."""
    add_special_tokens: bool = True
    """Let the tokenizer add what it adds to every text, such as an end token."""


class EmbeddingRequest(PoolingFields):
    input: Annotated[Any, prompts_schema(MAX_INPUTS)]
    """A string, a list of up to 8192 strings, a list of token ids, or a list of such lists."""
    encoding_format: Literal["float", "base64"] = "float"
    """How the numbers are written: as JSON, or as base64 of float32, little-endian."""
    dimensions: int | None = Field(default=None, ge=1, le=MAX_VECTOR)
    """Return this many numbers of each embedding, the first ones, normalised again (Matryoshka)."""
    normalize: bool | None = None
    """Whether embeddings have length 1; by default as the model's folder says."""


class PoolingRequest(EmbeddingRequest):
    task: PoolingTask | None = None
    """embed, classify, or token_embed for a vector of each token; by default the model's own."""


class ClassificationRequest(PoolingFields):
    input: Annotated[Any, prompts_schema(MAX_INPUTS)]
    """As in an embedding request."""
    use_activation: bool = True
    """Return probabilities; false: the scores before softmax or sigmoid."""


class ScoreRequest(PoolingFields):
    text_1: Annotated[Any, WithJsonSchema(_DOCUMENTS)]
    """A query, or as many queries as text_2 has documents."""
    text_2: Annotated[Any, WithJsonSchema(_DOCUMENTS)]
    """A document or a list of documents."""
    use_activation: bool = True
    """Return scores from 0 to 1 where the model has an activation; false: before it."""


class RerankRequest(PoolingFields):
    query: Text
    """The query."""
    documents: Annotated[Any, WithJsonSchema(_DOCUMENTS)]
    """Up to 8192 documents: strings, or objects with a text."""
    top_n: int = Field(default=0, ge=0, le=INT64_MAX)
    """Return this many documents, those with the highest scores; 0: all."""
    return_documents: bool = True
    """Include the documents in the results."""
    use_activation: bool = True
    """As in a score request."""


def pooling_usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}


NUMBER_BYTES: Final = {"float": 22, "base64": 6}
"""Of a number in a response, by encoding format, at most."""


def encoded(vector: Vector, encoding_format: str) -> Any:
    """Return the numbers as the client wants them, for `json_parts`."""
    if encoding_format == "base64":
        return b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
    return vector.tolist() if vector.ndim == 1 else (row.tolist() for row in vector)


def texts_of(value: Any, field: str) -> list[str]:
    """Return the texts of a field: a string, an object with a text, or a list of these.

    Raises InvalidRequestError for anything else, for an empty text and for more than MAX_INPUTS.
    """
    items = value if isinstance(value, list) else [value]
    if not items or len(items) > MAX_INPUTS:
        raise InvalidRequestError(f"{field}: 1 to {MAX_INPUTS} texts, got {len(items)}", field)
    texts: list[str] = []
    for item in items:
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"{field} must be texts that are not empty", field)
        texts.append(text)
    return texts


def label_entry(index: int, scores: Vector, labels: Sequence[str]) -> dict[str, Any]:
    """Return an entry of a classification."""
    best = int(scores.argmax())
    label = labels[best] if best < len(labels) else None
    return {"index": index, "label": label, "probs": scores.tolist(), "num_classes": len(scores)}


def rerank_results(
    scores: Sequence[float], documents: Sequence[str], request: RerankRequest
) -> list[dict[str, Any]]:
    """Return the documents with their scores, best first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in order[: request.top_n or len(order)]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if request.return_documents:
            result["document"] = {"text": documents[index]}
        results.append(result)
    return results
