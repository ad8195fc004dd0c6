"""Small tensors of a device on their way to the host, in one copy that nobody waits for.

    device    [ tokens | scores | marks ] ──▶ page-locked memory, then an event

Several may be under way; each has memory of its own, which is used again once it was read.
Knows nothing of what the tensors mean.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy.typing as npt
import torch

from worker.device.accelerator import Accelerator, Event

_ALIGNMENT: Final = 16


class Download:
    """Tensors on their way."""

    def __init__(
        self,
        host: torch.Tensor,
        event: Event,
        parts: Sequence[tuple[slice, torch.dtype]],
        free: list[torch.Tensor],
    ) -> None:
        self._host = host
        self._event = event
        self._parts = parts
        self._free = free

    def ready(self) -> bool:
        """Whether `arrays` would not wait."""
        return self._event.query()

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Flat copies on the host, in order; waits. Called once."""
        self._event.synchronize()
        found = [self._host[place].view(dtype).numpy().copy() for place, dtype in self._parts]
        self._free.append(self._host)
        return found


class Results:
    """Starts downloads, from one thread."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free: list[torch.Tensor] = []

    def send(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Queue the copy of these, contiguous, as they will be when the device comes to it."""
        parts: list[tuple[slice, torch.dtype]] = []
        pieces: list[torch.Tensor] = []
        end = 0
        for tensor in tensors:
            padding = -end % _ALIGNMENT
            if padding:
                pieces.append(pieces[0].new_zeros(padding))
            piece = tensor.reshape(-1).view(torch.uint8)
            begin = end + padding
            end = begin + len(piece)
            parts.append((slice(begin, end), tensor.dtype))
            pieces.append(piece)
        host = self._memory(end)
        host[:end].copy_(torch.cat(pieces), non_blocking=True)
        event = self._accelerator.event()
        event.record()
        return Download(host, event, parts, self._free)

    def _memory(self, num_bytes: int) -> torch.Tensor:
        host = self._free.pop() if self._free else self._accelerator.staging(0)
        return host if len(host) >= num_bytes else self._accelerator.staging(2 * num_bytes)
