"""Copies of KV blocks within host memory, on a thread that steps do not wait for.

An idle-priority thread commits the memory of the pool ahead of the copies (`CommitAhead`).
"""

import ctypes
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.messages.kv_connector import TransferJob
from worker.host.large_pages import large_pages
from worker.kv_connector.offload.base import (
    STORE_NICENESS,
    HandlerContext,
    TransferResult,
    block_pairs,
    device_blocks,
)
from worker.kv_connector.offload.cpu_medium import pool_rows

logger = logging.getLogger("tokend.kv_connector")

_COMMIT_BYTES: Final = 2 << 20
"""Size of a large page, which the thread commits at a time."""
_PAGE: Final = 4096
_MADV_POPULATE_WRITE: Final = 23
_CLOSE_SECONDS: Final = 1.0
LOAD_NICENESS: Final = 0
Commit = Callable[[int, int], bool]
"""Commits the pages of [address, address + num_bytes); returns whether the system can do that."""
Bytes = npt.NDArray[np.uint8]


def host_copies(
    blocks: torch.Tensor, num_bytes: int, context: HandlerContext
) -> "tuple[HostCopies, HostCopies]":
    """Return what stores blocks, uint8 [num_blocks, block_bytes], in a new pool, and loads them."""
    # Ranks have different numbers of heads; the engine decides how many slots are used.
    memory = large_pages(num_bytes)
    ahead = CommitAhead(memory[: num_bytes // context.num_ranks])
    pool = pool_rows(memory, context.factor, blocks.shape[1]).numpy()
    return (
        HostCopies(blocks.numpy(), pool, context.notify, STORE_NICENESS, ahead),
        HostCopies(blocks.numpy(), pool, context.notify, LOAD_NICENESS),
    )


class CommitAhead:
    """A thread that commits a pool's memory before the first copies write to it.

    The kernel finds and clears a page at its first write, which takes ten times as long as the
    copy. The thread runs only when a core is idle, and does not change the memory's content. If the
    system cannot commit memory ahead, pages are committed at their first write.
    memory: uint8 [num_bytes], referenced until all of it is committed or until `close`.
    """

    def __init__(self, memory: torch.Tensor, commit: Commit | None = None) -> None:
        self._memory = memory
        self._commit = commit or _commit
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv pages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def close(self) -> None:
        """Stop; the remaining pages are committed at their first write."""
        self._closed.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        _set_idle_priority()
        begin = -(-self._memory.data_ptr() // _PAGE) * _PAGE
        end = (self._memory.data_ptr() + self._memory.nbytes) // _PAGE * _PAGE
        for address in range(begin, end, _COMMIT_BYTES):
            if self._closed.is_set() or not self._commit(
                address, min(_COMMIT_BYTES, end - address)
            ):
                return


def _set_idle_priority() -> None:
    """Let this thread run only when a core is idle."""
    try:
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        logger.debug("memory is committed at the usual priority: %s", error)


def _commit(address: int, num_bytes: int) -> bool:
    """Commit pages (Linux 5.14 or later), with the GIL released."""
    while _MADVISE(address, num_bytes, _MADV_POPULATE_WRITE):
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            return False
    return True


_MADVISE: Final = ctypes.CDLL(None, use_errno=True).madvise
_MADVISE.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADVISE.restype = ctypes.c_int


class HostCopies:
    """OffloadingHandler that copies within host memory, on a thread.

    The GIL is released during each block's copy. Stores run at low priority.
    blocks: [num_blocks, block_bytes], the KV cache. pool: [num_slots, factor, block_bytes].
    notify: called by the thread after each copy. commit_ahead: closed together with this handler.
    """

    def __init__(
        self,
        blocks: Bytes,
        pool: Bytes,
        notify: Callable[[], None],
        niceness: int,
        commit_ahead: CommitAhead | None = None,
    ) -> None:
        self._blocks = blocks
        self._pool = pool
        self._notify = notify
        self._niceness = niceness
        self._commit_ahead = commit_ahead
        self._changed = threading.Condition()
        self._queue: deque[TransferJob] = deque()
        self._unfinished: set[int] = set()
        self._finished: list[TransferResult] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv copies", daemon=True)
        self._thread.start()

    def transfer_async(self, job: TransferJob) -> None:
        with self._changed:
            self._unfinished.add(job.job_id)
            self._queue.append(job)
            self._changed.notify_all()

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (job_ids & self._unfinished))

    def close(self) -> None:
        """Drop queued copies and wait for the running one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._commit_ahead is not None:
            self._commit_ahead.close()
        self._thread.join()

    def _run(self) -> None:
        if self._niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (job := self._next()) is not None:
            result = self._try_copy(job)
            with self._changed:
                self._finished.append(result)
                self._unfinished.discard(job.job_id)
                self._changed.notify_all()
            self._notify()

    def _next(self) -> TransferJob | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return None if self._closed else self._queue.popleft()

    def _try_copy(self, job: TransferJob) -> TransferResult:
        """Copy; an error makes a failed result, because a request may wait for it."""
        started = time.monotonic()
        try:
            return self._copy(job, started)
        except Exception:
            logger.exception("copy %d within host memory failed", job.job_id)
            return _failed(job, time.monotonic() - started)

    def _copy(self, job: TransferJob, started: float) -> TransferResult:
        num_bytes = 0
        factor = self._pool.shape[1]
        for pair in block_pairs(job, factor):
            if self._closed or pair.slot >= len(self._pool):
                return _failed(job, time.monotonic() - started)
            ends = (self._pool[pair.slot, pair.part], self._blocks[pair.block])
            source, target = ends if job.is_load else ends[::-1]
            np.copyto(target, source)
            num_bytes += target.nbytes
        return TransferResult(job.job_id, True, num_bytes, time.monotonic() - started, [])


def _failed(job: TransferJob, seconds: float) -> TransferResult:
    """Make the result of an interrupted copy, or of a slot beyond this rank's pool."""
    failed = device_blocks(job) if job.is_load else []
    return TransferResult(job.job_id, False, 0, seconds, failed)


class HostBlockBytes:
    """BlockBytes of a CPU's cache. Copies release the GIL.

    rows: uint8 [num_blocks, block_bytes].
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows.numpy()
        self.block_bytes = self._rows.shape[1]

    def record_steps(self) -> Callable[[], None]:
        return lambda: None  # a step on a CPU returns when it is computed

    def copy_out(self, block_id: int, memory: memoryview) -> None:
        np.copyto(np.frombuffer(memory, np.uint8), self._rows[block_id])

    def copy_in(self, memory: memoryview, block_id: int) -> None:
        np.copyto(self._rows[block_id], np.frombuffer(memory, np.uint8))
