"""The seam between the offloading connector's worker half and a medium."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from proto.kv_connector import TransferJob
from worker.kv_cache import KVCache


@dataclass(frozen=True)
class HandlerContext:
    """What a medium may know of its worker.

    cache: memory that blocks lie in. factor: device blocks of an offloaded block. fingerprint: of
    what all ranks compute. notify: from any thread; a copy is over.
    """

    cache: KVCache
    factor: int
    rank: int
    num_ranks: int
    fingerprint: bytes
    notify: Callable[[], None]


class TransferResult(NamedTuple):
    """failed_blocks: device blocks of a load that do not hold what they should.

    cancelled: as in FinishedJob.
    """

    job_id: int
    succeeded: bool
    num_bytes: int
    seconds: float
    failed_blocks: list[int]
    cancelled: bool = False


class OffloadingHandler(Protocol):
    """Carries out the copies of one direction, (source, destination), in the order given."""

    def transfer_async(self, job: TransferJob) -> None:
        """Begin a copy; never waits, and never raises for what a medium does."""
        ...

    def get_finished(self) -> list[TransferResult]:
        """Copies that are over since the last call; never waits."""
        ...

    def wait(self, job_ids: set[int]) -> None:
        """Return when those of them that this handler was given are over."""
        ...

    def close(self) -> None:
        """Return when no copy touches the device's memory any more."""
        ...
