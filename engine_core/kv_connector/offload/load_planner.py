"""Loads: what of a request a medium has, and which copies bring it to the device.

Owns the keys that are being loaded, and who waits for them. A block that is being loaded for one
request is not loaded again for another: that one waits, and then finds it in the prefix cache.
"""

from collections import Counter
from collections.abc import Callable

from engine_core.kv_cache.block import NULL_BLOCK, BlockIds
from engine_core.kv_connector.base import ASK_AGAIN, NO_MATCH, Match
from engine_core.kv_connector.offload.base import OffloadingManager, OffloadKey
from engine_core.kv_connector.offload.jobs import Job, JobsInFlight
from engine_core.kv_connector.offload.lookup import (
    Extent,
    GroupPresence,
    first_needed,
    longest_hit,
)
from engine_core.kv_connector.offload.requests import Shape, TrackedRequest
from engine_core.request import Request
from proto.kv_connector import DeviceBlocks, TransferJob


class LoadPlanner:
    """`wake` puts requests back into the line that were told to ask again."""

    def __init__(
        self,
        shape: Shape,
        manager: OffloadingManager,
        jobs: JobsInFlight,
        wake: Callable[[Request], None],
    ) -> None:
        self._shape = shape
        self._manager = manager
        self._jobs = jobs
        self._wake = wake
        self._planned: list[Job] = []
        self._loading: Counter[OffloadKey] = Counter()
        self._asked_in_vain: dict[int, Request] = {}

    def match(self, tracked: TrackedRequest, num_computed: int) -> Match:
        """What the medium has after the first `num_computed` tokens."""
        request, shape = tracked.request, self._shape
        block_hashes = request.block_hashes
        num_blocks = len(block_hashes) // shape.factor
        is_new_use, tracked.was_asked = not tracked.was_asked, True
        if is_new_use:
            self._manager.touch(shape.all_keys(block_hashes, num_blocks))
        if num_blocks * shape.size - num_computed < shape.size:
            return NO_MATCH
        limit = (request.num_tokens - 1) // shape.block_size * shape.block_size
        extent = Extent(num_computed, limit, shape.size)
        hit = self._find(request, extent, num_blocks, is_new_use)
        if hit is None:
            return self._ask_again(request)
        if hit <= num_computed:
            return NO_MATCH
        wanted = self._keys(block_hashes, num_computed, hit)
        if any(self._loading[key] for keys in wanted for key in keys):
            return self._ask_again(request)
        tracked.hit = hit
        return Match(hit - num_computed, is_async=True)

    def plan(self, tracked: TrackedRequest, tables: BlockIds, num_external: int) -> None:
        """The request was given blocks for what was matched.

        table of a group   | 7 | 3 | 9 | 4 | 8 | 2 | . |     factor 4, computed 1 block
        loaded                 ^^^^^^^^^^^^^^^^^ hit         skip 1 of the first offloaded block
        """
        shape, request, end = self._shape, tracked.request, tracked.hit
        num_computed = end - num_external
        wanted = self._keys(request.block_hashes, num_computed, end)
        device, slots = [], []
        for group, (table, keys) in enumerate(zip(tables, wanted, strict=True)):
            first = self._first_block(group, num_computed, end)
            blocks = table[first : end // shape.block_size]
            assert NULL_BLOCK not in blocks, f"{request!r} has no room for what is loaded"
            device.append(DeviceBlocks(group, blocks, first % shape.factor))
            slots.append(list(self._manager.prepare_load(keys)))
        flat = [key for keys in wanted for key in keys]
        self._loading.update(flat)
        job = TransferJob(
            self._jobs.next_id(), self._manager.medium, True, device, slots, list(wanted)
        )
        self._planned.append(self._jobs.begin(job, request.seq_id, flat))
        tracked.is_loading = True
        tracked.next_block = max(tracked.next_block, end // shape.size)
        tracked.next_at = (tracked.next_block + 1) * shape.size

    def take_planned(self) -> list[Job]:
        """The loads planned since the last call."""
        taken, self._planned = self._planned, []
        return taken

    def complete(self, job: Job, tracked: TrackedRequest | None) -> None:
        """All ranks have reported a load; tracked: for whom, unless that is over.

        What could not be read is forgotten, and stored anew once it is computed.
        """
        if tracked is not None:
            tracked.is_loading = False
            if not job.succeeded:
                tracked.next_block = tracked.next_at = 0
        self._manager.complete_load(job.keys, success=job.succeeded)
        self._loading.subtract(job.keys)
        self._loading = +self._loading
        self.wake_all()

    def wake_all(self) -> None:
        """Whoever was told to ask again may ask again."""
        waiting, self._asked_in_vain = self._asked_in_vain, {}
        for request in waiting.values():
            self._wake(request)

    def forget(self, seq_id: int) -> None:
        """The request is over, and asks no more."""
        self._asked_in_vain.pop(seq_id, None)

    def start_over(self) -> None:
        """Nothing is being loaded any more."""
        self._planned.clear()
        self._loading.clear()
        self.wake_all()

    def _ask_again(self, request: Request) -> Match:
        self._asked_in_vain[request.seq_id] = request
        return ASK_AGAIN

    def _find(
        self, request: Request, extent: Extent, num_blocks: int, is_new_use: bool
    ) -> int | None:
        """Tokens that all groups can have; None where the medium does not know yet.

        All groups are looked up whatever one of them says: the medium counts that once for a
        request, the first time that it asks.
        """
        groups, is_known = [], True
        for group, window in enumerate(self._shape.windows):
            keys = self._shape.keys.of(request.block_hashes, group, extent.first, num_blocks)
            present: list[bool] | None = None
            if window is None or is_new_use:
                run = self._manager.lookup(keys, is_new_use=is_new_use)
                present = None if run is None else [True] * run
            if window is not None:
                present = self._manager.contains(keys)
            is_known &= present is not None
            groups.append(GroupPresence(window, present or []))
        return longest_hit(extent, groups) if is_known else None

    def _first_block(self, group: int, num_computed: int, end: int) -> int:
        """The first device block of a group that is to be loaded."""
        return first_needed(self._shape.windows[group], num_computed, end) // self._shape.block_size

    def _keys(
        self, block_hashes: list[bytes], num_computed: int, end: int
    ) -> list[list[OffloadKey]]:
        """Per group the offloaded blocks that are to be loaded."""
        shape = self._shape
        return [
            shape.keys.of(
                block_hashes,
                group,
                self._first_block(group, num_computed, end) // shape.factor,
                -(-end // shape.size),
            )
            for group in shape.groups
        ]
