"""Memory of a pool, committed before the first copy needs it.

The system finds and clears a page when it is first written to, and that takes ten times as
long as the copy that writes it. So a thread that runs only where nobody else wants to has it done
ahead of the copies, which find the pages there:

    pool    | committed ─────────────▶ |  …                      |
              slots are given out from here on

What lies in the memory is not changed. Owns the thread; where the system does not know how to
commit memory, pages are found when they are written to, as without it.
"""

import ctypes
import errno
import logging
import os
import threading
from typing import Final, Protocol

import torch

logger = logging.getLogger("tokend.kv_connector")

_PIECE: Final = 2 << 20
"""A large page: what the thread is not to be stopped in the middle of for long."""
_PAGE: Final = 4096
_MADV_POPULATE_WRITE: Final = 23
_END_SECONDS: Final = 1.0


class Commit(Protocol):
    """Has the pages of [address, address + num_bytes) found; returns whether that is possible."""

    def __call__(self, address: int, num_bytes: int) -> bool: ...


class CommitAhead:
    """Begins at once. memory: uint8 [num_bytes], kept until all of it is committed, or `close`."""

    def __init__(self, memory: torch.Tensor, commit: Commit | None = None) -> None:
        self._memory = memory
        self._commit = commit or _commit
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv pages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is left to do."""
        self._thread.join()

    def close(self) -> None:
        """Leave the rest to whoever writes to it."""
        self._closed.set()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        _come_last()
        begin = -(-self._memory.data_ptr() // _PAGE) * _PAGE
        end = (self._memory.data_ptr() + self._memory.nbytes) // _PAGE * _PAGE
        for address in range(begin, end, _PIECE):
            if self._closed.is_set() or not self._commit(address, min(_PIECE, end - address)):
                return


def _come_last() -> None:
    """This thread runs where a core would be idle otherwise."""
    try:
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        logger.debug("memory is committed at the usual priority: %s", error)


def _commit(address: int, num_bytes: int) -> bool:
    """Linux 5.14 or later; other threads of ours run meanwhile."""
    while _MADVISE(address, num_bytes, _MADV_POPULATE_WRITE):
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            return False
    return True


_MADVISE: Final = ctypes.CDLL(None, use_errno=True).madvise
_MADVISE.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADVISE.restype = ctypes.c_int
