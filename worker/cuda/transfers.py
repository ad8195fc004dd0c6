"""Copies of a step's arrays to an accelerator, and of its results back.

It gets all arrays of a step in one queued copy (`QueuedTransfers`). Small results come back in one
queued copy with an event (`Downloader`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from worker.batch.transfers import Transfers
from worker.cuda.accelerator import Accelerator

_ALIGNMENT: Final = 16
_NUM_BUFFERS: Final = 2


@dataclass(slots=True)
class _UploadBuffer:
    """Page-locked memory, and the event after the last copy from it."""

    host: torch.Tensor
    copied: torch.cuda.Event


class QueuedTransfers(Transfers):
    """Transfers of an accelerator: copies to it are queued, copies from it are waited for.

    The device reads page-locked memory some time after a copy is queued, so the memory must not
    change until then. Two buffers take turns; the event of a buffer is awaited before it is
    filled again:

        step 1   fill A, copy A, record a
        step 2   fill B, copy B, record b
        step 3   wait for a; fill A …       waits only if the device is two steps behind
    """

    decodes_first = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._buffers = [
            _UploadBuffer(accelerator.pinned(0), accelerator.event()) for _ in range(_NUM_BUFFERS)
        ]
        self._device = accelerator.zeros(0, torch.uint8)

    def to_device(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Queue one copy of the arrays; return flat tensors, valid until the next call."""
        spans: list[slice] = []
        end = 0
        for array in arrays:
            spans.append(slice(end, end + array.nbytes))
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        buffer.copied.synchronize()
        if end > len(buffer.host):
            buffer.host = self._accelerator.pinned(2 * end)
        if end > len(self._device):
            self._device = self._accelerator.zeros(2 * end, torch.uint8)
        host = buffer.host.numpy()
        for array, span in zip(arrays, spans, strict=True):
            host[span] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._device[:end].copy_(buffer.host[:end], non_blocking=True)
        buffer.copied.record()
        return [
            self._device[span].view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
            for array, span in zip(arrays, spans, strict=True)
        ]

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._accelerator.fetch(tensor)


class Download:
    """Tensors whose copy to the host is queued."""

    def __init__(
        self,
        host: torch.Tensor,
        event: torch.cuda.Event,
        parts: Sequence[tuple[slice, torch.dtype]],
        free_buffers: list[torch.Tensor],
    ) -> None:
        self._host = host
        self._event = event
        self._parts = parts
        self._free_buffers = free_buffers

    def is_ready(self) -> bool:
        """Return whether the copy has run, so that `arrays` does not wait."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Wait for the copy; return flat arrays in the order of the tensors. Call it once."""
        self._event.synchronize()
        found = [self._host[span].view(dtype).numpy().copy() for span, dtype in self._parts]
        self._free_buffers.append(self._host)
        return found


class Downloader:
    """Queues copies of small device tensors to the host; several may be in flight.

        device    [ tokens | logits | flags ] ──▶ page-locked memory, then an event

    A buffer is reused after its arrays were read.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free_buffers: list[torch.Tensor] = []

    def start_download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Queue one copy of contiguous tensors, as they are when the device reaches it."""
        parts: list[tuple[slice, torch.dtype]] = []
        chunks: list[torch.Tensor] = []
        end = 0
        for tensor in tensors:
            padding = -end % _ALIGNMENT
            if padding:
                chunks.append(chunks[0].new_zeros(padding))
            chunk = tensor.reshape(-1).view(torch.uint8)
            begin = end + padding
            end = begin + len(chunk)
            parts.append((slice(begin, end), tensor.dtype))
            chunks.append(chunk)
        host = self._buffer(end)
        host[:end].copy_(torch.cat(chunks), non_blocking=True)
        event = self._accelerator.event()
        event.record()
        return Download(host, event, parts, self._free_buffers)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        host = self._free_buffers.pop() if self._free_buffers else self._accelerator.pinned(0)
        return host if len(host) >= num_bytes else self._accelerator.pinned(2 * num_bytes)
