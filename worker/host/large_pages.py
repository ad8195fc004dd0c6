"""Memory in large pages, for data that a step reads from end to end.

With pages of 4 KiB a core translates an address every few hundred nanoseconds, through two tables
in a virtual machine; with pages of 2 MiB weights are read a fifth faster. Weights are allocated
from maps of 64 MiB, since most are smaller than a page.
"""

import contextlib
import mmap
from threading import Lock
from typing import Final

import torch

from worker.host.memory_nodes import LARGE_PAGE, MemoryPlacement

_MAP_BYTES: Final = 64 << 20
_ALIGNMENT: Final = 64
"""A cache line, which the kernels rely on."""


def large_pages(num_bytes: int) -> torch.Tensor:
    """Return uint8 [num_bytes] of zeros, memory of its own in whole large pages.

    Without large pages in the system the memory has normal ones.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole_bytes = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    memory = mmap.mmap(-1, whole_bytes + LARGE_PAGE, flags=flags)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % LARGE_PAGE
    return whole[begin : begin + num_bytes]


class WeightArena:
    """Allocates memory for weights; a map is freed when nothing in it is in use.

    placement: puts weights on the memory nodes of the threads that read them. map_bytes: of a map.
    is_shared: whether other workers read the same memory (worker/host/shared_weights.py).
    """

    is_shared = False

    def __init__(
        self, placement: MemoryPlacement | None = None, map_bytes: int = _MAP_BYTES
    ) -> None:
        self._placement = placement
        self._map_bytes = map_bytes
        self._lock = Lock()
        self._free = torch.empty(0, dtype=torch.uint8)

    def place(self, key: str, num_bytes: int) -> tuple[torch.Tensor, bool]:
        """Return memory for a weight, uint8 [num_bytes], and whether it has the content already.

        key: equal for weights of the same content, "" for one that no other worker needs.
        """
        return self.allocate(num_bytes), False

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] of zeros, aligned to cache lines; thread-safe."""
        # map  | taken | taken | gap | taken | free …
        needed = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if needed > self._map_bytes:
                part = self._new_map(needed)[:num_bytes]
            else:
                if needed > len(self._free):
                    self._free = self._new_map(self._map_bytes)
                part, self._free = self._free[:num_bytes], self._free[needed:]
            if (
                self._placement is not None
            ):  # before another thread writes to a page that they share
                self._placement.place_weight(part)
        return part

    def _new_map(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] of zeros that begins a large page."""
        return large_pages(num_bytes)
