"""Copies between an accelerator's memory and page-locked memory, on a queue of their own.

    compute   ── step N ──────── step N+1 ──────── step N+2 ──
                       ╲                                          a copy follows what was queued
    copies              ╲─ copy ─ copy ─ mark                     when it was ordered, and those
                                          ╲                       that were ordered before it
    watcher                                ╲─ notify

A store must not read what is not computed yet; a load must not write to a block that a step still
reads for whoever had it before. Computing never waits for a copy: a request waits for its load
until the mark has been reached, and what is stored is kept until then. Owns the copies under way
in one direction.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch

from proto.kv_connector import TransferJob
from worker.device.accelerator import Event
from worker.device.copy_stream import CopyStream
from worker.kv_connector.offload.base import TransferResult
from worker.kv_connector.offload.pairs import device_blocks, pairs_of


class Watcher(Protocol):
    """Says when marks are reached while nobody looks."""

    def watch(self, event: Event) -> None: ...

    def close(self) -> None: ...


class ThreadWatcher:
    """Watcher with a thread that waits for one mark after the other, and calls `notify`."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv marks", daemon=True)
        self._thread.start()

    def watch(self, event: Event) -> None:
        self._events.put(event)

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            event.synchronize()
            self._notify()


@dataclass(frozen=True, slots=True)
class _Copy:
    job: TransferJob
    mark: Event
    begun: float
    num_bytes: int


class DeviceCopies:
    """OffloadingHandler of one direction.

    blocks: [num_blocks, block_bytes] uint8 on the device. pool: [num_slots, factor, block_bytes]
    uint8, page-locked.
    """

    def __init__(
        self, blocks: torch.Tensor, pool: torch.Tensor, stream: CopyStream, watcher: Watcher
    ) -> None:
        self._blocks = blocks
        self._pool = pool
        self._stream = stream
        self._watcher = watcher
        self._copies: deque[_Copy] = deque()
        self._failed: list[TransferResult] = []

    def transfer_async(self, job: TransferJob) -> None:
        begun = time.monotonic()
        pairs = list(pairs_of(job, self._pool.shape[1]))
        if any(pair.slot >= len(self._pool) for pair in pairs):
            failed = device_blocks(job) if job.is_load else []
            self._failed.append(TransferResult(job.job_id, False, 0, 0.0, failed))
            return
        self._stream.wait_for_compute()
        for pair in pairs:
            ends = (self._pool[pair.slot, pair.part], self._blocks[pair.block])
            source, target = ends if job.is_load else ends[::-1]
            self._stream.copy(target, source)
        mark = self._stream.mark()
        self._copies.append(_Copy(job, mark, begun, len(pairs) * self._pool.shape[2]))
        self._watcher.watch(mark)

    def get_finished(self) -> list[TransferResult]:
        """In order; the time is that until somebody looked."""
        finished, self._failed = self._failed, []
        while self._copies and self._copies[0].mark.query():
            copy = self._copies.popleft()
            seconds = time.monotonic() - copy.begun
            finished.append(TransferResult(copy.job.job_id, True, copy.num_bytes, seconds, []))
        return finished

    def wait(self, job_ids: set[int]) -> None:
        for copy in self._copies:
            if copy.job.job_id in job_ids:
                copy.mark.synchronize()

    def close(self) -> None:
        for copy in self._copies:
            copy.mark.synchronize()
        self._watcher.close()
