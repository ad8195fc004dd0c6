"""The way of a step's arrays to where the model computes, and of its results back.

On a CPU both ways are no way: arrays are tensors. To an accelerator arrays go together
through page-locked memory, and a result is waited for.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch

from worker.device.accelerator import Accelerator
from worker.device.staging import Staging


class Placement(Protocol):
    """Where a model runner's tensors are.

    decodes_first: whether the sequences of a step are put in the order in which attention
        wants them, those with one token before the others.
    """

    decodes_first: bool

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Flat tensors of these, until the next call; nobody waits."""
        ...

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the host, waited for."""
        ...


class OnHost:
    """Placement of a model on the CPU."""

    decodes_first = False

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """The same memory."""
        return [torch.from_numpy(each) for each in arrays]

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor."""
        return tensor


class OnDevice:
    """Placement of a model on an accelerator."""

    decodes_first = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._staging = Staging(accelerator)
        self.fetch = accelerator.fetch

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """As the Protocol says, in one copy."""
        return self._staging.upload(arrays)
