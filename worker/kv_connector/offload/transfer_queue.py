"""Copies between the KV cache and a slow medium (disk, Redis), on a thread for each direction.

`TransferQueue` keeps the order and the time limits, a `Medium` reads and writes blocks. A copy that
exceeds its time limit is reported as failed at that moment, even if its thread is blocked, and so
are later copies: a medium that hangs delays no step.

    copying thread        may access the cache? ── yes ─▶ copies a block ── …  ─▶ end
    loop, time limit                    │ end: from here on the answer is no

After `CopyJob.end`, data that the medium still delivers only reaches the copying thread's buffer.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from proto.messages.kv_connector import TransferJob
from proto.settings.kv_media import HEADER_BYTES, MAX_KEY_BYTES
from worker.kv_connector.offload.base import HandlerContext, TransferResult
from worker.kv_connector.offload.block_image import BlockBytes, BlockLabel, is_valid, seal

logger = logging.getLogger("tokend.kv_media")

NULL_BLOCK: Final = 0
_STORE_WAIT: Final = 0.02
"""Seconds that a step waits for stores before it cancels them."""
_CLOSE_SECONDS: Final = 1.0
"""Seconds to wait for threads at close; a hanging thread ends with the process."""
SecondsLeft = Callable[[], float]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One offloaded block of a job.

    blocks: [factor] device blocks, NULL_BLOCK for parts that are not copied.
    """

    group: int
    key: bytes
    blocks: Sequence[int]

    @property
    def block_ids(self) -> list[int]:
        """The device blocks that are copied."""
        return [block_id for block_id in self.blocks if block_id != NULL_BLOCK]


def offloaded_blocks(job: TransferJob, factor: int) -> list[BlockCopy]:
    """Return the offloaded blocks of a job, group by group, in sequence order.

    key 0              key 1              factor 4
    .   .   7   2  |   9   4   1   .      skip 2, block_ids [7 2 9 4 1]
    """
    copies = []
    for device, keys in zip(job.device, job.keys, strict=True):
        parts = [NULL_BLOCK] * device.skip + device.block_ids
        parts += [NULL_BLOCK] * (len(keys) * factor - len(parts))
        assert len(parts) == len(keys) * factor, "blocks without a key"
        for index, key in enumerate(keys):
            blocks = parts[index * factor : (index + 1) * factor]
            copies.append(BlockCopy(device.group, key, blocks))
    return copies


class CopyJob:
    """A running copy, which can be ended at any moment.

    seconds: time limit, from now on. wait_for_steps: blocks until the steps that fill the cache
    have been computed.
    """

    def __init__(
        self,
        job: TransferJob,
        factor: int,
        seconds: float,
        wait_for_steps: Callable[[], None],
    ) -> None:
        self.job = job
        self.copies = offloaded_blocks(job, factor)
        self.wait_for_steps = wait_for_steps
        self._started = time.monotonic()
        self._deadline = self._started + seconds
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._unfinished = {id(block): block for block in self.copies}
        self.ended = False

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def access_cache(self, block: BlockCopy, copy: Callable[[BlockCopy], int]) -> bool:
        """Copy a block to or from the cache; False if the job has ended. copy: returns bytes."""
        with self._lock:
            if self.ended:
                return False
            self._num_bytes += copy(block)
            return True

    def mark_done(self, block: BlockCopy) -> None:
        with self._lock:
            del self._unfinished[id(block)]

    def end(self, cancelled: bool = False) -> TransferResult | None:
        """End the job, so that nothing accesses the cache any more; None if it has ended already.

        cancelled: ended before its time limit, to free its blocks.
        """
        with self._lock:
            if self.ended:
                return None
            self.ended = True
            unfinished = list(self._unfinished.values())
        failed = (
            [block_id for block in unfinished for block_id in block.block_ids]
            if self.job.is_load
            else []
        )
        seconds = time.monotonic() - self._started
        succeeded, num_bytes = not unfinished, self._num_bytes
        return TransferResult(
            job_id=self.job.job_id,
            succeeded=succeeded,
            num_bytes=num_bytes,
            seconds=seconds,
            failed_blocks=failed,
            cancelled=cancelled,
        )


class MediumError(Exception):
    """The medium cannot read or write a block; the message gives its reason."""


class Medium(Protocol):
    """Blocking storage of blocks. Used by one thread.

    name: of the kind. place: folder or address, for the log.
    """

    name: str
    place: str

    def read_blocks(
        self, labels: Sequence[BlockLabel], image: memoryview, seconds_left: SecondsLeft
    ) -> Iterator[bool]:
        """Read blocks one after the other into `image`; yield whether each one was complete.

        image: [HEADER_BYTES + content]; the caller verifies its checksum. Raises MediumError. The
        caller may close the iterator early.
        """

    def write_block(self, label: BlockLabel, image: memoryview, seconds_left: SecondsLeft) -> None:
        """Write a whole image or nothing; raises MediumError."""

    def discard(self, label: BlockLabel) -> None:
        """Remove an invalid block."""

    def close(self) -> None: ...


class TransferQueue:
    """OffloadingHandler that copies on a thread of its own, within time limits.

    medium: used by this queue alone. seconds: time limit of a copy, including its time in the
    queue.
    """

    def __init__(
        self, medium: Medium, context: HandlerContext, seconds: float, niceness: int = 0
    ) -> None:
        self._medium = medium
        self._context = context
        self._seconds = seconds
        self._niceness = niceness
        self._blocks: BlockBytes = context.device.block_bytes(context.cache.block_rows())
        self._image = memoryview(
            bytearray(HEADER_BYTES + context.factor * self._blocks.block_bytes)
        )
        self._changed = threading.Condition()
        self._queue: deque[CopyJob] = deque()
        self._open: dict[int, CopyJob] = {}
        self._finished: list[TransferResult] = []
        self._closed = False
        self._works = True
        self._threads = [
            threading.Thread(target=loop, name=f"kv {medium.name}", daemon=True)
            for loop in (self._copy_all, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def transfer_async(self, job: TransferJob) -> None:
        copy_job = CopyJob(job, self._context.factor, self._seconds, self._blocks.record_steps())
        with self._changed:
            self._open[job.job_id] = copy_job
            self._queue.append(copy_job)
            self._changed.notify_all()

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Block until jobs have ended: stores are cancelled soon, loads end by their time limit."""
        with self._changed:
            wanted = [self._open[job_id] for job_id in job_ids if job_id in self._open]
            stores = [copy_job for copy_job in wanted if not copy_job.job.is_load]
            self._changed.wait_for(lambda: all(copy_job.ended for copy_job in stores), _STORE_WAIT)
        for copy_job in stores:
            self._end(copy_job, cancelled=True)
        with self._changed:
            self._changed.wait_for(lambda: all(copy_job.ended for copy_job in wanted))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            wanted = list(self._open.values())
            self._queue.clear()
            self._changed.notify_all()
        for copy_job in wanted:
            self._end(copy_job)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)

    def _copy_all(self) -> None:
        if self._niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (copy_job := self._next()) is not None:
            try:
                self._run_job(copy_job)
                if not copy_job.ended:
                    self._log_recovery()
            except Exception as error:  # a failure ends its job, not the thread of all later ones
                self._log_failure(error)
            self._end(copy_job)
        self._medium.close()

    def _next(self) -> CopyJob | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return None if self._closed else self._queue.popleft()

    def _run_job(self, copy_job: CopyJob) -> None:
        if copy_job.ended:
            return
        copy_job.wait_for_steps()
        if copy_job.job.is_load:
            self._load(copy_job)
        else:
            self._store(copy_job)

    def _load(self, copy_job: CopyJob) -> None:
        labels = [self._label(block) for block in copy_job.copies]
        fetched = self._medium.read_blocks(labels, self._image, lambda: copy_job.seconds_left)
        for block, label, complete in zip(copy_job.copies, labels, fetched, strict=False):
            if not complete:
                continue
            if not is_valid(self._image, label):
                logger.warning("%s: a block failed its checksum", self._place)
                self._medium.discard(label)
            elif copy_job.access_cache(block, self._copy_in):
                copy_job.mark_done(block)
            else:
                return

    def _store(self, copy_job: CopyJob) -> None:
        for block in copy_job.copies:
            if NULL_BLOCK in block.blocks or len(block.key) > MAX_KEY_BYTES:
                continue
            if not copy_job.access_cache(block, self._copy_out):
                return
            label = self._label(block)
            seal(self._image, label)
            self._medium.write_block(label, self._image, lambda: copy_job.seconds_left)
            copy_job.mark_done(block)

    def _copy_in(self, block: BlockCopy) -> int:
        for memory, block_id in self._image_parts(block):
            self._blocks.copy_in(memory, block_id)
        return len(block.block_ids) * self._blocks.block_bytes

    def _copy_out(self, block: BlockCopy) -> int:
        for memory, block_id in self._image_parts(block):
            self._blocks.copy_out(block_id, memory)
        return len(block.block_ids) * self._blocks.block_bytes

    def _image_parts(self, block: BlockCopy) -> Iterator[tuple[memoryview, int]]:
        """Yield, for each device block, its bytes within the stored image of an offloaded block.

        image           header | block 0 | block 1 | block 2 | block 3
        device block              null        7         2         9      the null block is skipped
        """
        size = self._blocks.block_bytes
        for index, block_id in enumerate(block.blocks):
            if block_id != NULL_BLOCK:
                start = HEADER_BYTES + index * size
                yield self._image[start : start + size], block_id

    def _label(self, block: BlockCopy) -> BlockLabel:
        context = self._context
        return BlockLabel(
            context.fingerprint, block.key, block.group, context.rank, context.num_ranks
        )

    def _end(self, copy_job: CopyJob, cancelled: bool = False) -> None:
        result = copy_job.end(cancelled)
        if result is None:
            return
        with self._changed:
            self._finished.append(result)
            del self._open[copy_job.job.job_id]
            self._changed.notify_all()
        self._context.notify()

    def _watch(self) -> None:
        """End jobs that exceed their time limit; the oldest job reaches it first."""
        while True:
            with self._changed:
                if self._closed:
                    return
                oldest = next(iter(self._open.values()), None)
                if oldest is None or oldest.seconds_left > 0.0:
                    self._changed.wait(None if oldest is None else oldest.seconds_left)
                    continue
            self._log_failure(MediumError(f"not done in {self._seconds:g} s"))
            self._end(oldest)

    def _log_failure(self, error: Exception) -> None:
        """Log the first failure since the medium worked; an unexpected one with its origin."""
        if self._works:
            self._works = False
            reason, is_unexpected = str(error), not isinstance(error, MediumError)
            logger.warning(
                "%s: %s; copies to and from it fail",
                self._place,
                reason or type(error).__name__,
                exc_info=error if is_unexpected else None,
            )

    def _log_recovery(self) -> None:
        if not self._works:
            self._works = True
            logger.info("%s works again", self._place)

    @property
    def _place(self) -> str:
        return f"{self._medium.name} {self._medium.place}"
