"""Copies of a step's arrays to the device that computes it, and of its results to the host.

HostTransfers are those of devices that compute in the host's memory. A GPU gets all arrays of a
step in one queued copy (worker/cuda/transfers.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class Transfers(ABC):
    """The way between the host and the memory of a model.

    decodes_first: whether sequences with one token are put before the others in a step, as
    attention on an accelerator requires.
    """

    decodes_first = False

    @abstractmethod
    def to_device(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Return tensors of the arrays, flat or of their shape; valid until the next call."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host; waits for the device."""

    def nonfinite_sequences(
        self, hidden: torch.Tensor, query_start: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.bool_]:
        """Return the sequences, bool [S], with a NaN or an infinity in a hidden state of the step.

        hidden: [T, H]. query_start: int32 [S + 1], where each sequence's tokens begin.
        """
        tokens = self.to_host(nonfinite_tokens(hidden)).numpy()
        return any_token_of_sequences(tokens, query_start)


class HostTransfers(Transfers):
    """Nothing is copied: arrays and tensors share memory."""

    def to_device(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def nonfinite_tokens(hidden: torch.Tensor) -> torch.Tensor:
    """Return the tokens, bool [T], whose hidden states [T, H] are not all finite."""
    return ~hidden.isfinite().all(dim=1)


def any_token_of_sequences(
    tokens: npt.NDArray[np.bool_], query_start: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Return the sequences, bool [S], with a True token; tokens: bool [T]."""
    return np.logical_or.reduceat(tokens, query_start[:-1])
