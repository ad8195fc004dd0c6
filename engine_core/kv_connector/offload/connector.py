"""The scheduler's half of the offloading connector. Start with `OffloadingScheduler`.

    schedule()   match ─▶ plan loads ─▶ build_connector_meta: loads, and stores of full blocks
    workers      start the loads before the step, and the stores with the following step
    reports      after all ranks: update the manager, release device blocks, unblock requests

planners.py decides what is loaded and stored, the medium's manager what is evicted.
"""

import itertools
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from operator import add
from typing import Any

from engine_core.kv_cache.events import StoredBlocks
from engine_core.kv_connector.base import (
    NO_MATCH,
    DevicePrefix,
    Match,
    SchedulerConnector,
    SchedulerContext,
)
from engine_core.kv_connector.offload.base import (
    ManagerContext,
    OffloadingManager,
    OffloadKey,
    ReuseTracker,
    create_manager,
)
from engine_core.kv_connector.offload.planners import LoadPlanner, StorePlanner
from engine_core.kv_connector.offload.states import StatePages
from engine_core.kv_connector.offload.tracking import (
    BlockLayout,
    InFlightJob,
    JobsInFlight,
    MediumStatistics,
    TrackedRequest,
    parse_key,
)
from engine_core.request import Request, RequestStatus
from proto.messages.kv_connector import (
    NO_PAYLOAD,
    KVConnectorOutput,
    OffloadMetadata,
    OffloadReport,
    Payload,
    pack,
    unpack,
)
from proto.messages.kv_events import BlockRemoved, BlockStored, KVEvent, event_hash
from proto.messages.scheduler_output import BlockIds, SchedulerOutput
from proto.messages.stats import KVMediumStats, KVTier
from proto.runtime.sockets import EventFd
from proto.settings.kv_transfer_config import KVTransferConfig, offload_settings


class OffloadingScheduler(SchedulerConnector):
    """SchedulerConnector that stores KV blocks on one medium and loads them again.

    The states of a model with recurrent states, too: they have a part of the medium to themselves.
    """

    supports_states = True

    def __init__(self, config: KVTransferConfig, context: SchedulerContext) -> None:
        """Raises ConfigError naming the wrong key of kv_connector_extra_config."""
        extra = config.kv_connector_extra_config
        geometry, state_slots = context.geometry, context.state_slots
        windows = [group.sliding_window for group in geometry.block_groups]
        settings, factor = offload_settings(
            extra, context.block_size, windows, has_states=state_slots is not None
        )
        self._may_load, self._may_store = config.loads, config.stores
        self._layout = BlockLayout(context.block_size, factor, windows, context.num_ranks)
        self._block_ids = context.block_ids
        self._is_storable = context.is_storable
        self._event_fd = EventFd()
        manager_context = ManagerContext(
            fingerprint=context.fingerprint,
            num_ranks=context.num_ranks,
            block_bytes=geometry.bytes_per_token * self._layout.size,
            notify=self._event_fd.notify,
            factor=factor,
            share=1.0 if state_slots is None else 1.0 - settings.state_share,
        )
        self._manager = create_manager(settings, extra, manager_context)
        self._statistics = MediumStatistics(self._manager.medium)
        numbers = itertools.count(1)
        self._jobs = JobsInFlight(context.num_ranks, context.transfer_refs, numbers)
        reuse = None
        if settings.store_threshold > 1:
            reuse = ReuseTracker(settings.store_threshold, settings.max_tracker_size)
        self._states: StatePages | None = None
        if state_slots is not None:
            of_states = replace(
                manager_context,
                block_bytes=geometry.state_bytes,
                holds_states=True,
                share=settings.state_share,
            )
            self._states = StatePages(
                len(windows),
                BlockLayout(context.block_size, 1, [*windows, None], context.num_ranks),
                create_manager(settings, extra, of_states),
                JobsInFlight(context.num_ranks, state_slots.state_refs, numbers),
                state_slots,
                reuse,
            )
        self._loads = LoadPlanner(
            self._layout, self._manager, self._jobs, context.unblock, reuse, self._states
        )
        self._stores = StorePlanner(
            self._layout, self._manager, self._jobs, self._statistics, reuse
        )
        self._requests: dict[int, TrackedRequest] = {}  # by seq_id
        self._has_deferred = False
        self._geometry = context.geometry
        self._publishes_events = context.serve_config.cache.parsed_kv_events() is not None
        self._stored: dict[OffloadKey, BlockStored] = {}  # until the manager has made it findable

    # Scheduling a step

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Match:
        return self._match(request, num_computed_tokens, None)

    def match_with_states(
        self, request: Request, num_computed_tokens: int, on_device: DevicePrefix
    ) -> Match:
        return self._match(request, num_computed_tokens, on_device)

    def _match(
        self, request: Request, num_computed_tokens: int, on_device: DevicePrefix | None
    ) -> Match:
        if not self._may_load or request.skip_reading_prefix_cache:
            return NO_MATCH
        tracked, began = self._track_request(request), time.monotonic()
        match = self._loads.match(tracked, num_computed_tokens, on_device)
        is_answered = match.num_tokens is not None
        self._statistics.record_lookup(tracked, began, is_answered=is_answered)
        return match

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        tracked = self._track_request(request)
        tracked.num_loading = 0
        if num_external_tokens:
            self._loads.plan(tracked, block_ids, num_external_tokens)

    def _track_request(self, request: Request) -> TrackedRequest:
        tracked = self._requests.get(request.seq_id)
        if tracked is None:
            tracked = self._requests[request.seq_id] = TrackedRequest(request)
        return tracked

    def build_connector_meta(self, output: SchedulerOutput) -> Payload:
        if self._may_store:
            self._plan_stores(output)
        loads, stores = self._loads.pop_planned(), self._stores.pop_planned()
        if self._states is not None:
            of_states = self._states.pop_planned()
            loads, stores = loads + of_states[0], stores + of_states[1]
        flush = [
            job.transfer.job_id
            for seq_id in output.preempted_seq_ids
            for jobs in self._all_jobs
            for job in jobs.stores_of(seq_id)
        ]
        self._has_deferred = bool(stores)
        if not (loads or stores or flush):
            return NO_PAYLOAD
        return pack(
            OffloadMetadata(
                loads=[job.transfer for job in loads],
                stores=[job.transfer for job in stores],
                flush=flush,
                load_seq_ids=[job.seq_id for job in loads],
            )
        )

    def needs_step(self) -> bool:
        """Whether planned stores wait for another step to start them."""
        plans_states = self._states is not None and self._states.has_planned_stores
        return self._has_deferred or self._stores.has_planned or plans_states

    # Reports and ends of requests

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if output.worker_metadata == NO_PAYLOAD:
            return
        for finished in unpack(output.worker_metadata, OffloadReport).finished:
            reports = [jobs.record_report(finished) for jobs in self._all_jobs]
            job = next((job for job in reports if job is not None), None)
            if job is None:
                continue
            self._statistics.record_copy(job)
            if job.transfer.is_load:
                self._loads.complete(job, self._requests.get(job.seq_id))
            else:
                if self._publishes_events and job.succeeded:
                    self._describe_stored(job)
                if job.transfer.is_of_states:
                    assert self._states is not None
                    self._states.complete_store(job)
                else:
                    self._stores.complete(job)

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """Store the last full blocks, unless the request failed.

        Copies reference their blocks, so freeing the request's blocks is not delayed. Blocks stored
        earlier stay for requests with the same prefix; unreadable ones are removed by then.
        """
        tracked = self._requests.pop(request.seq_id, None)
        if tracked is not None:
            self._loads.remove_request(request.seq_id)
            self._statistics.end_wait(tracked, time.monotonic())
            if request.status is not RequestStatus.FINISHED_ERROR and self._can_store(tracked):
                num_tokens = min(request.num_computed_tokens, request.num_tokens)
                self._stores.plan(tracked, block_ids, num_tokens)
                self._stores.finish_request(tracked)
                self._plan_states(tracked, num_tokens, ends=True)
        return False, None

    def invalidate_request(self, request: Request) -> None:
        self._stores.invalidate_request(request)
        if self._states is not None:
            self._states.discard(request)

    def take_events(self) -> Iterable[KVEvent]:
        """Return the manager's events, with tokens of the blocks that this engine has stored."""
        for event in chain.from_iterable(manager.take_events() for manager in self._managers):
            for key in event.keys:
                block_hash, group = parse_key(key)
                names = [event_hash(block_hash)]
                if event.removed:
                    yield BlockRemoved(names, event.medium, group)
                elif key in self._stored:
                    yield self._stored[key]
                else:
                    yield BlockStored(
                        block_hashes=names,
                        parent_block_hash=None,
                        token_ids=[],
                        block_size=self._layout.size,
                        lora_id=None,
                        medium=event.medium,
                        lora_name=None,
                        group_idx=group,
                    )
        self._stored.clear()  # of stores whose blocks are corrupt

    def drain_stats(self) -> list[KVMediumStats]:
        return [self._statistics.drain()]

    def tiers(self) -> list[KVTier]:
        suffixes = ("", " states")
        return [
            KVTier(manager.medium + suffix, manager.num_blocks, manager.num_used)
            for manager, suffix in zip(self._managers, suffixes, strict=False)
            if manager.num_blocks
        ]

    # Notifications and lifecycle

    def fileno(self) -> int:
        return self._event_fd.descriptor

    def process_notifications(self) -> None:
        self._event_fd.clear()
        self._loads.unblock_all()

    def reset_cache(self) -> bool:
        if any(map(len, self._all_jobs)):
            return False
        done = [manager.reset_cache() for manager in self._managers]  # call every one
        return all(done)

    def on_worker_restart(self) -> None:
        self._jobs.drop_all()
        self._stores.on_worker_restart()
        self._has_deferred = False
        self._manager.on_worker_restart()
        if self._states is not None:
            self._states.on_worker_restart()
        for tracked in self._requests.values():
            tracked.on_worker_restart()
        self._loads.on_worker_restart()

    def close(self) -> None:
        for manager in self._managers:
            manager.close()
        self._event_fd.close()

    @property
    def _managers(self) -> list[OffloadingManager]:
        """The manager of KV, and that of states in a model with states."""
        return [self._manager] if self._states is None else [self._manager, self._states.manager]

    @property
    def _all_jobs(self) -> list[JobsInFlight]:
        return [self._jobs] if self._states is None else [self._jobs, self._states.jobs]

    def _describe_stored(self, job: InFlightJob) -> None:
        """Note the tokens of the blocks of a store; its request, which may have ended, has them."""
        layout, request = self._layout, job.request
        wanted = set(job.keys)
        if self._states is not None and job.transfer.is_of_states:
            layout = self._states.layout
        for group in layout.groups:
            blocks = StoredBlocks(self._manager.medium, group, layout.size, layout.factor)
            end = len(request.block_hashes) // layout.factor
            for index, key in enumerate(
                layout.keys(request.block_hashes, group, job.first, end), job.first
            ):
                if key in wanted:
                    event = blocks.event(self._geometry, request, index, index + 1)
                    self._stored[key] = event

    def _can_store(self, tracked: TrackedRequest) -> bool:
        """Whether the request's KV may be stored: no load that it relies on can fail any more."""
        if not self._may_store or tracked.is_loading:
            return False
        return self._is_storable(tracked.request.seq_id)

    def _plan_stores(self, output: SchedulerOutput) -> None:
        """Plan stores for sequences that fill a block in this step; others cost one comparison."""
        for new in output.new_requests:
            num_tokens = new.num_computed_tokens + new.num_scheduled_tokens
            tracked = self._requests.get(new.seq_id)
            if tracked is not None and num_tokens >= tracked.next_at:
                self._plan_store(tracked, num_tokens)
        cached = output.cached_requests
        known = map(self._requests.get, cached.seq_ids)
        computed = map(add, cached.num_computed_tokens, cached.num_scheduled_tokens)
        due = [
            (tracked, num_tokens)
            for tracked, num_tokens in zip(known, computed, strict=True)
            if tracked is not None and num_tokens >= tracked.next_at
        ]
        for tracked, num_tokens in due:
            self._plan_store(tracked, num_tokens)

    def _plan_store(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Plan stores of one sequence. num_tokens: computed when this step has finished."""
        request = tracked.request
        if not self._is_storable(request.seq_id):
            return  # a load that it relies on may still fail
        # Only known tokens are hashed; a step that runs ahead computes one more.
        num_tokens = min(num_tokens, request.num_tokens)
        if num_tokens >= tracked.next_at:
            self._stores.plan(tracked, self._block_ids(request.seq_id), num_tokens)
            self._plan_states(tracked, num_tokens, ends=False)

    def _plan_states(self, tracked: TrackedRequest, num_tokens: int, *, ends: bool) -> None:
        """Plan stores of the states that a request holds after the first `num_tokens` tokens."""
        if self._states is not None:
            self._statistics.num_unstored += self._states.plan_stores(
                tracked, num_tokens, ends=ends
            )
