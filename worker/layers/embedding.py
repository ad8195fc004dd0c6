"""Token embedding, and the tables that it looks rows up in."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.layers.linear import sum_in_float32
from worker.layers.norm import Norm
from worker.parallel.group import RankGroup


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """Rows of numbers [vocab, hidden] in any format.

    dtype: of the rows. rows: looks up int64 [T], a new [T, hidden]. An id outside the table is an
    IndexError where the host has the ids.
    """

    dtype: torch.dtype
    rows: Callable[[torch.Tensor], torch.Tensor]


def dense_table(table: torch.Tensor) -> EmbeddingTable:
    """Return the rows of one tensor [vocab, hidden]."""
    return EmbeddingTable(table.dtype, lambda token_ids: table.index_select(0, token_ids))


def mapped_table(stored: torch.Tensor, dtype: torch.dtype) -> EmbeddingTable:
    """Return the rows of a view [vocab, hidden] of a mapped file, which are converted on use.

    The pages that lookups touch are in the page cache, which all processes share.
    """
    return EmbeddingTable(dtype, lambda token_ids: stored.index_select(0, token_ids).to(dtype))


def vocab_parallel_table(
    table: EmbeddingTable, group: RankGroup, own: range, num_tokens: int, *, checks_ids: bool
) -> EmbeddingTable:
    """Return a table of `num_tokens` rows of which this rank holds those of the tokens in `own`.

    checks_ids: raise IndexError for an id outside; the host must have the ids for that.
    """

    def rows(token_ids: torch.Tensor) -> torch.Tensor:
        if checks_ids and (invalid := (token_ids < 0) | (token_ids >= num_tokens)).any():
            raise IndexError(f"row {int(token_ids[invalid][0])} of {num_tokens}")
        elsewhere = (token_ids < own.start) | (token_ids >= own.stop)
        found = table.rows((token_ids - own.start).masked_fill_(elsewhere, 0))
        found.masked_fill_(elsewhere[:, None], 0.0)
        # one summand of each number is not zero, so nothing is rounded
        return sum_in_float32(group.gather(found)).to(found.dtype)

    return EmbeddingTable(table.dtype, rows)


class Embedding:
    """Rows of a table, times a scale that is first rounded to the table's dtype."""

    def __init__(self, table: EmbeddingTable, scale: float = 1.0) -> None:
        self._table = table
        self._scale = torch.tensor(scale, dtype=table.dtype)
        self._scaled = scale != 1.0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] to a new [T, hidden]; raises IndexError for an id outside the table."""
        rows = self._table.rows(token_ids)
        return self.scaled(rows) if self._scaled else rows

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [T, hidden] of the table times the scale; may reuse their memory."""
        return rows.mul_(self._scale)

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the same without the scale."""
        return self._table.rows(token_ids)


class EncoderInput:
    """The input of an encoder's layers: the norm of a sum of embeddings, computed in float32.

    words: of the tokens. positions, token_types: tables [rows, hidden] in float32, or None;
    first_position: row of position 0.
    """

    def __init__(
        self,
        words: Embedding,
        positions: torch.Tensor | None,
        first_position: int,
        token_types: torch.Tensor | None,
        norm: Norm,
    ) -> None:
        self._words = words
        self._token_types = token_types
        self._norm = norm
        self._positions = None if positions is None else positions[first_position:]
        assert token_types is None or positions is not None, "no family has types without positions"
        if self._positions is not None and token_types is not None:
            self._positions = self._positions + token_types[0]
            self._token_types = token_types - token_types[0]

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor | None
    ) -> torch.Tensor:
        """Return [T, hidden] for int64 [T]; token_types: None if all are 0."""
        words = self._words(token_ids)
        total = words.float()
        if self._positions is not None:
            total = total + self._positions.index_select(0, positions)
        if self._token_types is not None and token_types is not None:
            total = total + self._token_types.index_select(0, token_types)
        return self._norm(total).to(words.dtype)
