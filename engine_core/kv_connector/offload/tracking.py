"""State of the offloading connector: keys of blocks, copies in flight, requests, copy statistics.

device blocks       | 7 | 3 | 9 | 4 | 8 | 2 |          block table of a group
offloaded blocks    |   0   |   1   |   2   |          factor 2
"""

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine_core.block_hashing import HASH_BYTES
from engine_core.kv_cache.pool import TransferRefs
from engine_core.kv_connector.offload.base import OffloadKey
from engine_core.request import Request
from proto.messages.kv_connector import FinishedJob, TransferJob
from proto.messages.stats import KVCopy, KVMediumStats

_SUFFIX: Final = struct.Struct("<BHH")


def parse_key(key: OffloadKey) -> tuple[bytes, int]:
    """Return (block hash, KV cache group) of a key."""
    return key[:HASH_BYTES], key[HASH_BYTES]


@dataclass(slots=True)
class InFlightJob:
    """A copy that not all ranks have reported.

    request: whose KV it is; it may have ended. keys: its offloaded blocks, of each group in the
    order of the sequence. first: none of them comes before this offloaded block of the request.
    succeeded: on every rank that has reported. has_failed: on some rank, other than by being
    cancelled. num_bytes: sum over these ranks. seconds: of the slowest rank.
    """

    transfer: TransferJob
    request: Request
    keys: Sequence[OffloadKey]
    first: int
    num_ranks_left: int
    succeeded: bool = True
    has_failed: bool = False
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def seq_id(self) -> int:
        return self.request.seq_id

    @property
    def device_blocks(self) -> list[int]:
        """Device block ids, group by group, in the order of the sequence."""
        return [block for device in self.transfer.device for block in device.block_ids]


class JobsInFlight:
    """Copies given to the workers of this epoch; keeps their device blocks allocated.

    numbers: of jobs, shared by all of a connector.
    """

    def __init__(self, num_ranks: int, transfer_refs: TransferRefs, numbers: Iterator[int]) -> None:
        self._num_ranks = num_ranks
        self._transfer_refs = transfer_refs
        self._jobs: dict[int, InFlightJob] = {}
        self._numbers = numbers

    def next_id(self) -> int:
        return next(self._numbers)

    def start_job(
        self, transfer: TransferJob, request: Request, keys: Sequence[OffloadKey], first: int
    ) -> InFlightJob:
        """Register a copy and reference its device blocks."""
        job = InFlightJob(transfer, request, keys, first, self._num_ranks)
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
    hit: total tokens promised by the last match. num_with_kv: those whose KV the pool has.
    loads_state: the state after them has to be loaded. num_loading: copies of them in flight.
    stored_states: blocks at whose ends states are stored.
    unanswered_since: second of the first lookup that the medium has not answered yet; None: all
    lookups are answered.
    """

    request: Request
    was_looked_up: bool = False
    next_block: int = 0
    next_at: int = 0
    touched: int = 0
    hit: int = 0
    num_with_kv: int = 0
    loads_state: bool = False
    num_loading: int = 0
    stored_states: set[int] = field(default_factory=set)
    unanswered_since: float | None = None

    @property
    def is_loading(self) -> bool:
        return self.num_loading > 0

    def on_worker_restart(self) -> None:
        """Forget what was stored and is being loaded."""
        self.next_block = self.next_at = self.touched = self.num_loading = 0
        self.stored_states.clear()


class BlockLayout:
    """How sequences are divided into offloaded blocks, and the keys of these.

        hashes           | h0 | h1 | h2 | h3 | h4 | h5 | h6 | h7 |        of device blocks
        factor 4         |         h3        |         h7        |
        key              h3 ‖ group (1 byte) ‖ ranks (2) ‖ factor (2)

    A hash covers all tokens up to the end of its block. The suffix distinguishes layers (group),
    shares of the heads (ranks) and block sizes (factor) for the same tokens.

    block_size: tokens of a device block. factor: device blocks of an offloaded block.
    windows: sliding windows of the KV cache groups. size: tokens of an offloaded block.
    """

    def __init__(
        self, block_size: int, factor: int, windows: Sequence[int | None], num_ranks: int
    ) -> None:
        self.block_size = block_size
        self.factor = factor
        self.windows = windows
        self.size = block_size * factor
        self.groups = range(len(windows))
        self._suffixes = [_SUFFIX.pack(group, num_ranks, factor) for group in self.groups]

    def keys(
        self, block_hashes: Sequence[bytes], group: int, first: int, end: int
    ) -> list[OffloadKey]:
        """Return the keys of a group's offloaded blocks [first, end) of a sequence."""
        factor, suffix = self.factor, self._suffixes[group]
        hashes = block_hashes[(first + 1) * factor - 1 : end * factor : factor]
        return [block_hash + suffix for block_hash in hashes]

    def all_keys(self, block_hashes: Sequence[bytes], end: int) -> list[bytes]:
        """Return the keys of the first `end` offloaded blocks of every group, in token order."""
        by_group = [self.keys(block_hashes, group, 0, end) for group in self.groups]
        return [key for keys in zip(*by_group, strict=True) for key in keys]


class MediumStatistics:
    """Counts copies between the device and one medium, and lookups, since the last `drain`."""

    def __init__(self, medium: str) -> None:
        self._medium = medium
        self._clear()

    def _clear(self) -> None:
        self.num_skipped = self.num_unstored = self._num_failed = 0
        self._loads: list[KVCopy] = []
        self._stores: list[KVCopy] = []
        self._lookup_seconds: list[float] = []
        self._lookup_wait_seconds: list[float] = []

    def record_copy(self, job: InFlightJob) -> None:
        if not job.succeeded:
            self._num_failed += 1
            return
        copies = self._loads if job.transfer.is_load else self._stores
        copies.append(KVCopy(job.num_bytes, job.seconds))

    def record_lookup(self, tracked: TrackedRequest, began: float, *, is_answered: bool) -> None:
        """Record a lookup of a request. began: seconds of `time.monotonic`."""
        now = time.monotonic()
        self._lookup_seconds.append(now - began)
        if is_answered:
            self.end_wait(tracked, now)
        elif tracked.unanswered_since is None:
            tracked.unanswered_since = began

    def end_wait(self, tracked: TrackedRequest, now: float) -> None:
        """Record how long a request has waited for the answer to a lookup, if it has."""
        if tracked.unanswered_since is not None:
            self._lookup_wait_seconds.append(now - tracked.unanswered_since)
            tracked.unanswered_since = None

    def drain(self) -> KVMediumStats:
        """Return and reset the counts."""
        stats = KVMediumStats(
            medium=self._medium,
            loads=self._loads,
            stores=self._stores,
            num_skipped=self.num_skipped,
            num_unstored=self.num_unstored,
            num_failed=self._num_failed,
            lookup_seconds=self._lookup_seconds,
            lookup_wait_seconds=self._lookup_wait_seconds,
        )
        self._clear()
        return stats
