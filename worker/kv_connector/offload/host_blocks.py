"""Blocks of the KV cache as bytes in host memory, on their way out or in.

Knows where a block lies, and that a GPU's memory is reached over a stream and a pinned page;
nothing of offloaded blocks or of media.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from worker.device.accelerator import Accelerator, CopyStream
from worker.kv_cache import KVCache


class BlockBytes(Protocol):
    """Copies of whole device blocks; used by one thread at a time."""

    block_bytes: int

    def moment(self) -> Callable[[], None]:
        """From the loop's thread; what it returns waits until all that was computed till now is."""
        ...

    def copy_out(self, block_id: int, memory: memoryview) -> None:
        """The block's bytes, once they are copied. memory: [block_bytes]"""
        ...

    def copy_in(self, memory: memoryview, block_id: int) -> None:
        """Returns when the block holds these. memory: [block_bytes]"""
        ...


def block_bytes_of(cache: KVCache) -> BlockBytes:
    """For the device that the cache lies on; a copier of its own for each thread."""
    rows = cache.buffer.view(cache.num_blocks, -1).view(torch.uint8)
    if rows.device.type == "cpu":
        return HostBlocks(rows)
    return DeviceBlockBytes(rows, Accelerator(rows.device), CopyStream(rows.device))


class HostBlocks:
    """Blocks of a CPU's cache, uint8 [num_blocks, block_bytes]. Copying lets other threads run."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows.numpy()
        self.block_bytes = self._rows.shape[1]

    def moment(self) -> Callable[[], None]:
        return _at_once  # a step returns when it is computed

    def copy_out(self, block_id: int, memory: memoryview) -> None:
        np.copyto(np.frombuffer(memory, np.uint8), self._rows[block_id])

    def copy_in(self, memory: memoryview, block_id: int) -> None:
        np.copyto(self._rows[block_id], np.frombuffer(memory, np.uint8))


class DeviceBlockBytes:
    """Blocks of a device's cache, over one page-locked page and a stream of its own.

    rows: uint8 [num_blocks, block_bytes], on the device. Steps may be computing still when a copy
    is ordered; the copying thread alone waits for them.
    """

    def __init__(self, rows: torch.Tensor, device: Accelerator, stream: CopyStream) -> None:
        self._rows = rows
        self.block_bytes = rows.shape[1]
        self._device = device
        self._stream = stream
        self._page = device.pinned(self.block_bytes)
        self._bytes = self._page.numpy()

    def moment(self) -> Callable[[], None]:
        event = self._device.event()
        event.record()
        return event.synchronize

    def copy_out(self, block_id: int, memory: memoryview) -> None:
        self._stream.copy(self._page, self._rows[block_id])
        self._stream.record_event().synchronize()
        np.copyto(np.frombuffer(memory, np.uint8), self._bytes)

    def copy_in(self, memory: memoryview, block_id: int) -> None:
        np.copyto(self._bytes, np.frombuffer(memory, np.uint8))
        self._stream.copy(self._rows[block_id], self._page)
        self._stream.record_event().synchronize()


def _at_once() -> None:
    """Nothing to wait for."""
