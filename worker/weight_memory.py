"""Memory for weights, in pages of 2 MiB where the system has them.

Owns how that memory is got, and which part of it is given out; knows nothing of what is put
there. Reading a weight once is what a step of few rows costs, and with pages of 4 KiB the
processor looks up an address 500 times as often: reading is a third slower. Most weights are
smaller than a large page, so they share ranges:

    a range   | weight 0 | weight 1 |   weight 2   | …  never touched, so no memory  |
"""

import mmap
from threading import Lock
from typing import Final

import numpy as np
import torch

_RANGE_BYTES: Final = 64 << 20
_LARGE_PAGE: Final = 2 << 20
_ALIGNMENT: Final = 64
"""Bytes of a cache line, on which the kernels rely."""


class WeightMemory:
    """May be used by several threads at once. A range is given back with its last weight."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._range = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], zeros, from a cache line on."""
        with self._lock:
            if self._used + num_bytes > self._range.nbytes:
                self._range, self._used = _new_range(max(num_bytes, _RANGE_BYTES)), 0
            part = self._range[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return part


def _new_range(num_bytes: int) -> torch.Tensor:
    """Zeros that begin on a large page; its pages are taken from the system on first touch."""
    memory = mmap.mmap(-1, num_bytes + _LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, dtype=np.uint8)
    start = -raw.ctypes.data % _LARGE_PAGE
    return torch.from_numpy(raw[start : start + num_bytes])
