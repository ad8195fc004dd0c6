"""Recurrent states on a medium: each state at the end of a device block is a page of its own.

    device blocks   | 0 | 1 | 2 | 3 |                    slots of states   | 0 | 0 | 5 | 0 |
    page            hash of block 2 ‖ group (1 byte) ‖ ranks (2) ‖ 1 (2)           ◀─ slot 5

A medium has a manager for states beside that for KV, whose blocks have another size.
"""

from collections import Counter
from collections.abc import Sequence

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_connector.offload.base import OffloadingManager, OffloadKey, ReuseTracker
from engine_core.kv_connector.offload.tracking import (
    BlockLayout,
    InFlightJob,
    JobsInFlight,
    TrackedRequest,
)
from engine_core.request import Request
from proto.messages.kv_connector import DeviceBlocks, TransferJob


class StatePages:
    """Plans loads and stores of the states of one medium.

    group: the number of the group of states. layout: with a factor of 1. jobs: copies of states,
    which reference slots. slots: of the engine. reuse: knows which states were looked up often
    enough to be stored; None: every state is stored.
    """

    def __init__(
        self,
        group: int,
        layout: BlockLayout,
        manager: OffloadingManager,
        jobs: JobsInFlight,
        slots: KVCacheManager,
        reuse: ReuseTracker | None,
    ) -> None:
        self.group = group
        self.layout = layout
        self.manager = manager
        self.jobs = jobs
        self._slots = slots
        self._reuse = reuse
        self._loads: list[InFlightJob] = []
        self._stores: list[InFlightJob] = []
        self._loading: Counter[OffloadKey] = Counter()

    def find_ends(
        self, request: Request, num_computed: int, *, is_new_use: bool
    ) -> frozenset[int] | None:
        """Return after how many tokens, more than `num_computed`, a state can be loaded.

        None: the medium does not know yet. is_new_use: the request is looked up for the first time.
        """
        size = self.layout.block_size
        first, end = num_computed // size, (request.num_tokens - 1) // size
        keys = self._keys(request, first, end)
        if is_new_use:
            self.manager.touch(keys)
            if self._reuse is not None:
                for key in keys:
                    self._reuse.record_lookup(key)
        present = self.manager.contains(keys)
        if present is None:
            return None
        return frozenset(
            (first + index + 1) * size for index, is_present in enumerate(present) if is_present
        )

    def is_loading(self, request: Request, end: int) -> bool:
        """Return whether the state after the first `end` tokens is being loaded for a request."""
        return self._loading[self._key(request, end)] > 0

    def plan_load(self, tracked: TrackedRequest, table: Sequence[int], end: int) -> None:
        """Plan the load of the state after the first `end` tokens, into its slot in the table."""
        key = self._key(tracked.request, end)
        slots = [list(self.manager.prepare_load([key]))]
        job = self._job(table[end // self.layout.block_size - 1], key, slots, is_load=True)
        self._loading[key] += 1
        self._loads.append(self._start(job, tracked.request, key, end))

    def complete_load(self, job: InFlightJob) -> None:
        """Finish a load that all ranks have reported. A state that could not be read is removed."""
        self.manager.complete_load(job.keys, success=job.succeeded)
        self._loading.subtract(job.keys)
        self._loading = +self._loading

    def plan_stores(self, tracked: TrackedRequest, num_tokens: int, *, ends: bool) -> int:
        """Plan the stores of states; return how many find no room on the medium, or no slot.

        num_tokens: whose states are computed. ends: the request has ended.
        """
        request, num_unstored = tracked.request, 0
        for index, slot in self._slots.storable_states(request.seq_id, num_tokens, ends=ends):
            end = (index + 1) * self.layout.block_size
            key = self._key(request, end)
            if index in tracked.stored_states:
                continue
            if self._reuse is not None and not self._reuse.reaches_threshold(key):
                continue
            prepared = None
            if self._slots.can_copy_states(request.seq_id, ends=ends):
                prepared = self.manager.prepare_store([key])
            if prepared is None:
                num_unstored += 1
                continue
            tracked.stored_states.add(index)
            if prepared.keys:
                job = self._job(slot, key, [list(prepared.slots)], is_load=False)
                self._stores.append(self._start(job, request, key, end))
        return num_unstored

    def complete_store(self, job: InFlightJob) -> None:
        cancelled = not (job.succeeded or job.has_failed)
        self.manager.complete_store(job.keys, success=job.succeeded, cancelled=cancelled)

    @property
    def has_planned_stores(self) -> bool:
        return bool(self._stores)

    def pop_planned(self) -> tuple[list[InFlightJob], list[InFlightJob]]:
        """Return loads and stores that were planned since the last call."""
        planned = self._loads, self._stores
        self._loads, self._stores = [], []
        return planned

    def discard(self, request: Request) -> None:
        """Remove all states of a request from the medium; they may be corrupt."""
        self.manager.discard(self._keys(request, 0, len(request.block_hashes)))

    def on_worker_restart(self) -> None:
        self.jobs.drop_all()
        self.pop_planned()
        self._loading.clear()
        self.manager.on_worker_restart()

    def _start(
        self, transfer: TransferJob, request: Request, key: OffloadKey, end: int
    ) -> InFlightJob:
        first = end // self.layout.block_size - 1
        return self.jobs.start_job(transfer, request, [key], first)

    def _job(
        self, slot: int, key: OffloadKey, slots: list[list[int]], *, is_load: bool
    ) -> TransferJob:
        return TransferJob(
            self.jobs.next_id(),
            self.manager.medium,
            is_load,
            [DeviceBlocks(self.group, [slot])],
            slots,
            [[key]],
            is_of_states=True,
        )

    def _key(self, request: Request, end: int) -> OffloadKey:
        index = end // self.layout.block_size
        return self._keys(request, index - 1, index)[0]

    def _keys(self, request: Request, first: int, end: int) -> list[OffloadKey]:
        return self.layout.keys(request.block_hashes, self.group, first, end)
