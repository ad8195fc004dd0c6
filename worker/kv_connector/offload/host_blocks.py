"""Blocks of the KV cache as bytes in host memory, on their way out or in.

Knows where a block lies, and that a GPU's memory is reached over a stream and a pinned page;
nothing of offloaded blocks or of media.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

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
    if cache.buffer.device.type == "cpu":
        return HostBlocks(cache)
    return DeviceBlockBytes(cache)


class HostBlocks:
    """Blocks of a CPU's cache. Copying lets other threads run."""

    def __init__(self, cache: KVCache) -> None:
        rows = cache.buffer.view(cache.num_blocks, -1)
        self._rows = rows.view(torch.uint8).numpy()
        self.block_bytes = self._rows.shape[1]

    def moment(self) -> Callable[[], None]:
        return _at_once  # a step returns when it is computed

    def copy_out(self, block_id: int, memory: memoryview) -> None:
        np.copyto(np.frombuffer(memory, np.uint8), self._rows[block_id])

    def copy_in(self, memory: memoryview, block_id: int) -> None:
        np.copyto(self._rows[block_id], np.frombuffer(memory, np.uint8))


class DeviceBlockBytes:
    """Blocks of a GPU's cache, over one pinned page and a stream of its own.

    Steps may be computing still when a copy is ordered; the copying thread alone waits for them.
    """

    def __init__(self, cache: KVCache) -> None:
        rows = cache.buffer.view(cache.num_blocks, -1)
        self._rows = rows.view(torch.uint8)
        self.block_bytes = self._rows.shape[1]
        self._page = torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=True)
        self._bytes = self._page.numpy()
        self._device = cache.buffer.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def moment(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def copy_out(self, block_id: int, memory: memoryview) -> None:
        with torch.cuda.stream(self._stream):
            self._page.copy_(self._rows[block_id], non_blocking=True)
            self._stream.synchronize()
        np.copyto(np.frombuffer(memory, np.uint8), self._bytes)

    def copy_in(self, memory: memoryview, block_id: int) -> None:
        np.copyto(self._bytes, np.frombuffer(memory, np.uint8))
        with torch.cuda.stream(self._stream):
            self._rows[block_id].copy_(self._page, non_blocking=True)
            self._stream.synchronize()


def _at_once() -> None:
    """Nothing to wait for."""
