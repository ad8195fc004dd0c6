"""Memory in large pages, for what a step reads from end to end.

In pages of 4 KiB a core looks up where the next one lies every few hundred nanoseconds, which in a
virtual machine are two tables; in pages of 2 MiB weights are read a fifth faster. Owns maps of
memory, from which weights take their parts one after the other: most are smaller than a page.
"""

import contextlib
import mmap
from threading import Lock
from typing import Final

import torch

_LARGE_PAGE: Final = 2 << 20
_MAP_BYTES: Final = 64 << 20
_ALIGNMENT: Final = 64
"""A cache line, which the kernels rely on."""


def large_pages(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of zeros, memory of its own that begins with a large page.

    The system is asked for large pages; where it has none the memory is as any other.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes + _LARGE_PAGE, flags=flags)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % _LARGE_PAGE
    return whole[begin : begin + num_bytes]


class WeightArena:
    """Gives out memory that is returned when nothing of its map is in use any more."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] with anything in it, aligned to cache lines; for several threads."""
        # map  | taken | taken | gap | taken | free …
        needed = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if needed > _MAP_BYTES:
            return large_pages(needed)[:num_bytes]
        with self._lock:
            if needed > len(self._free):
                self._free = large_pages(_MAP_BYTES)
            part, self._free = self._free[:num_bytes], self._free[needed:]
        return part
