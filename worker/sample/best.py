"""The largest score of each row and where it is: the token of a greedy row.

The same pass says which rows are numbers at all. −inf is legal among logits, because a
mask puts it there, as long as something else is left. Rows that ask for changes of their scores
have their token with these made, without another pass and with the logits left as they are.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels import DTYPE_CODES, Kernels
from worker.sample.edits import NEVER, edit_logits
from worker.sample.row_edits import RowEdits


class Change(NamedTuple):
    """What changes the scores of a row. late: tokens that cannot be chosen yet."""

    row: int
    edits: RowEdits
    late: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Best:
    """scores: float32 [N] as they came, NaN where a row has one. token_ids: int64 [N], those of
    the best scores once changes are made, lowest of equals."""

    scores: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.int64]

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """Bool [N]: rows with a NaN or +inf, or without any number."""
        return ~np.isfinite(self.scores)


def best_by_torch(logits: torch.Tensor, changes: Sequence[Change] = ()) -> Best:
    """The best of each row of logits [N, V], in any floating dtype, with the changes made."""
    scores: npt.NDArray[np.float32] = logits.amax(dim=1).float().numpy()
    best = Best(scores, logits.argmax(dim=1).numpy())
    for change in changes:
        changed = logits[change.row : change.row + 1].float().clone()
        edit_logits(changed, [(0, change.edits)])
        changed[0, list(change.late)] = float(NEVER)
        best.token_ids[change.row] = changed.argmax()
    return best


def best_by_kernel(kernels: Kernels, logits: torch.Tensor, changes: Sequence[Change] = ()) -> Best:
    """The same, in one pass."""
    num_rows, vocab_size = logits.shape
    logits = logits.contiguous()
    scores = np.empty(num_rows, dtype=np.float32)
    token_ids = np.empty(num_rows, dtype=np.int64)
    edits = _addresses(num_rows, changes)
    kernels.find_best(
        DTYPE_CODES[logits.dtype],
        num_rows,
        vocab_size,
        logits.data_ptr(),
        scores.ctypes.data,
        token_ids.ctypes.data,
        ctypes.addressof(edits) if edits is not None else None,
    )
    return Best(scores, token_ids)


def _addresses(num_rows: int, changes: Sequence[Change]) -> "ctypes.Array[c_void_p] | None":
    if not changes:
        return None
    edits = (c_void_p * num_rows)()
    for change in changes:
        edits[change.row] = change.edits.address(change.late)
    return edits
