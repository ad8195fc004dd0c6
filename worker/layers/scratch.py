"""Memory for kernels on a CPU, which need it until they return."""

import torch


class ByteBuffer:
    """Grows to the most bytes that were requested at once; for kernels, on a CPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def address(self, num_bytes: int) -> int:
        """Return the address of `num_bytes` bytes, aligned to a cache line, of any contents."""
        if num_bytes > len(self._memory):
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)  # torch aligns it
        return self._memory.data_ptr()
