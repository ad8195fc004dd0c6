"""The interface of sampling backends: they find best tokens, edit logits, filter and draw.

The draw is Gumbel-max over one row of logits:

    token = argmax_i  logit_i / T − ln(−ln u_i)

u_i is a function of (seed, choice, position, token id i) alone, so a request with a seed draws
the same token in any row of any batch on any device. Small differences of the logits change the
token only at near ties; a draw by the cumulated distribution would not have this property.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.sampling.logit_edits import EditsByRow, RowEdits
from worker.sampling.row_params import RowParams


class RowChange(NamedTuple):
    """Logit edits of one greedy row. suppressed: stop tokens before min_tokens."""

    row: int
    edits: RowEdits
    suppressed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Best:
    """The best token of each row.

    logits: float32 [N], the largest logit before edits, NaN if the row has a NaN.
    token_ids: int64 [N], the best token after edits, lowest id among equals.
    """

    logits: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.int64]

    @property
    def nonfinite(self) -> npt.NDArray[np.bool_]:
        """Rows, bool [N], with a NaN or +inf, or with nothing but −inf; other −inf are valid."""
        return ~np.isfinite(self.logits)


class SamplingBackend(Protocol):
    """The operations of sampling on logits float32 [M, V].

    rows: int64 [N], the rows to work on. params: their records [N], with temperatures above 0.
    """

    def best(self, logits: torch.Tensor, changes: Sequence[RowChange] = ()) -> Best:
        """Return the best token of each row [M, V], in any floating dtype; leave the logits."""

    def edit(self, logits: torch.Tensor, edits: EditsByRow) -> None:
        """Apply logit edits to some rows in place, see logit_edits.py."""

    def filter(self, logits: torch.Tensor, rows: npt.NDArray[np.int64], params: RowParams) -> None:
        """Write −inf over the tokens that the filters remove; the best token always stays."""

    def draw(
        self, logits: torch.Tensor, rows: npt.NDArray[np.int64], params: RowParams
    ) -> npt.NDArray[np.int64]:
        """Draw a token for each row; return token ids [N]. A logit of −inf is never drawn."""
