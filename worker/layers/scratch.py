"""Reusable memory for intermediate results of a step that are read at once.

Results that the sampler or the engine reads later must not be kept here. On an accelerator the
memory is new each time: torch caches it there, and a captured CUDA graph keeps using the memory
that it was recorded with.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for rows: tensor [num_rows, size], contiguous, and its address."""

    tensor: torch.Tensor
    address: int
    num_rows: int


class RowBuffer:
    """Grows to the most rows of `size` elements that were requested at once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory = torch.empty((0, size))
        self._space = Scratch(self._memory, 0, 0)

    def rows(self, like: torch.Tensor) -> Scratch:
        """Return as many rows as `like` has, of its dtype and device; contents are arbitrary."""
        count = like.shape[0]
        if like.device.type != "cpu":
            tensor = like.new_empty((count, self._size))
            return Scratch(tensor, tensor.data_ptr(), count)
        if (self._memory.dtype, self._memory.device) != (like.dtype, like.device):
            self._memory = like.new_empty((0, self._size))
        elif count == self._space.num_rows:
            return self._space
        if count > len(self._memory):
            self._memory = like.new_empty((count, self._size))
        tensor = self._memory[:count]
        self._space = Scratch(tensor, tensor.data_ptr(), count)
        return self._space


class ByteBuffer:
    """Grows to the most bytes that were requested at once; for kernels, on a CPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def address(self, num_bytes: int) -> int:
        """Return the address of `num_bytes` bytes, aligned to a cache line, of any contents."""
        if num_bytes > len(self._memory):
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)  # torch aligns it
        return self._memory.data_ptr()
