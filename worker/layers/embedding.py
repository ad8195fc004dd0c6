"""Token embedding."""

from typing import Protocol

import torch

from worker.layers.bf16_weight import Bf16Weight
from worker.layers.packed_weight import PackedWeight


class Table(Protocol):
    """Rows of numbers [vocab, hidden], however they are held."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        ...

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] to a new [T, hidden]; raises IndexError for an id outside the table."""
        ...


class DenseTable:
    """One tensor [vocab, hidden]."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self.dtype = table.dtype

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._table.index_select(0, token_ids)


class BlockTable:
    """A weight in blocks, which may be that of a tied head: rows are taken apart when asked for."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        self._weight = weight
        self.dtype = dtype

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weight.rows(token_ids, self.dtype)


class Bf16Table:
    """A weight of bfloat16 in panels, which may be that of a tied head: rows are put together when
    asked for."""

    dtype = torch.bfloat16

    def __init__(self, weight: Bf16Weight) -> None:
        self._weight = weight

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weight.rows(token_ids)


class Embedding:
    """Rows of a table, times a scale that is first rounded to the table's dtype."""

    def __init__(self, table: Table, scale: float = 1.0) -> None:
        self._table = table
        self._scale = torch.tensor(scale, dtype=table.dtype)
        self._scaled = scale != 1.0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] to a new [T, hidden]; raises IndexError for an id outside the table."""
        rows = self._table.rows(token_ids)
        return rows.mul_(self._scale) if self._scaled else rows
