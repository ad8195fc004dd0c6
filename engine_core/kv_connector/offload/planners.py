"""Decides which blocks the offloading connector loads and stores.

`LoadPlanner.match` finds how much of a request a medium has (`longest_hit`), `plan` makes the copy.
`StorePlanner.plan` stores blocks that have become full.

    tokens     0          computed            end            limit
               |--device-----|--to be loaded------|              |
    full attention   needs every block from `computed` to `end`
    sliding window   needs only the last window - 1 tokens before `end` that the device lacks
    states           need one at `end`, in a slot or on the medium (states.py)
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from engine_core.kv_cache.free_queue import NULL_BLOCK
from engine_core.kv_connector.base import NO_MATCH, NOT_KNOWN_YET, DevicePrefix, Match
from engine_core.kv_connector.offload.base import OffloadingManager, OffloadKey, ReuseTracker
from engine_core.kv_connector.offload.states import StatePages
from engine_core.kv_connector.offload.tracking import (
    BlockLayout,
    InFlightJob,
    JobsInFlight,
    MediumStatistics,
    TrackedRequest,
)
from engine_core.request import Request
from proto.messages.kv_connector import DeviceBlocks, TransferJob
from proto.messages.scheduler_output import BlockIds

_TOUCH_GROWTH: Final = 4
"""A sequence of n blocks is touched again after n / 4 more: about four keys for each new block."""


class Extent(NamedTuple):
    """Range of tokens that may be loaded.

    computed: tokens in the device's prefix cache. limit: maximum number of tokens of a hit. Both
    are multiples of the device block size. size: tokens of an offloaded block.
    """

    computed: int
    limit: int
    size: int

    @property
    def first(self) -> int:
        """Index of the first offloaded block to load, possibly only its second part."""
        return self.computed // self.size


GroupPresence = tuple[int | None, Sequence[bool]]
"""A KV cache group's window in tokens, None for full attention; and which of its offloaded blocks
can be loaded, from `Extent.first` on."""


def first_needed(window: int | None, computed: int, end: int) -> int:
    """Return the first token that a group must load so that the sequence has [0, end)."""
    return computed if window is None else max(computed, end - window + 1)


def longest_run(extent: Extent, group: GroupPresence, most: int) -> int:
    """Return the longest hit of one group, at most `most` tokens; `computed` if there is none.

    A hit ends at the end of an offloaded block, or at `most`, inside one. A window of 1 is treated
    as 2, because a hit must include a computed token.

        present     no   yes  yes  no   yes        window of two blocks
        ends                  ^
    """
    size, first = extent.size, extent.first
    window, present = group
    window = None if window is None else max(window, 2)
    runs = [0]  # for each block, the length of the run of present blocks that ends with it
    for is_present in present:
        runs.append(runs[-1] + 1 if is_present else 0)
    end = most
    while end > extent.computed:
        last = (end - 1) // size
        if last - first < len(present):
            needs = last - first_needed(window, extent.computed, end) // size + 1
            if runs[last - first + 1] >= needs:
                return end
        end = last * size
    return extent.computed


def longest_hit(extent: Extent, groups: Sequence[GroupPresence]) -> int:
    """Return the longest hit that all groups share; `computed` tokens if there is none.

    The end is lowered until every group accepts it.
    """
    end, num_accepted, turn = extent.limit, 0, 0
    while num_accepted < len(groups) and end > extent.computed:
        lowered = longest_run(extent, groups[turn % len(groups)], end)
        num_accepted = num_accepted + 1 if lowered == end else 1
        end = lowered
        turn += 1
    return end


def longest_hit_with_state(
    extent: Extent, groups: Sequence[GroupPresence], num_computed: int, state_ends: frozenset[int]
) -> int:
    """Return the longest hit that all groups share and that ends with a state.

    extent: computed are the tokens whose KV the device has, which may be more than `num_computed`,
    those with a state. state_ends: numbers of tokens after which there is a state.
    """
    end = extent.limit
    while True:
        with_kv = longest_hit(extent._replace(limit=end), groups) if end > extent.computed else end
        end = max((number for number in state_ends if number <= with_kv), default=0)
        if end <= num_computed:
            return num_computed
        if end in (with_kv, min(end, extent.computed)):
            return end


class LoadPlanner:
    """Plans loads from one medium.

    A block that is being loaded for one request is not loaded again for another: the other request
    waits and then finds it in the prefix cache. unblock: reschedules a waiting request. reuse:
    counts the lookups of each block, once for each request; None: every block is stored.
    states: of a model with recurrent states.
    """

    def __init__(
        self,
        layout: BlockLayout,
        manager: OffloadingManager,
        jobs: JobsInFlight,
        unblock: Callable[[Request], None],
        reuse: ReuseTracker | None,
        states: StatePages | None = None,
    ) -> None:
        self._layout = layout
        self._manager = manager
        self._jobs = jobs
        self._unblock = unblock
        self._reuse = reuse
        self._states = states
        self._planned: list[InFlightJob] = []
        self._loading: Counter[OffloadKey] = Counter()
        self._waiting: dict[int, Request] = {}

    def match(
        self, tracked: TrackedRequest, num_computed: int, on_device: DevicePrefix | None = None
    ) -> Match:
        """Return what the medium can load after the first `num_computed` tokens.

        on_device: what else the device has, of a model with recurrent states.
        """
        request, layout = tracked.request, self._layout
        block_hashes = request.block_hashes
        num_blocks = len(block_hashes) // layout.factor
        is_new_use, tracked.was_looked_up = not tracked.was_looked_up, True
        if is_new_use:
            self._manager.touch(layout.all_keys(block_hashes, num_blocks))
        if on_device is None and num_blocks * layout.size - num_computed < layout.size:
            return NO_MATCH
        limit = (request.num_tokens - 1) // layout.block_size * layout.block_size
        tracked.num_with_kv = num_computed if on_device is None else on_device.num_with_kv
        extent = Extent(tracked.num_with_kv, limit, layout.size)
        groups = self._look_up(request, extent, num_blocks, is_new_use)
        if on_device is None:
            hit = None if groups is None else longest_hit(extent, groups)
        else:
            hit = self._find_state_hit(tracked, extent, groups, num_computed, on_device, is_new_use)
        if hit is None:
            return self._wait_for_lookup(request)
        if hit <= num_computed:
            return NO_MATCH
        wanted = self._keys_to_load(block_hashes, tracked.num_with_kv, hit)
        if any(self._loading[key] for keys in wanted for key in keys):
            return self._wait_for_lookup(request)
        states = self._states if tracked.loads_state else None
        if states is not None and states.is_loading(request, hit):
            return self._wait_for_lookup(request)
        tracked.hit = hit
        return Match(hit - num_computed, is_async=True)

    def plan(self, tracked: TrackedRequest, tables: BlockIds, num_external: int) -> None:
        """Plan the load of a match, or of its beginning, into the blocks allocated for it.

        table of a group   | 7 | 3 | 9 | 4 | 8 | 2 | . |     factor 4, computed 1 block
        loaded                 ^^^^^^^^^^^^^^^^^ hit         skip 1 of the first offloaded block
        """
        layout, request = self._layout, tracked.request
        end = min(tracked.hit, request.num_computed_tokens)
        num_computed = max(end - num_external, min(end, tracked.num_with_kv))
        if self._states is not None and tracked.loads_state:
            self._states.plan_load(tracked, tables[self._states.group], end)
            tracked.num_loading += 1
        if num_computed == end:
            return  # the device has the KV
        wanted = self._keys_to_load(request.block_hashes, num_computed, end)
        device, slots = [], []
        for group, (table, keys) in enumerate(zip(tables, wanted, strict=False)):
            first = self._first_block(group, num_computed, end)
            blocks = table[first : end // layout.block_size]
            assert NULL_BLOCK not in blocks, f"{request!r} lacks blocks to load into"
            device.append(DeviceBlocks(group, blocks, first % layout.factor))
            slots.append(list(self._manager.prepare_load(keys)))
        flat = [key for keys in wanted for key in keys]
        self._loading.update(flat)
        job = TransferJob(
            self._jobs.next_id(), self._manager.medium, True, device, slots, list(wanted)
        )
        first = num_computed // layout.size
        self._planned.append(self._jobs.start_job(job, request, flat, first))
        tracked.num_loading += 1
        tracked.next_block = max(tracked.next_block, end // layout.size)
        tracked.next_at = (tracked.next_block + 1) * layout.size

    def pop_planned(self) -> list[InFlightJob]:
        planned, self._planned = self._planned, []
        return planned

    def complete(self, job: InFlightJob, tracked: TrackedRequest | None) -> None:
        """Finish a load that all ranks have reported. tracked: its request, unless it has ended.

        Blocks that could not be read are removed, and stored again once they are computed.
        """
        if tracked is not None:
            tracked.num_loading = max(0, tracked.num_loading - 1)
            if not job.succeeded:
                tracked.next_block = tracked.next_at = 0
        if job.transfer.is_of_states:
            assert self._states is not None
            self._states.complete_load(job)
        else:
            self._manager.complete_load(job.keys, success=job.succeeded)
            self._loading.subtract(job.keys)
            self._loading = +self._loading
        self.unblock_all()

    def unblock_all(self) -> None:
        """Reschedule all requests that wait for a lookup or another request's load."""
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            self._unblock(request)

    def remove_request(self, seq_id: int) -> None:
        self._waiting.pop(seq_id, None)

    def on_worker_restart(self) -> None:
        self._planned.clear()
        self._loading.clear()
        self.unblock_all()

    def _wait_for_lookup(self, request: Request) -> Match:
        self._waiting[request.seq_id] = request
        return NOT_KNOWN_YET

    def _find_state_hit(
        self,
        tracked: TrackedRequest,
        extent: Extent,
        groups: Sequence[GroupPresence] | None,
        num_computed: int,
        on_device: DevicePrefix,
        is_new_use: bool,
    ) -> int | None:
        """Return the longest hit with a state; None if the medium does not know yet."""
        assert self._states is not None
        ends = self._states.find_ends(tracked.request, num_computed, is_new_use=is_new_use)
        if ends is None or groups is None:
            return None
        hit = longest_hit_with_state(extent, groups, num_computed, ends | on_device.state_ends)
        tracked.loads_state = hit not in on_device.state_ends
        return hit

    def _look_up(
        self, request: Request, extent: Extent, num_blocks: int, is_new_use: bool
    ) -> list[GroupPresence] | None:
        """Return which blocks each group can load; None if the medium does not know yet.

        All groups are looked up even after a miss, so that every key is counted.
        """
        groups: list[GroupPresence] = []
        is_known = True
        for group, window in enumerate(self._layout.windows):
            keys = self._layout.keys(request.block_hashes, group, extent.first, num_blocks)
            present: list[bool] | None = None
            if is_new_use and self._reuse is not None:
                for key in keys:
                    self._reuse.record_lookup(key)
            if window is None or is_new_use:
                run = self._manager.lookup(keys)
                present = None if run is None else [True] * run
            if window is not None:
                present = self._manager.contains(keys)
            is_known &= present is not None
            groups.append((window, present or []))
        return groups if is_known else None

    def _first_block(self, group: int, num_computed: int, end: int) -> int:
        """Return the index of the first device block that a group must load."""
        layout = self._layout
        return first_needed(layout.windows[group], num_computed, end) // layout.block_size

    def _keys_to_load(
        self, block_hashes: list[bytes], num_computed: int, end: int
    ) -> list[list[OffloadKey]]:
        """Return the keys of the offloaded blocks to load, for each group."""
        layout = self._layout
        return [
            layout.keys(
                block_hashes,
                group,
                self._first_block(group, num_computed, end) // layout.factor,
                -(-end // layout.size),
            )
            for group in layout.groups
        ]


class StorePlanner:
    """Plans stores to one medium.

    A request's `next_block` only grows, so each block is offered once. Blocks are referenced while
    they are copied, so the request may end, be preempted or move its window meanwhile.

    The beginning of a sequence should be evicted last, so the whole sequence is touched as it
    grows: after each growth by a quarter and at its end, because touching all of it with every
    block would take quadratic time. reuse: knows which blocks were looked up often enough to be
    stored; None: every block is stored.
    """

    def __init__(
        self,
        layout: BlockLayout,
        manager: OffloadingManager,
        jobs: JobsInFlight,
        statistics: MediumStatistics,
        reuse: ReuseTracker | None,
    ) -> None:
        self._layout = layout
        self._manager = manager
        self._jobs = jobs
        self._statistics = statistics
        self._reuse = reuse
        self._planned: list[InFlightJob] = []

    def plan(self, tracked: TrackedRequest, tables: BlockIds, num_tokens: int) -> None:
        """Plan the stores of blocks filled by the first `num_tokens` tokens, from next_block on.

        table       | 7 | 3 | 9 | 4 | 8 | 2 | . |      factor 2, next_block 1
        stored              ^^^^^^^^^^^^^^^
        """
        layout, request = self._layout, tracked.request
        first, end = tracked.next_block, num_tokens // layout.size
        tracked.next_at = (end + 1) * layout.size
        wanted = self._storable(tracked, tables, first, end)
        if not wanted:
            return
        keys = list(wanted)
        if self._reuse is not None:
            keys = [key for key in keys if self._reuse.reaches_threshold(key)]
        prepared = self._manager.prepare_store(keys)
        if end > tracked.touched + tracked.touched // _TOUCH_GROWTH:
            self._touch(tracked, end)
        if prepared is None:
            self._statistics.num_unstored += len(wanted)
            return
        tracked.next_block = end
        self._statistics.num_skipped += len(wanted) - len(prepared.keys)
        if prepared.keys:
            job = self._make_job(wanted, prepared.keys, prepared.slots)
            self._planned.append(self._jobs.start_job(job, request, prepared.keys, first))

    def finish_request(self, tracked: TrackedRequest) -> None:
        """Touch the blocks of a finished request, so that its beginning is evicted last."""
        if tracked.touched < tracked.next_block:
            self._touch(tracked, tracked.next_block)

    @property
    def has_planned(self) -> bool:
        """Whether stores are planned that were not sent to the workers yet."""
        return bool(self._planned)

    def pop_planned(self) -> list[InFlightJob]:
        planned, self._planned = self._planned, []
        return planned

    def complete(self, job: InFlightJob) -> None:
        cancelled = not (job.succeeded or job.has_failed)
        self._manager.complete_store(job.keys, success=job.succeeded, cancelled=cancelled)

    def invalidate_request(self, request: Request) -> None:
        """Remove all blocks of a request from the medium; its KV may be corrupt."""
        block_hashes = request.block_hashes
        keys = self._layout.all_keys(block_hashes, len(block_hashes) // self._layout.factor)
        for job in self._jobs.stores_of(request.seq_id):
            keys += job.keys
        self._manager.discard(list(dict.fromkeys(keys)))

    def on_worker_restart(self) -> None:
        self._planned.clear()

    def _touch(self, tracked: TrackedRequest, end: int) -> None:
        tracked.touched = end
        keys = self._layout.all_keys(tracked.request.block_hashes, end)
        self._manager.touch(keys, is_new_use=False)

    def _storable(
        self, tracked: TrackedRequest, tables: BlockIds, first: int, end: int
    ) -> dict[OffloadKey, DeviceBlocks]:
        """Return offloaded blocks that are complete on the device, by key, in token order."""
        layout, factor = self._layout, self._layout.factor
        block_hashes = tracked.request.block_hashes
        by_group = [layout.keys(block_hashes, group, first, end) for group in layout.groups]
        found: dict[OffloadKey, DeviceBlocks] = {}
        for index in range(first, end):
            for group, keys in enumerate(by_group):
                blocks = tables[group][index * factor : (index + 1) * factor]
                if len(blocks) == factor and NULL_BLOCK not in blocks:
                    found[keys[index - first]] = DeviceBlocks(group, blocks)
        return found

    def _make_job(
        self,
        wanted: dict[OffloadKey, DeviceBlocks],
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
    ) -> TransferJob:
        device: list[DeviceBlocks] = []
        slots_of: list[list[int]] = []
        keys_of: list[list[OffloadKey]] = []
        for group in self._layout.groups:
            indices = [index for index, key in enumerate(keys) if wanted[key].group == group]
            if not indices:
                continue
            blocks = [block for index in indices for block in wanted[keys[index]].block_ids]
            device.append(DeviceBlocks(group, blocks))
            slots_of.append([slots[index] for index in indices] if slots else [])
            keys_of.append([keys[index] for index in indices])
        job_id, medium = self._jobs.next_id(), self._manager.medium
        return TransferJob(job_id, medium, False, device, slots_of, keys_of)
