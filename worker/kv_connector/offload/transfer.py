"""One copy under way: what it moves, how long it may take, and who may still touch the cache.

    copying thread        allowed to touch? ── yes ─▶ a block is copied ── …  ─▶ over
    loop, time limit                    │ give up: from here on the answer is no

So a copy that hangs in the kernel, or that nobody wants any more, is given up at any moment:
what the medium still delivers goes into memory of the copying thread and no further.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from proto.kv_connector import TransferJob
from worker.kv_connector.offload.base import TransferResult

NULL_BLOCK: Final = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """One offloaded block of a job. blocks: [factor] device blocks; NULL_BLOCK: none is there."""

    group: int
    key: bytes
    blocks: Sequence[int]

    @property
    def block_ids(self) -> list[int]:
        """The device blocks that there are."""
        return [each for each in self.blocks if each != NULL_BLOCK]


def pieces_of(job: TransferJob, factor: int) -> list[Piece]:
    """The offloaded blocks of a job, group by group, in order.

    key 0              key 1              factor 4
    .   .   7   2  |   9   4   1   .      skip 2, block_ids [7 2 9 4 1]
    """
    pieces = []
    for device, keys in zip(job.device, job.keys, strict=True):
        places = [NULL_BLOCK] * device.skip + device.block_ids
        places += [NULL_BLOCK] * (len(keys) * factor - len(places))
        assert len(places) == len(keys) * factor, "blocks without a key"
        for index, key in enumerate(keys):
            blocks = places[index * factor : (index + 1) * factor]
            pieces.append(Piece(device.group, key, blocks))
    return pieces


class Transfer:
    """seconds: it may take, from now on. wait_for_steps: until the cache holds what is meant."""

    def __init__(
        self,
        job: TransferJob,
        factor: int,
        seconds: float,
        wait_for_steps: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job = job
        self.pieces = pieces_of(job, factor)
        self.wait_for_steps = wait_for_steps
        self._clock = clock
        self._begun = clock()
        self._deadline = self._begun + seconds
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._undone = {id(piece): piece for piece in self.pieces}
        self._over = False

    @property
    def seconds_left(self) -> float:
        return self._deadline - self._clock()

    @property
    def over(self) -> bool:
        return self._over

    def touch(self, piece: Piece, copy: Callable[[Piece], int]) -> bool:
        """Copy a piece to or from the cache, unless that is over. copy: returns bytes."""
        with self._lock:
            if self._over:
                return False
            self._num_bytes += copy(piece)
            return True

    def done(self, piece: Piece) -> None:
        """The piece is where it should be."""
        with self._lock:
            del self._undone[id(piece)]

    def end(self, cancelled: bool = False) -> TransferResult | None:
        """Nothing touches the cache from here on; None if that was said already.

        cancelled: before its time was over.
        """
        with self._lock:
            if self._over:
                return None
            self._over = True
            undone = list(self._undone.values())
        failed = [each for piece in undone for each in piece.block_ids] if self.job.is_load else []
        seconds = self._clock() - self._begun
        succeeded, num_bytes = not undone, self._num_bytes
        return TransferResult(self.job.job_id, succeeded, num_bytes, seconds, failed, cancelled)
