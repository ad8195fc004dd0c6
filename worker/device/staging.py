"""Host arrays on their way to an accelerator, in one copy that nobody waits for.

A copy from page-locked memory is only queued: the device reads the memory later, and what
is written over it in between arrives instead. So there are two buffers in turns, and an
event tells that the copy out of a buffer has run before it is filled again:

    step 1   fill A, copy A, record a
    step 2   fill B, copy B, record b
    step 3   wait for a; fill A …          free by then, unless the device is two steps behind

Knows nothing of what the arrays mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from worker.device.accelerator import Accelerator, Event

_ALIGNMENT: Final = 16
_NUM_TURNS: Final = 2


@dataclass(slots=True)
class _Turn:
    host: torch.Tensor
    copied: Event


class Staging:
    """Uploads the arrays of a step together."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._turns = [
            _Turn(accelerator.staging(0), accelerator.event()) for _ in range(_NUM_TURNS)
        ]
        self._device = accelerator.zeros(0, torch.uint8)

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Flat copies on the device; the next upload replaces what is in them."""
        places: list[slice] = []
        end = 0
        for array in arrays:
            places.append(slice(end, end + array.nbytes))
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        turn = self._turns.pop(0)
        self._turns.append(turn)
        turn.copied.synchronize()
        if end > len(turn.host):
            turn.host = self._accelerator.staging(2 * end)
        if end > len(self._device):
            self._device = self._accelerator.zeros(2 * end, torch.uint8)
        host = turn.host.numpy()
        for array, place in zip(arrays, places, strict=True):
            host[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._device[:end].copy_(turn.host[:end], non_blocking=True)
        turn.copied.record()
        return [
            self._device[place].view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
            for array, place in zip(arrays, places, strict=True)
        ]
