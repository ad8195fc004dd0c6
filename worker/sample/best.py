"""The largest score of each row and where it is: the token of a greedy row.

The same pass says which rows are numbers at all. −inf is legal among logits, because a
mask puts it there, as long as something else is left.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels import DTYPE_CODES, Kernels


@dataclass(frozen=True, slots=True)
class Best:
    """scores: float32 [N], NaN where a row has one. token_ids: int64 [N], lowest of equals."""

    scores: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.int64]

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """Bool [N]: rows with a NaN or +inf, or without any number."""
        return ~np.isfinite(self.scores)


def best_by_torch(logits: torch.Tensor) -> Best:
    """The best of each row of logits [N, V], in any floating dtype."""
    scores: npt.NDArray[np.float32] = logits.amax(dim=1).float().numpy()
    return Best(scores, logits.argmax(dim=1).numpy())


def best_by_kernel(kernels: Kernels, logits: torch.Tensor) -> Best:
    """The same, in one pass."""
    num_rows, vocab_size = logits.shape
    logits = logits.contiguous()
    scores = np.empty(num_rows, dtype=np.float32)
    token_ids = np.empty(num_rows, dtype=np.int64)
    kernels.find_best(
        DTYPE_CODES[logits.dtype],
        num_rows,
        vocab_size,
        logits.data_ptr(),
        scores.ctypes.data,
        token_ids.ctypes.data,
    )
    return Best(scores, token_ids)
