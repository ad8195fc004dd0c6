"""Host memory behind a simulated pool: the offloading connector, whose copies only take time.

The deciding half is the real one, with its ledger; this is in the place of the copying half. Owns
the copies that are under way: those of one direction follow each other, each takes as long as its
blocks do, and no step waits for any but those that have to be over before it (`flush`).
"""

from typing import Final, Protocol

from engine_core.kv_cache.holds import PoolHolds
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_connector.base import SchedulerConnector, SchedulerContext
from engine_core.kv_connector.offload.connector import OffloadingScheduler
from engine_core.scheduler.external_kv import Connect, IsSound, no_connector
from engine_core.scheduler.gates import Wake
from proto.kv_offload import FinishedJob, OffloadMetadata, OffloadReport, TransferJob
from proto.kv_transfer import NO_PAYLOAD, KVConnectorOutput, Payload, pack, unpack
from proto.kv_transfer_config import KVTransferConfig
from proto.lifecycle import KVCacheGeometry
from proto.replay import HostTier
from proto.sched_trace import TraceHeader

_RANKS = 1


class Tier(Protocol):
    """What a simulation has behind its pool."""

    def connect(self, kv_cache: KVCacheManager) -> Connect:
        """How a scheduler over this pool comes to its connector."""
        ...

    def begin(self, metadata: Payload, now: float) -> float:
        """What a step orders, at its decision; returns when it may be computed."""
        ...

    def take(self, now: float) -> KVConnectorOutput | None:
        """A copy that is over; None where there is none."""
        ...

    def next_end(self) -> list[float]:
        """Of the copy that is over first; of none or one."""
        ...


class NoTier:
    """The pool is all there is."""

    def connect(self, kv_cache: KVCacheManager) -> Connect:
        return no_connector

    def begin(self, metadata: Payload, now: float) -> float:
        return now

    def take(self, now: float) -> KVConnectorOutput | None:
        return None

    def next_end(self) -> list[float]:
        return []


NO_TIER: Final = NoTier()


class SimulatedTier:
    """One with room."""

    def __init__(self, tier: HostTier, header: TraceHeader) -> None:
        self._block_seconds = tier.block_ms / 1e3
        self._num_slots = tier.num_blocks
        self._header = header
        self._free_at = {True: 0.0, False: 0.0}
        self._under_way: dict[int, tuple[float, TransferJob]] = {}
        self._put_off: list[TransferJob] = []
        self._handles: dict[int, int] = {}

    def connect(self, kv_cache: KVCacheManager) -> Connect:
        header = self._header
        extra = {"cpu_bytes_to_use": self._num_slots * header.block_size}
        config = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_connector_extra_config=extra
        )

        def made(holds: PoolHolds, wake: Wake, is_sound: IsSound) -> SchedulerConnector:
            context = SchedulerContext(
                geometry=KVCacheGeometry(1, 1, 1, "none", 1, header.groups),
                block_size=header.block_size,
                num_blocks=header.num_blocks,
                fingerprint=bytes(32),
                num_ranks=_RANKS,
                holds=holds,
                block_ids=kv_cache.block_ids,
                wake=wake,
                is_sound=is_sound,
            )
            return OffloadingScheduler(config, context)

        return made

    def begin(self, metadata: Payload, now: float) -> float:
        """Stores that an earlier step put off begin, then its own loads."""
        orders = OffloadMetadata() if metadata == NO_PAYLOAD else unpack(metadata, OffloadMetadata)
        for job in (*self._put_off, *orders.loads):
            self._start(job, now)
        self._put_off = list(orders.stores)
        for job, handle in zip(orders.loads, orders.load_handles, strict=True):
            self._handles[job.job_id] = handle
        for job in [each for each in self._put_off if each.job_id in orders.flush]:
            self._put_off.remove(job)
            self._start(job, now)
        flushed = (self._under_way[each][0] for each in orders.flush if each in self._under_way)
        return max(flushed, default=now)

    def take(self, now: float) -> KVConnectorOutput | None:
        for number, (end, job) in self._under_way.items():
            if end <= now:
                del self._under_way[number]
                return self._report(job)
        return None

    def next_end(self) -> list[float]:
        return [min(end for end, _ in self._under_way.values())] if self._under_way else []

    def _start(self, job: TransferJob, now: float) -> None:
        seconds = _num_blocks(job) * self._block_seconds
        end = max(now, self._free_at[job.is_load]) + seconds
        self._free_at[job.is_load] = end
        self._under_way[job.job_id] = (end, job)

    def _report(self, job: TransferJob) -> KVConnectorOutput:
        num_blocks = _num_blocks(job)
        num_bytes = num_blocks * self._header.block_size
        done = FinishedJob(job.job_id, True, num_bytes, num_blocks * self._block_seconds)
        return KVConnectorOutput(
            finished_recving=[self._handles.pop(job.job_id)] if job.is_load else [],
            worker_metadata=pack(OffloadReport([done])),
        )


def _num_blocks(job: TransferJob) -> int:
    return sum(len(each.block_ids) for each in job.device)
