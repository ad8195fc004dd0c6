"""Sequences whose numbers are none: found in passing, before anything is sampled.

One pass over the hidden states, small beside the products that made them; that over the
logits also finds their best, see sample/best.py.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from worker.kernels import DTYPE_CODES, Kernels, row_kernels


def broken_sequences(hidden: torch.Tensor, query_start: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Bool [S]: which sequences have a NaN or an infinity in any hidden state of the step.

    hidden: [T, H]. query_start: int32 [S + 1], where each sequence's tokens begin.
    """
    kernels = row_kernels() if hidden.device.type == "cpu" else None
    if kernels is None:
        return broken_by_torch(hidden, query_start)
    return broken_by_kernel(kernels, hidden, query_start)


def broken_by_torch(hidden: torch.Tensor, query_start: NDArray[np.int32]) -> NDArray[np.bool_]:
    """As broken_sequences says."""
    return sequences_of(odd_tokens(hidden), query_start)


def odd_tokens(hidden: torch.Tensor) -> torch.Tensor:
    """Bool [T], where the hidden states are: tokens with anything that is not finite."""
    return ~hidden.isfinite().all(dim=1)


def sequences_of(odd: torch.Tensor, query_start: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Bool [S]: sequences with any such token; odd [T] is on the host."""
    return np.logical_or.reduceat(odd.numpy(), query_start[:-1])


def broken_by_kernel(
    kernels: Kernels, hidden: torch.Tensor, query_start: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """The same by a kernel."""
    hidden = hidden.contiguous()
    broken = np.empty(len(query_start) - 1, dtype=np.bool_)
    kernels.find_nonfinite(
        DTYPE_CODES[hidden.dtype],
        len(broken),
        query_start.ctypes.data,
        hidden.shape[1],
        hidden.data_ptr(),
        broken.ctypes.data,
    )
    return broken
