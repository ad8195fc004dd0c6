"""Stores: which blocks have become full, and which copies take them to a medium.

A request's cursor only grows, so that each block is offered once. The blocks that are copied are
held, so a window may pass them and the request may end or be preempted meanwhile.

The beginning of a sequence is to be the last of it that goes from the medium, so as it grows
all of it is touched: not with every block, which would take ever longer, but when it has grown by
a part of its length, and at its end.
"""

from collections.abc import Sequence
from typing import Final

from engine_core.kv_cache.block import NULL_BLOCK, BlockIds
from engine_core.kv_connector.offload.base import OffloadingManager, OffloadKey
from engine_core.kv_connector.offload.jobs import Job, JobsInFlight
from engine_core.kv_connector.offload.requests import Shape, TrackedRequest
from engine_core.kv_connector.offload.statistics import CopyStatistics
from engine_core.request import Request
from proto.kv_connector import DeviceBlocks, TransferJob

_TOUCHED_PART: Final = 4
"""A sequence of n blocks is touched after n / 4 more: four keys for every block, however long."""


class StorePlanner:
    """Plans stores of one medium."""

    def __init__(
        self,
        shape: Shape,
        manager: OffloadingManager,
        jobs: JobsInFlight,
        statistics: CopyStatistics,
    ) -> None:
        self._shape = shape
        self._manager = manager
        self._jobs = jobs
        self._statistics = statistics
        self._planned: list[Job] = []

    def plan(self, tracked: TrackedRequest, tables: BlockIds, num_tokens: int) -> None:
        """Store what the first `num_tokens` tokens fill, from the cursor on.

        table       | 7 | 3 | 9 | 4 | 8 | 2 | . |      factor 2, cursor at offloaded block 1
        stored              ^^^^^^^^^^^^^^^
        """
        shape, request = self._shape, tracked.request
        first, end = tracked.next_block, num_tokens // shape.size
        tracked.next_at = (end + 1) * shape.size
        wanted = self._storable(tracked, tables, first, end)
        if not wanted:
            return
        prepared = self._manager.prepare_store(list(wanted))
        if end > tracked.touched + tracked.touched // _TOUCHED_PART:
            self._touch(tracked, end)
        if prepared is None:
            self._statistics.num_unstored += len(wanted)
            return
        tracked.next_block = end
        self._statistics.num_skipped += len(wanted) - len(prepared.keys)
        if prepared.keys:
            job = self._job(wanted, prepared.keys, prepared.slots)
            self._planned.append(self._jobs.begin(job, request.seq_id, prepared.keys))

    def settle(self, tracked: TrackedRequest) -> None:
        """A request is over: what it has on the medium is put in order."""
        if tracked.touched < tracked.next_block:
            self._touch(tracked, tracked.next_block)

    @property
    def has_planned(self) -> bool:
        """There are stores that no worker has been told of."""
        return bool(self._planned)

    def take_planned(self) -> list[Job]:
        """The stores planned since the last call."""
        taken, self._planned = self._planned, []
        return taken

    def complete(self, job: Job) -> None:
        """All ranks have reported a store."""
        cancelled = not (job.succeeded or job.has_failed)
        self._manager.complete_store(job.keys, success=job.succeeded, cancelled=cancelled)

    def withdraw(self, request: Request) -> None:
        """What a request computed cannot be trusted: nobody is to find any of it."""
        block_hashes = request.block_hashes
        keys = self._shape.all_keys(block_hashes, len(block_hashes) // self._shape.factor)
        for job in self._jobs.stores_of(request.seq_id):
            keys += job.keys
        self._manager.discard(list(dict.fromkeys(keys)))

    def start_over(self) -> None:
        """Nothing that was planned will be copied."""
        self._planned.clear()

    def _touch(self, tracked: TrackedRequest, end: int) -> None:
        tracked.touched = end
        keys = self._shape.all_keys(tracked.request.block_hashes, end)
        self._manager.touch(keys, is_new_use=False)

    def _storable(
        self, tracked: TrackedRequest, tables: BlockIds, first: int, end: int
    ) -> dict[OffloadKey, DeviceBlocks]:
        """By key, in the order of the tokens: the whole offloaded blocks that the device has."""
        shape, factor = self._shape, self._shape.factor
        block_hashes = tracked.request.block_hashes
        by_group = [shape.keys.of(block_hashes, group, first, end) for group in shape.groups]
        found: dict[OffloadKey, DeviceBlocks] = {}
        for index in range(first, end):
            for group, keys in enumerate(by_group):
                blocks = tables[group][index * factor : (index + 1) * factor]
                if len(blocks) == factor and NULL_BLOCK not in blocks:
                    found[keys[index - first]] = DeviceBlocks(group, blocks)
        return found

    def _job(
        self,
        wanted: dict[OffloadKey, DeviceBlocks],
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
    ) -> TransferJob:
        device: list[DeviceBlocks] = []
        slots_of: list[list[int]] = []
        keys_of: list[list[OffloadKey]] = []
        for group in self._shape.groups:
            places = [at for at, key in enumerate(keys) if wanted[key].group == group]
            if not places:
                continue
            blocks = [block for at in places for block in wanted[keys[at]].block_ids]
            device.append(DeviceBlocks(group, blocks))
            slots_of.append([slots[at] for at in places] if slots else [])
            keys_of.append([keys[at] for at in places])
        job_id, medium = self._jobs.next_id(), self._manager.medium
        return TransferJob(job_id, medium, False, device, slots_of, keys_of)
