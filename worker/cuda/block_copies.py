"""Copies between a GPU's memory and pinned host memory, on a CUDA stream of their own.

    compute   ── step N ──────── step N+1 ──────── step N+2 ──
                       ╲                                          a copy runs after the steps that
    copies              ╲─ copy ─ copy ─ event                    were queued before it, and after
                                          ╲                       earlier copies
    watcher                                ╲─ notify

A store must not read KV before it is computed; a load must not overwrite a block that a queued step
still reads. Steps never wait for a copy: a request waits until its load's event is reached, and
blocks stay allocated until their store's event is reached.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch

from proto.messages.kv_connector import TransferJob
from worker.cuda.accelerator import Accelerator, CopyStream
from worker.kv_connector.offload.base import (
    HandlerContext,
    TransferResult,
    block_pairs,
    device_blocks,
)
from worker.kv_connector.offload.cpu_medium import pool_rows


def gpu_copies(
    blocks: torch.Tensor, num_bytes: int, context: HandlerContext
) -> "tuple[DeviceCopies, DeviceCopies]":
    """Return what stores blocks, uint8 [num_blocks, block_bytes], in a new pool, and loads them."""
    memory = Accelerator(blocks.device).pinned(num_bytes // context.num_ranks)
    pool = pool_rows(memory, context.factor, blocks.shape[1])
    store, load = (
        DeviceCopies(blocks, pool, CopyStream(blocks.device), EventWatcher(context.notify))
        for _ in range(2)
    )
    return store, load


class EventWatcher:
    """A thread that waits for CUDA events one after the other and calls `notify` after each."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._events: SimpleQueue[torch.cuda.Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def watch(self, event: torch.cuda.Event) -> None:
        self._events.put(event)

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            event.synchronize()
            self._notify()


@dataclass(frozen=True, slots=True)
class _DeviceCopy:
    """A queued copy and the event that is reached when it has finished."""

    job: TransferJob
    event: torch.cuda.Event
    started: float
    num_bytes: int


class DeviceCopies:
    """OffloadingHandler that queues copies on a CUDA stream.

    blocks: [num_blocks, block_bytes] uint8, on the device. pool: [num_slots, factor, block_bytes]
    uint8, pinned.
    """

    def __init__(
        self, blocks: torch.Tensor, pool: torch.Tensor, stream: CopyStream, watcher: EventWatcher
    ) -> None:
        self._blocks = blocks
        self._pool = pool
        self._stream = stream
        self._watcher = watcher
        self._copies: deque[_DeviceCopy] = deque()
        self._failed: list[TransferResult] = []

    def transfer_async(self, job: TransferJob) -> None:
        started = time.monotonic()
        pairs = list(block_pairs(job, self._pool.shape[1]))
        if any(pair.slot >= len(self._pool) for pair in pairs):
            failed = device_blocks(job) if job.is_load else []
            self._failed.append(TransferResult(job.job_id, False, 0, 0.0, failed))
            return
        self._stream.wait_for_compute()
        for pair in pairs:
            ends = (self._pool[pair.slot, pair.part], self._blocks[pair.block])
            source, target = ends if job.is_load else ends[::-1]
            self._stream.copy(target, source)
        event = self._stream.record_event()
        self._copies.append(_DeviceCopy(job, event, started, len(pairs) * self._pool.shape[2]))
        self._watcher.watch(event)

    def get_finished(self) -> list[TransferResult]:
        """Return finished copies in order; `seconds` includes the time until this call."""
        finished, self._failed = self._failed, []
        while self._copies and self._copies[0].event.query():  # type: ignore[no-untyped-call]
            copy = self._copies.popleft()
            seconds = time.monotonic() - copy.started
            finished.append(TransferResult(copy.job.job_id, True, copy.num_bytes, seconds, []))
        return finished

    def wait(self, job_ids: set[int]) -> None:
        for copy in self._copies:
            if copy.job.job_id in job_ids:
                copy.event.synchronize()

    def close(self) -> None:
        for copy in self._copies:
            copy.event.synchronize()
        self._watcher.close()


class DeviceBlockBytes:
    """BlockBytes of a GPU's cache, through one pinned page and a CUDA stream of its own.

    rows: uint8 [num_blocks, block_bytes], on the device. Steps may still be running when a copy is
    queued; only the copying thread waits for them.
    """

    def __init__(self, rows: torch.Tensor, device: Accelerator, stream: CopyStream) -> None:
        self._rows = rows
        self.block_bytes = rows.shape[1]
        self._device = device
        self._stream = stream
        self._page = device.pinned(self.block_bytes)
        self._bytes = self._page.numpy()

    def record_steps(self) -> Callable[[], None]:
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
