"""Copies between two places in host memory, on a thread of their own.

    step      ── computes ───────────── computes ─────────────
    thread       copy copy copy            copy copy               the loop never waits for it

A copy releases the interpreter while it moves bytes, one block at a time. Stores run at a low
priority, since nobody waits for them; loads are what a request waits for. Owns the queue of one
direction.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from proto.kv_connector import TransferJob
from worker.kv_connector.offload.base import TransferResult
from worker.kv_connector.offload.pairs import device_blocks, pairs_of

logger = logging.getLogger("tokend.kv_connector")

STORE_NICENESS: Final = 10
LOAD_NICENESS: Final = 0
Bytes = npt.NDArray[np.uint8]


class HostCopies:
    """OffloadingHandler of one direction.

    blocks: [num_blocks, block_bytes], the device's. pool: [num_slots, factor, block_bytes].
    notify: called when a copy is over, by the thread. end: called at the end.
    """

    def __init__(
        self,
        blocks: Bytes,
        pool: Bytes,
        notify: Callable[[], None],
        niceness: int,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._blocks = blocks
        self._pool = pool
        self._notify = notify
        self._niceness = niceness
        self._end = end
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
        """What has not begun never does."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._end()
        self._thread.join()

    def _run(self) -> None:
        if self._niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (job := self._next()) is not None:
            result = self._result_of(job)
            with self._changed:
                self._finished.append(result)
                self._unfinished.discard(job.job_id)
                self._changed.notify_all()
            self._notify()

    def _next(self) -> TransferJob | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return None if self._closed else self._queue.popleft()

    def _result_of(self, job: TransferJob) -> TransferResult:
        """Whatever goes wrong: who waits for the copy must hear of it."""
        begun = time.monotonic()
        try:
            return self._copy(job, begun)
        except Exception:
            logger.exception("copy %d within host memory failed", job.job_id)
            return _failed(job, time.monotonic() - begun)

    def _copy(self, job: TransferJob, begun: float) -> TransferResult:
        num_bytes = 0
        factor = self._pool.shape[1]
        for pair in pairs_of(job, factor):
            if self._closed or pair.slot >= len(self._pool):
                return _failed(job, time.monotonic() - begun)
            ends = (self._pool[pair.slot, pair.part], self._blocks[pair.block])
            source, target = ends if job.is_load else ends[::-1]
            np.copyto(target, source)
            num_bytes += target.nbytes
        return TransferResult(job.job_id, True, num_bytes, time.monotonic() - begun, [])


def _failed(job: TransferJob, seconds: float) -> TransferResult:
    """Broken off, or there is no such slot: this rank's blocks are larger than the ledger knows."""
    failed = device_blocks(job) if job.is_load else []
    return TransferResult(job.job_id, False, 0, seconds, failed)
