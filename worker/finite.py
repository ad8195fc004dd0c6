"""Sequences whose numbers are none: found in passing, before anything is sampled.

One pass over the hidden states and one over the logits; both are small beside the
products that made them. −inf is legal among logits, because a mask puts it there, as
long as something else is left.
"""

import numpy as np
import torch
from numpy.typing import NDArray


def broken_sequences(hidden: torch.Tensor, query_start: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Bool [S]: which sequences have a NaN or an infinity in any hidden state of the step.

    hidden: [T, H]. query_start: int32 [S + 1], where each sequence's tokens begin.
    """
    sums = hidden.sum(dim=1, dtype=torch.float32).numpy()  # one odd term makes the sum odd
    return np.logical_or.reduceat(~np.isfinite(sums), query_start[:-1])


def broken_rows(logits: torch.Tensor) -> NDArray[np.bool_]:
    """Bool [N]: rows of logits float32 [N, V] with a NaN or +inf, or without any number."""
    best: NDArray[np.float32] = logits.amax(dim=1).numpy()  # of a NaN and a number it is the NaN
    return ~np.isfinite(best)
