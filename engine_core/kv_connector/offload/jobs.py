"""Copies under way, from when they are ordered until every rank has said that they are over.

Owns the numbers of jobs, the references on their device blocks and the counts of ranks. Knows
nothing of why a copy is made.
"""

from collections.abc import Iterator, Sequence

from engine_core.kv_connector.base import BlockHolds
from engine_core.kv_connector.offload.base import OffloadKey
from proto.kv_connector import FinishedJob, TransferJob


class Job:
    """A copy for the request `seq_id`. keys: all its offloaded blocks.

    succeeded: so far, on every rank that has reported. num_bytes: of these ranks together.
    seconds: of the slowest. has_failed: on a rank, and not because it was given up there.
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
        """Group by group, in the order of the sequence."""
        return [block for each in self.transfer.device for block in each.block_ids]


class JobsInFlight:
    """The copies that workers of this epoch were given."""

    def __init__(self, num_ranks: int, holds: BlockHolds) -> None:
        self._num_ranks = num_ranks
        self._holds = holds
        self._jobs: dict[int, Job] = {}
        self._next_id = 0

    def next_id(self) -> int:
        """Never the same twice."""
        self._next_id += 1
        return self._next_id

    def begin(self, transfer: TransferJob, seq_id: int, keys: Sequence[OffloadKey]) -> Job:
        """Its device blocks are held from now on."""
        job = Job(transfer, seq_id, keys, self._num_ranks)
        self._holds.hold(job.device_blocks)
        self._jobs[transfer.job_id] = job
        return job

    def report(self, finished: FinishedJob) -> Job | None:
        """One rank's part is over; the job, where it was the last one.

        None also for a job that is not known: its epoch is over.
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
        self._holds.release(job.device_blocks)
        return job

    def stores_of(self, seq_id: int) -> Iterator[Job]:
        """Copies of a request's blocks to the medium."""
        for job in self._jobs.values():
            if job.seq_id == seq_id and not job.transfer.is_load:
                yield job

    def drop_all(self) -> None:
        """Nobody will ever report them."""
        for job in self._jobs.values():
            self._holds.release(job.device_blocks)
        self._jobs.clear()

    def __len__(self) -> int:
        return len(self._jobs)
