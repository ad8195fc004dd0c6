"""The engine's part of the live view: snapshots of requests and of the KV pool for front ends.

    Watch ─▶ counting begins ─ something changed, VIEW_SECONDS after the last view ─▶
    EngineView to all front ends with viewers ─ no change, and all rates are 0 ─▶ silence

Start with `EngineViewPublisher`. Without viewers it does nothing. A view is made before the engine
waits, while the workers compute, and is the same for all front ends. The messages are in
`proto/messages/view.py`. The block map takes time in proportion to the pool, in arrays: 0.2 ms
for 10,000 blocks.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_core.adapters import AdapterRegistry
from engine_core.kv_cache.free_queue import NULL_BLOCK
from engine_core.kv_cache.groups import CacheGroup
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import BlockPool
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.request_lifecycle import OutputsByFrontEnd
from engine_core.scheduler.scheduler import Scheduler
from engine_core.transport import FrontEndLinks
from proto.messages.engine_io import EventType
from proto.messages.stats import SchedulerStats
from proto.messages.view import (
    CACHED,
    HELD,
    MAX_SHOWN_REQUESTS,
    PREEMPTED,
    RESERVED,
    RETAINED,
    RUNNING,
    SHARED,
    VIEW_SECONDS,
    WAITING,
    WAITING_FOR_KV,
    BlockMap,
    EngineView,
    RequestView,
    blocks_per_cell,
)

Ints = NDArray[np.int32]

_STATES: Final = {
    RequestStatus.RUNNING: RUNNING,
    RequestStatus.PREEMPTED: PREEMPTED,
    RequestStatus.WAITING_FOR_REMOTE_KVS: WAITING_FOR_KV,
}


class EngineViewPublisher:
    """Sends views to the front ends that have viewers. epoch: of the engine. clock: seconds.

    adapters: None if none are served.
    """

    def __init__(
        self,
        front_ends: FrontEndLinks,
        scheduler: Scheduler,
        kv_cache: KVCacheManager,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self._adapters = adapters
        self._front_ends = front_ends
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._epoch = epoch
        self._clock = clock
        self._watching: set[int] = set()  # front ends
        self._owner_numbers = OwnerNumbers()
        self._has_changed = False
        self._last_view_at = self._next_view_at = 0.0
        self._counters = ViewCounters()

    def watch(self, front_end: int, *, wanted: bool) -> None:
        """Send views to a front end from now on; not `wanted`: it has no viewers, or is gone."""
        if not wanted:
            self._watching.discard(front_end)
            return
        now = self._clock()
        if not self._watching:
            self._counters = ViewCounters()
            self._last_view_at = now
            self._next_view_at = max(self._next_view_at, now)
        self._watching.add(front_end)
        self._has_changed = True

    def count(self, outputs: OutputsByFrontEnd, stats: SchedulerStats | None) -> None:
        """Count what is being sent to the front ends."""
        if self._watching:
            self._has_changed = True
            self._counters.add_flush(outputs, stats)

    @property
    def seconds_to_next(self) -> float | None:
        """Return the time until a view is due; None if nothing has changed or no page is open."""
        if not self._has_changed or not self._watching:
            return None
        return max(0.0, self._next_view_at - self._clock())

    def send_if_due(self) -> None:
        """Send a view if one is due, except to front ends that still have messages to read."""
        if not self._has_changed or not self._watching:
            return
        now = self._clock()
        if now < self._next_view_at:
            return
        front_ends = [
            front_end for front_end in self._watching if self._front_ends.keeps_up(front_end)
        ]
        self._next_view_at = now + VIEW_SECONDS
        if front_ends:
            view = self.make_view(now)
            for front_end in front_ends:
                self._front_ends.send(front_end, view)

    def make_view(self, now: float) -> EngineView:
        """Return a view, and reset the counters.

        If anything was counted, another view follows, so that rates return to zero.
        """
        scheduler, kv_cache, counters = self._scheduler, self._kv_cache, self._counters
        shown = shown_requests(scheduler)
        num_blocks = num_blocks_by_sequence(kv_cache)
        self._owner_numbers.assign([*num_blocks, *(request.seq_id for request in shown)])
        owners = self._owner_numbers.numbers
        num_state_slots, num_held_states = kv_cache.num_states
        view = EngineView(
            epoch=self._epoch,
            timestamp=now,
            seconds=now - self._last_view_at,
            step=scheduler.step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            queried_tokens=counters.queried_tokens,
            found_tokens=counters.found_tokens,
            preemptions=counters.preemptions,
            requests=[
                request_view(request, owners[request.seq_id], num_blocks.get(request.seq_id, 0))
                for request in shown
            ],
            more_requests=scheduler.num_unfinished - len(shown),
            blocks=block_map(kv_cache, owners),
            num_drafts=counters.num_drafts,
            draft_tokens=counters.draft_tokens,
            accepted_tokens=counters.accepted_tokens,
            num_state_slots=num_state_slots,
            num_held_states=num_held_states,
            states=state_map(kv_cache, owners),
            step_limit=scheduler.step_limit,
            tiers=scheduler.kv_tiers,
            adapters=[] if self._adapters is None else self._adapters.views(),
        )
        self._has_changed = counters.reset()
        self._last_view_at = now
        return view


class ViewCounters:
    """What an engine did since its last view.

    A request of P prompt tokens and G output tokens has P + G - 1 tokens computed, because its last
    output is never computed. Computed prompt tokens are therefore all computed tokens, minus the
    outputs, plus one for each first output. While a step is in flight this can be below 0; the
    deficit is carried over to the next view.
    """

    def __init__(self) -> None:
        self.generation_tokens = self.queried_tokens = self.found_tokens = self.preemptions = 0
        self.num_drafts = self.draft_tokens = self.accepted_tokens = 0
        self._prompt_balance = 0

    def add_flush(self, outputs: OutputsByFrontEnd, stats: SchedulerStats | None) -> None:
        for front_end_outputs in outputs.values():
            for output in front_end_outputs:
                number = len(output.new_token_ids)
                self.generation_tokens += number
                is_first = any(event.type is EventType.QUEUED for event in output.events)
                has_none = output.finish_reason is not None and not number  # refused or ended early
                self._prompt_balance += (is_first and not has_none) - number
        if stats is not None:
            self._prompt_balance += stats.num_scheduled_tokens
            self.queried_tokens += stats.prefix_cache_queries
            self.found_tokens += stats.prefix_cache_hits
            self.preemptions += stats.num_preemptions
            self.num_drafts += stats.num_drafts
            self.draft_tokens += stats.num_draft_tokens
            self.accepted_tokens += stats.num_accepted_tokens

    @property
    def prompt_tokens(self) -> int:
        """Return the computed prompt tokens, including recomputed ones."""
        return max(0, self._prompt_balance)

    def reset(self) -> bool:
        """Set all counters to 0, except a deficit. Return whether anything had been counted."""
        has_counted = bool(
            self.prompt_tokens or self.generation_tokens or self.queried_tokens or self.preemptions
        )
        self.generation_tokens = self.queried_tokens = self.found_tokens = self.preemptions = 0
        self.num_drafts = self.draft_tokens = self.accepted_tokens = 0
        self._prompt_balance = min(0, self._prompt_balance)
        return has_counted


class OwnerNumbers:
    """Small numbers for the sequences in a view, because seq_ids grow and tell how many there were.

    numbers: by seq_id, from 1. A sequence keeps its number; numbers of ended ones are reused.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self._returned: list[int] = []  # a heap
        self._highest = 0

    def assign(self, seq_ids: Iterable[int]) -> None:
        """Number exactly these sequences; those that have a number keep it."""
        before, wanted = self.numbers, dict.fromkeys(seq_ids)
        for seq_id in before.keys() - wanted.keys():
            heapq.heappush(self._returned, before[seq_id])
        self.numbers = {seq_id: before.get(seq_id) or self._lowest_unused() for seq_id in wanted}

    def _lowest_unused(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self._highest += 1
        return self._highest


def shown_requests(scheduler: Scheduler) -> list[Request]:
    """Return at most MAX_SHOWN_REQUESTS requests: running ones first, then the oldest others."""
    shown = scheduler.running[:MAX_SHOWN_REQUESTS]
    others = (
        request for request in scheduler.requests if request.status is not RequestStatus.RUNNING
    )
    return shown + list(islice(others, MAX_SHOWN_REQUESTS - len(shown)))


def request_view(request: Request, owner: int, num_blocks: int) -> RequestView:
    """Return the view of a request. owner: its number. num_blocks: blocks in its tables."""
    lora = request.lora_request
    return RequestView(
        owner=owner,
        reader=request.reader,
        label=request.label,
        state=_STATES.get(request.status, WAITING),
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        computed_tokens=request.num_computed_tokens,
        cached_tokens=request.num_cached_tokens,
        num_blocks=num_blocks,
        adapter="" if lora is None else lora.lora_name,
        num_images=len(request.mm_features),
    )


def num_blocks_by_sequence(kv_cache: KVCacheManager) -> dict[int, int]:
    """Return the number of blocks in the tables of each seq_id, without the null block."""
    num_blocks: dict[int, int] = {}
    has_windows = not kv_cache.caches_all_prefixes
    for group in kv_cache.block_groups:
        for seq_id, table in group.block_tables().items():
            number = len(table) - (table.count(NULL_BLOCK) if has_windows else 0)
            num_blocks[seq_id] = num_blocks.get(seq_id, 0) + number
    return num_blocks


def block_map(kv_cache: KVCacheManager, owners: Mapping[int, int]) -> BlockMap:
    """Return the pool as runs of equal cells. owners: number of each sequence, by seq_id.

    tables   7: 1 2 3   9: 1 2 4   retained 5   findable 1 2 5 6
    block    0        1      2      3    4    5      6      7 …
    cell     reserved shared shared held held retained cached free …
    owner    -        7      7      7    9    -      -      -
    """
    copied = kv_cache.transfer_refs.blocks
    return _runs(*block_states(kv_cache.pool, kv_cache.block_groups, owners, copied))


def state_map(kv_cache: KVCacheManager, owners: Mapping[int, int]) -> BlockMap:
    """Return the slots for recurrent states as a map, without the null slot; empty without them."""
    if not kv_cache.state_groups:
        return BlockMap(b"", b"", b"")
    (group,) = kv_cache.state_groups
    copied = group.transfer_refs.blocks
    states, slot_owners = block_states(group.pool, (group,), owners, copied)
    return _runs(states[1:], slot_owners[1:])


def block_states(
    pool: BlockPool,
    groups: Iterable[CacheGroup],
    owners: Mapping[int, int],
    copied: Iterable[int] = (),
) -> tuple[Ints, Ints]:
    """Return state and owner (0 for none) of every block: int32 [num_blocks] each.

    groups: all of this pool. copied: blocks that are held for a copy. The owner of a shared block
    is the lowest of the numbers.
    """
    tables = [
        (owners[seq_id], table)
        for group in groups
        for seq_id, table in group.block_tables().items()
    ]
    tables.sort(key=lambda owner_and_table: -owner_and_table[0])  # the lowest is written last
    held = _array(chain.from_iterable(table for _, table in tables))
    sizes = [len(table) for _, table in tables]
    block_owners = np.zeros(pool.num_blocks, np.int32)
    block_owners[held] = np.repeat(np.array([owner for owner, _ in tables], np.int32), sizes)
    block_owners[NULL_BLOCK] = 0
    states = np.zeros(pool.num_blocks, np.int32)
    states[_array(pool.index.blocks())] = CACHED
    states[_array(copied)] = HELD
    num_tables = np.bincount(held, minlength=pool.num_blocks)
    states[num_tables == 1] = HELD
    states[num_tables > 1] = SHARED
    states[_array(pool.retained.counts)] = RETAINED
    states[NULL_BLOCK] = RESERVED
    return states, block_owners


def _array(blocks: Iterable[int]) -> Ints:
    return np.fromiter(blocks, np.int32)


def _merge_blocks(states: Ints, owners: Ints, per_cell: int) -> tuple[Ints, Ints]:
    """Return one cell for `per_cell` blocks: the block with the highest state among them.

    |- per_cell -|- per_cell -|- per_cell -|
    |  block map                   |--free-|    padded to a whole cell
    """
    num_padding = -len(states) % per_cell
    states = np.pad(states, (0, num_padding)).reshape(-1, per_cell)
    owners = np.pad(owners, (0, num_padding)).reshape(-1, per_cell)
    cells = np.arange(len(states))
    highest = states.argmax(axis=1)
    return states[cells, highest], owners[cells, highest]


def _runs(states: Ints, owners: Ints) -> BlockMap:
    per_cell = blocks_per_cell(len(states))
    if per_cell > 1:
        states, owners = _merge_blocks(states, owners, per_cell)
    changes = (states[1:] != states[:-1]) | (owners[1:] != owners[:-1])
    starts = np.concatenate(([0], np.flatnonzero(changes) + 1))
    lengths = np.diff(starts, append=len(states))
    return BlockMap(
        lengths.astype("<i4").tobytes(),
        states[starts].astype(np.uint8).tobytes(),
        owners[starts].astype("<i4").tobytes(),
    )
