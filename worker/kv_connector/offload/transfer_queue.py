"""Carries out copies between the cache and a medium that may be slow, on a thread of its own.

Knows blocks, order and time limits; what a medium is it leaves to the Medium. A copy that is not
over in its time is reported as failed at that moment, whatever its thread is waiting for, and
those behind it find their time over, too: a medium that hangs holds nobody up.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from proto.kv_connector import TransferJob
from proto.kv_media import HEADER_BYTES, MAX_KEY_BYTES
from worker.kv_connector.offload.base import HandlerContext, TransferResult
from worker.kv_connector.offload.block_image import BlockLabel, is_storable, seal
from worker.kv_connector.offload.host_blocks import BlockBytes, block_bytes_of
from worker.kv_connector.offload.transfer import NULL_BLOCK, Piece, Transfer

logger = logging.getLogger("tokend.kv_media")

STORE_NICENESS: Final = 10
"""Stores come after everything that somebody waits for."""
_STORE_PATIENCE: Final = 0.02
"""Seconds that a step may wait for stores before they are given up."""
_CLOSE_SECONDS: Final = 1.0
"""For threads to end by themselves; those that hang end with the process."""
SecondsLeft = Callable[[], float]


class MediumError(Exception):
    """The medium does not do it; the message says why, in its words."""


class Medium(Protocol):
    """Where blocks are kept. Used by one thread; takes its time."""

    name: str

    def fetch(
        self, labels: Sequence[BlockLabel], image: memoryview, seconds_left: SecondsLeft
    ) -> Iterator[bool]:
        """For one label after the other, whether `image` is all that is kept under it.

        image: [HEADER_BYTES + content], and its content is not trusted yet. May raise MediumError
        at any time; the iterator is closed where no more is wanted.
        """
        ...

    def keep(self, label: BlockLabel, image: memoryview, seconds_left: SecondsLeft) -> None:
        """Keep a whole image, or nothing; raises MediumError."""
        ...

    def discard(self, label: BlockLabel) -> None:
        """What is kept under this is no block."""
        ...

    def close(self) -> None: ...


class TransferQueue:
    """An OffloadingHandler of one direction.

    medium: for this queue alone. seconds: that a copy may take, its time in the queue included.
    """

    def __init__(
        self, medium: Medium, context: HandlerContext, seconds: float, niceness: int = 0
    ) -> None:
        self._medium = medium
        self._context = context
        self._seconds = seconds
        self._niceness = niceness
        self._blocks: BlockBytes = block_bytes_of(context.cache)
        self._image = memoryview(
            bytearray(HEADER_BYTES + context.factor * self._blocks.block_bytes)
        )
        self._changed = threading.Condition()
        self._queue: deque[Transfer] = deque()
        self._open: dict[int, Transfer] = {}
        self._finished: list[TransferResult] = []
        self._closed = False
        self._works = True
        self._threads = [
            threading.Thread(target=each, name=f"kv {medium.name}", daemon=True)
            for each in (self._carry_all, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def transfer_async(self, job: TransferJob) -> None:
        """As the Protocol says; takes the jobs of one direction."""
        transfer = Transfer(job, self._context.factor, self._seconds, self._blocks.moment())
        with self._changed:
            self._open[job.job_id] = transfer
            self._queue.append(transfer)
            self._changed.notify_all()

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Stores that take long are given up where they are; loads end by their limit at last."""
        with self._changed:
            wanted = [self._open[each] for each in job_ids if each in self._open]
            stores = [each for each in wanted if not each.job.is_load]
            self._changed.wait_for(lambda: all(each.over for each in stores), _STORE_PATIENCE)
        for transfer in stores:
            self._end(transfer, cancelled=True)
        with self._changed:
            self._changed.wait_for(lambda: all(each.over for each in wanted))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            wanted = list(self._open.values())
            self._queue.clear()
            self._changed.notify_all()
        for transfer in wanted:
            self._end(transfer)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)

    def _carry_all(self) -> None:
        if self._niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (transfer := self._next()) is not None:
            try:
                self._carry(transfer)
                if not transfer.over:
                    self._say_again()
            except MediumError as error:
                self._complain(error)
            self._end(transfer)
        self._medium.close()

    def _next(self) -> Transfer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return None if self._closed else self._queue.popleft()

    def _carry(self, transfer: Transfer) -> None:
        if transfer.over:
            return
        transfer.wait_for_steps()
        if transfer.job.is_load:
            self._load(transfer)
        else:
            self._store(transfer)

    def _load(self, transfer: Transfer) -> None:
        labels = [self._label(each) for each in transfer.pieces]
        fetched = self._medium.fetch(labels, self._image, lambda: transfer.seconds_left)
        for piece, label, complete in zip(transfer.pieces, labels, fetched, strict=False):
            if not complete:
                continue
            if not is_storable(self._image, label):
                logger.warning("%s: a block is not what it should be", self._medium.name)
                self._medium.discard(label)
            elif transfer.touch(piece, self._copy_in):
                transfer.done(piece)
            else:
                return

    def _store(self, transfer: Transfer) -> None:
        for piece in transfer.pieces:
            if NULL_BLOCK in piece.blocks or len(piece.key) > MAX_KEY_BYTES:
                continue
            if not transfer.touch(piece, self._copy_out):
                return
            label = self._label(piece)
            seal(self._image, label)
            self._medium.keep(label, self._image, lambda: transfer.seconds_left)
            transfer.done(piece)

    def _copy_in(self, piece: Piece) -> int:
        for memory, block_id in self._parts(piece):
            self._blocks.copy_in(memory, block_id)
        return len(piece.block_ids) * self._blocks.block_bytes

    def _copy_out(self, piece: Piece) -> int:
        for memory, block_id in self._parts(piece):
            self._blocks.copy_out(block_id, memory)
        return len(piece.block_ids) * self._blocks.block_bytes

    def _parts(self, piece: Piece) -> Iterator[tuple[memoryview, int]]:
        """Of the image and the cache, what belongs together.

        image    header | content 0 | content 1 | content 2 | content 3
        blocks               -           7           2           9
        """
        size = self._blocks.block_bytes
        for index, block_id in enumerate(piece.blocks):
            if block_id != NULL_BLOCK:
                start = HEADER_BYTES + index * size
                yield self._image[start : start + size], block_id

    def _label(self, piece: Piece) -> BlockLabel:
        context = self._context
        return BlockLabel(
            context.fingerprint, piece.key, piece.group, context.rank, context.num_ranks
        )

    def _end(self, transfer: Transfer, cancelled: bool = False) -> None:
        result = transfer.end(cancelled)
        if result is None:
            return
        with self._changed:
            self._finished.append(result)
            del self._open[transfer.job.job_id]
            self._changed.notify_all()
        self._context.notify()

    def _watch(self) -> None:
        """Give up what is not over in time; the oldest job's time is over first."""
        while True:
            with self._changed:
                if self._closed:
                    return
                oldest = next(iter(self._open.values()), None)
                if oldest is None or oldest.seconds_left > 0.0:
                    self._changed.wait(None if oldest is None else oldest.seconds_left)
                    continue
            self._complain(MediumError(f"not done in {self._seconds:g} s"))
            self._end(oldest)

    def _complain(self, error: MediumError) -> None:
        """Once for as long as nothing works."""
        if self._works:
            self._works = False
            logger.warning(
                "%s: %s; nothing goes there or comes from there", self._medium.name, error
            )

    def _say_again(self) -> None:
        if not self._works:
            self._works = True
            logger.info("%s: works again", self._medium.name)
