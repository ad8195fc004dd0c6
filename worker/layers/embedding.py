"""Token embedding."""

import torch


class Embedding:
    """Rows of a table [vocab, hidden]."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] to a new [T, hidden]; raises IndexError for an id outside the table."""
        return self._table.index_select(0, token_ids)
