"""Token embedding."""

import torch


class Embedding:
    """Rows of a table [vocab, hidden], times a scale that is first rounded to the table's dtype."""

    def __init__(self, table: torch.Tensor, scale: float = 1.0) -> None:
        self._table = table
        self._scale = torch.tensor(scale, dtype=table.dtype, device=table.device)
        self._scaled = scale != 1.0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] to a new [T, hidden]; raises IndexError for an id outside the table."""
        rows = self._table.index_select(0, token_ids)
        return rows.mul_(self._scale) if self._scaled else rows
