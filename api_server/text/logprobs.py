"""Log-probabilities as rows of Python numbers, and in the shapes of the API.

Owns the unpacking of `LogprobsArrays`. Knows nothing of streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from proto.engine_io import LogprobsArrays

LOWEST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


class TokenNames(Protocol):
    """What single tokens are called in a response."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class TokenIdNames:
    """Names that say which token it is, also where its text does not."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return self._names.token_bytes(token_id)


class LogprobRow(NamedTuple):
    """One position: the chosen token first, then the best ones in order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


def unpack(arrays: LogprobsArrays) -> list[LogprobRow]:
    """The rows of a packed message, from `first_position` on."""
    width = arrays.width
    ids = np.frombuffer(arrays.token_ids, dtype="<i4").reshape(-1, width).tolist()
    values = np.frombuffer(arrays.logprobs, dtype="<f4").astype(np.float64)
    finite = np.where(values > LOWEST, values, LOWEST).reshape(-1, width).tolist()
    ranks = np.frombuffer(arrays.ranks, dtype="<i4").tolist()
    return [LogprobRow(*row) for row in zip(ids, finite, ranks, strict=True)]


@dataclass(slots=True)
class TextToken:
    """A token of a completion and where its text begins. `row` is None for the first
    token of a prompt, which nothing predicts."""

    token_id: int
    text_offset: int
    row: LogprobRow | None


def completion_logprobs(
    tokens: Sequence[TextToken], top: int, names: TokenNames
) -> dict[str, list[Any]]:
    """The `logprobs` object of /v1/completions. `top`: alternatives per token."""
    return {
        "text_offset": [token.text_offset for token in tokens],
        "token_logprobs": [token.row.logprobs[0] if token.row else None for token in tokens],
        "tokens": [names.token_text(token.token_id) for token in tokens],
        "top_logprobs": [
            _best_by_text(token.row, top, names) if token.row else None for token in tokens
        ],
    }


def chat_logprobs(tokens: Sequence[TextToken], top: int, names: TokenNames) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    content = []
    for token in tokens:
        assert token.row is not None, "only prompts have tokens without log-probabilities"
        ids, values = token.row.token_ids, token.row.logprobs
        entry = _chat_entry(ids[0], values[0], names)
        entry["top_logprobs"] = [
            _chat_entry(ids[column], values[column], names)
            for column in range(1, min(len(ids), top + 1))
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def prompt_logprobs(
    rows: Sequence[LogprobRow | None], top: int, names: TokenNames
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token, id → value, rank and text."""
    return [None if row is None else _by_id(row, top, names) for row in rows]


def _by_id(row: LogprobRow, top: int, names: TokenNames) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    columns = zip(row.token_ids[: top + 1], row.logprobs, strict=False)
    for column, (token_id, logprob) in enumerate(columns):
        rank = column if column else row.rank
        entries.setdefault(
            str(token_id),
            {"logprob": logprob, "rank": rank, "decoded_token": names.token_text(token_id)},
        )
    return entries


def _best_by_text(row: LogprobRow, top: int, names: TokenNames) -> dict[str, float]:
    """Several tokens may share a text (broken characters): the likeliest stands for it."""
    best: dict[str, float] = {}
    for token_id, logprob in zip(row.token_ids[: top + 1], row.logprobs, strict=False):
        text = names.token_text(token_id)
        best[text] = max(logprob, best.get(text, logprob))
    return best


def _chat_entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.token_text(token_id),
        "logprob": logprob,
        "bytes": list(names.token_bytes(token_id)),
    }
