"""Log-probabilities: from the engine's arrays to the JSON of each API."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from api_server.text.tokenizer import ModelTokenizer
from proto.messages.engine_io import LogprobsArrays

ENTRY_BYTES: Final = 64
"""Estimated size of one log-probability with its token, in memory and as JSON."""
_MAX_KNOWN: Final = 4096
"""Tokens whose text and bytes are kept while log-probabilities are made."""
MIN_LOGPROB: Final = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names of single tokens in a response.

    as_ids: `token_id:N` instead of the token's text. has_text: False with `detokenize` false: names
    are ids, and there are no bytes, no decoded tokens and no text offsets.
    """

    tokenizer: ModelTokenizer
    as_ids: bool = False
    has_text: bool = True

    def token_text(self, token_id: int) -> str:
        if self.as_ids or not self.has_text:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def decoded_token(self, token_id: int) -> str | None:
        return self.token_text(token_id) if self.has_text else None

    def token_bytes(self, token_id: int) -> list[int] | None:
        return list(self.tokenizer.token_bytes(token_id)) if self.has_text else None


class LogprobRow(NamedTuple):
    """Log-probabilities at one position: the chosen token first, then the likeliest in order.

    rank: of the chosen token.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


def unpack_logprobs(arrays: LogprobsArrays) -> list[LogprobRow]:
    """Return a row for each position, from `first_position` on."""
    width = arrays.width
    ids = np.frombuffer(arrays.token_ids, dtype="<i4").reshape(-1, width).tolist()
    values = np.frombuffer(arrays.logprobs, dtype="<f4").astype(np.float64)
    finite = np.where(values > MIN_LOGPROB, values, MIN_LOGPROB).reshape(-1, width).tolist()
    ranks = np.frombuffer(arrays.ranks, dtype="<i4").tolist()
    return [LogprobRow(*row) for row in zip(ids, finite, ranks, strict=True)]


@dataclass(slots=True)
class TextToken:
    """A token and the offset at which its text starts.

    row: None for the first token of a prompt, which has no log-probability.
    """

    token_id: int
    text_offset: int
    row: LogprobRow | None


def completion_logprobs(
    tokens: Sequence[TextToken], top: int, names: TokenNames
) -> dict[str, Iterator[Any]]:
    """Return the `logprobs` of a completion, in lists that are made when they are read.

    top: alternatives for each token.
    """
    return {
        "text_offset": (token.text_offset for token in tokens if names.has_text),
        "token_logprobs": (token.row.logprobs[0] if token.row else None for token in tokens),
        "tokens": (names.token_text(token.token_id) for token in tokens),
        "top_logprobs": (
            _best_by_text(token.row, top, names) if token.row else None for token in tokens
        ),
    }


class ChatLogprobs:
    """The `content` of a chat choice's `logprobs`: a list whose entries are made as they are read.

    As objects they take many times the memory of the tokens. top: alternatives for each token.
    """

    def __init__(self, tokens: Sequence[TextToken], top: int, names: TokenNames) -> None:
        self._tokens = tokens
        self._top = top
        self._names = names

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_bytes(self) -> int:
        """About the size in memory and as JSON."""
        rows = (token.row for token in self._tokens)
        return ENTRY_BYTES * sum(len(row.token_ids) for row in rows if row is not None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        known: dict[int, tuple[str, list[int] | None]] = {}
        for token in self._tokens:
            assert token.row is not None, "only prompts have tokens without log-probabilities"
            ids, values = token.row.token_ids, token.row.logprobs
            entries: list[dict[str, Any]] = []
            for token_id, logprob in zip(ids[: self._top + 1], values, strict=False):
                if token_id not in known:
                    if len(known) == _MAX_KNOWN:
                        known.clear()
                    names = self._names
                    known[token_id] = names.token_text(token_id), names.token_bytes(token_id)
                text, as_bytes = known[token_id]
                entries.append({"token": text, "logprob": logprob, "bytes": as_bytes})
            yield {**entries[0], "top_logprobs": entries[1:]}


def prompt_logprobs(
    rows: Sequence[LogprobRow | None], top: int, names: TokenNames
) -> Iterator[dict[str, Any] | None]:
    """Yield vLLM's `prompt_logprobs`: for each prompt token, id → logprob, rank and text."""
    return (None if row is None else _by_id(row, top, names) for row in rows)


def _by_id(row: LogprobRow, top: int, names: TokenNames) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    columns = zip(row.token_ids[: top + 1], row.logprobs, strict=False)
    for column, (token_id, logprob) in enumerate(columns):
        rank = column if column else row.rank
        entries.setdefault(
            str(token_id),
            {"logprob": logprob, "rank": rank, "decoded_token": names.decoded_token(token_id)},
        )
    return entries


def _best_by_text(row: LogprobRow, top: int, names: TokenNames) -> dict[str, float]:
    """Return text → log-probability of the likeliest token with this text (several have U+FFFD)."""
    best: dict[str, float] = {}
    for token_id, logprob in zip(row.token_ids[: top + 1], row.logprobs, strict=False):
        text = names.token_text(token_id)
        best[text] = max(logprob, best.get(text, logprob))
    return best
