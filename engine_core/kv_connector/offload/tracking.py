"""State of the offloading connector: keys of blocks, copies in flight, requests, copy statistics.

device blocks       | 7 | 3 | 9 | 4 | 8 | 2 |          block table of a group
offloaded blocks    |   0   |   1   |   2   |          factor 2
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine_core.kv_cache.hashing import HASH_BYTES
from engine_core.kv_cache.pool import TransferRefs
from engine_core.kv_connector.base import SchedulerContext
from engine_core.kv_connector.offload.base import OffloadKey
from engine_core.request import Request
from proto.kv_connector import FinishedJob, TransferJob
from proto.stats import KVMediumStats

_SUFFIX: Final = struct.Struct("<BHH")


class OffloadKeys:
    """Makes the keys of offloaded blocks.

        hashes           | h0 | h1 | h2 | h3 | h4 | h5 | h6 | h7 |        of device blocks
        factor 4         |         h3        |         h7        |
        key              h3 ‖ group (1 byte) ‖ ranks (2) ‖ factor (2)

    A hash covers all tokens up to the end of its block. The suffix distinguishes layers (group),
    shares of the heads (ranks) and block sizes (factor) for the same tokens.
    """

    def __init__(self, num_groups: int, num_ranks: int, factor: int) -> None:
        self.factor = factor
        self._suffixes = [_SUFFIX.pack(group, num_ranks, factor) for group in range(num_groups)]

    def of_range(
        self, block_hashes: Sequence[bytes], group: int, first: int, end: int
    ) -> list[OffloadKey]:
        """Return the keys of a group's offloaded blocks [first, end) of a sequence."""
        factor, suffix = self.factor, self._suffixes[group]
        hashes = block_hashes[(first + 1) * factor - 1 : end * factor : factor]
        return [block_hash + suffix for block_hash in hashes]


def parse_key(key: OffloadKey) -> tuple[bytes, int]:
    """Return (block hash, KV cache group) of a key."""
    return key[:HASH_BYTES], key[HASH_BYTES]


class InFlightJob:
    """A copy that not all ranks have reported. seq_id: its request. keys: its offloaded blocks.

    succeeded: on every rank that has reported. has_failed: on some rank, other than by being
    cancelled. num_bytes: sum over these ranks. seconds: of the slowest rank.
    """

    __slots__ = (
        "has_failed",
        "keys",
        "num_bytes",
        "num_ranks_left",
        "seconds",
        "seq_id",
        "succeeded",
        "transfer",
    )

    def __init__(
        self, transfer: TransferJob, seq_id: int, keys: Sequence[OffloadKey], num_ranks: int
    ) -> None:
        self.transfer = transfer
        self.seq_id = seq_id
        self.keys = keys
        self.num_ranks_left = num_ranks
        self.succeeded = True
        self.has_failed = False
        self.num_bytes = 0
        self.seconds = 0.0

    @property
    def device_blocks(self) -> list[int]:
        """Device block ids, group by group, in the order of the sequence."""
        return [block for device in self.transfer.device for block in device.block_ids]


class JobsInFlight:
    """Copies given to the workers of this epoch; keeps their device blocks allocated."""

    def __init__(self, num_ranks: int, transfer_refs: TransferRefs) -> None:
        self._num_ranks = num_ranks
        self._transfer_refs = transfer_refs
        self._jobs: dict[int, InFlightJob] = {}
        self._next_id = 0

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def start_job(
        self, transfer: TransferJob, seq_id: int, keys: Sequence[OffloadKey]
    ) -> InFlightJob:
        """Register a copy and reference its device blocks."""
        job = InFlightJob(transfer, seq_id, keys, self._num_ranks)
        self._transfer_refs.hold(job.device_blocks)
        self._jobs[transfer.job_id] = job
        return job

    def record_report(self, finished: FinishedJob) -> InFlightJob | None:
        """Record that one rank has finished; return the job if it was the last rank.

        Reports of an earlier epoch's jobs are ignored.
        """
        job = self._jobs.get(finished.job_id)
        if job is None:
            return None
        job.succeeded &= finished.succeeded
        job.has_failed |= not (finished.succeeded or finished.cancelled)
        job.num_bytes += finished.num_bytes
        job.seconds = max(job.seconds, finished.seconds)
        job.num_ranks_left -= 1
        if job.num_ranks_left:
            return None
        del self._jobs[finished.job_id]
        self._transfer_refs.release(job.device_blocks)
        return job

    def stores_of(self, seq_id: int) -> Iterator[InFlightJob]:
        for job in self._jobs.values():
            if job.seq_id == seq_id and not job.transfer.is_load:
                yield job

    def drop_all(self) -> None:
        """Release the blocks of all jobs; their workers are gone."""
        for job in self._jobs.values():
            self._transfer_refs.release(job.device_blocks)
        self._jobs.clear()

    def __len__(self) -> int:
        return len(self._jobs)


@dataclass(slots=True)
class TrackedRequest:
    """Progress of one request.

    was_looked_up: the medium was asked about it before. next_block: first offloaded block that is
    neither stored nor excluded. next_at: number of tokens with which the next block is full.
    touched: leading blocks that were marked as recently used.
    hit: total tokens promised by the last match. is_loading: they are being copied.
    """

    request: Request
    was_looked_up: bool = False
    next_block: int = 0
    next_at: int = 0
    touched: int = 0
    hit: int = 0
    is_loading: bool = False


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How sequences are divided into offloaded blocks.

    block_size: tokens of a device block. factor: device blocks of an offloaded block.
    windows: sliding windows of the KV cache groups. size: tokens of an offloaded block.
    """

    block_size: int
    factor: int
    windows: tuple[int | None, ...]
    keys: OffloadKeys
    size: int = field(init=False)
    groups: range = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.block_size * self.factor)
        object.__setattr__(self, "groups", range(len(self.windows)))

    @classmethod
    def from_context(cls, context: SchedulerContext, factor: int) -> "BlockLayout":
        windows = tuple(group.sliding_window for group in context.geometry.groups)
        keys = OffloadKeys(len(windows), context.num_ranks, factor)
        return cls(context.block_size, factor, windows, keys)

    def all_keys(self, block_hashes: Sequence[bytes], end: int) -> list[bytes]:
        """Return the keys of the first `end` offloaded blocks of every group, in token order."""
        by_group = [self.keys.of_range(block_hashes, group, 0, end) for group in self.groups]
        return [key for keys in zip(*by_group, strict=True) for key in keys]


class CopyStatistics:
    """Counts copies between the device and one medium since the last `drain`."""

    def __init__(self, medium: str) -> None:
        self._medium = medium
        self._clear()

    def _clear(self) -> None:
        self.num_skipped = self.num_unstored = self._num_failed = 0
        self._num_copies = {True: 0, False: 0}
        self._num_bytes = {True: 0, False: 0}
        self._seconds = {True: 0.0, False: 0.0}

    def record(self, job: InFlightJob) -> None:
        is_load = job.transfer.is_load
        if not job.succeeded:
            self._num_failed += 1
            return
        self._num_copies[is_load] += 1
        self._num_bytes[is_load] += job.num_bytes
        self._seconds[is_load] += job.seconds

    def drain(self, usage: float) -> KVMediumStats:
        """Return and reset the counts. usage: used fraction of the medium, 0 to 1."""
        stats = KVMediumStats(
            medium=self._medium,
            num_loads=self._num_copies[True],
            load_bytes=self._num_bytes[True],
            load_seconds=self._seconds[True],
            num_stores=self._num_copies[False],
            store_bytes=self._num_bytes[False],
            store_seconds=self._seconds[False],
            num_skipped=self.num_skipped,
            num_unstored=self.num_unstored,
            num_failed=self._num_failed,
            usage=usage,
        )
        self._clear()
        return stats
