"""The deciding half of the offloading connector: requests on one side, a medium on the other.

    schedule()   match ─▶ plan loads ─▶ build_connector_meta: loads, and stores of what became full
    workers      begin the loads before the step, and the stores with the step that follows
    reports      all ranks: the ledger is told, device blocks are let go, who waits is woken

Owns what is remembered of requests. How much is found, what is stored and what has to go are
decided by the parts; none of it waits for anything.
"""

from collections.abc import Iterable
from operator import add
from typing import Any, ClassVar

from engine_core.kv_cache.block import BlockIds
from engine_core.kv_connector.base import NO_MATCH, Match, SchedulerContext
from engine_core.kv_connector.offload.base import ManagerContext
from engine_core.kv_connector.offload.jobs import JobsInFlight
from engine_core.kv_connector.offload.keys import parts
from engine_core.kv_connector.offload.load_planner import LoadPlanner
from engine_core.kv_connector.offload.requests import Shape, TrackedRequest, TrackedRequests
from engine_core.kv_connector.offload.specs import create_manager
from engine_core.kv_connector.offload.statistics import CopyStatistics
from engine_core.kv_connector.offload.store_planner import StorePlanner
from engine_core.request import Request, RequestStatus
from proto.event_fd import EventFd
from proto.kv_connector import (
    NO_PAYLOAD,
    KVConnectorOutput,
    OffloadMetadata,
    OffloadReport,
    Payload,
    pack,
    unpack,
)
from proto.kv_events import BlockRemoved, BlockStored, KVEvent
from proto.kv_transfer_config import KVTransferConfig, offload_settings
from proto.scheduler_output import SchedulerOutput
from proto.stats import KVMediumStats


class OffloadingScheduler:
    """SchedulerConnector that keeps KV on a medium of its own."""

    supports_groups: ClassVar[bool] = True

    def __init__(self, config: KVTransferConfig, context: SchedulerContext) -> None:
        """Raises ConfigError naming the key of kv_connector_extra_config that is wrong."""
        extra = config.kv_connector_extra_config
        windows = [group.sliding_window for group in context.geometry.groups]
        settings, factor = offload_settings(extra, context.block_size, windows)
        self._loads_any, self._stores_any = config.loads, config.stores
        self._shape = Shape.of(context, factor)
        self._block_ids = context.block_ids
        self._is_sound = context.is_storable
        self._event_fd = EventFd()
        self._manager = create_manager(
            settings,
            extra,
            ManagerContext(
                fingerprint=context.fingerprint,
                num_ranks=context.num_ranks,
                block_bytes=context.geometry.bytes_per_token * self._shape.size,
                ring=self._event_fd.notify,
                factor=factor,
            ),
        )
        self._statistics = CopyStatistics(self._manager.medium)
        self._jobs = JobsInFlight(context.num_ranks, context.holds)
        self._loads = LoadPlanner(self._shape, self._manager, self._jobs, context.wake)
        self._stores = StorePlanner(self._shape, self._manager, self._jobs, self._statistics)
        self._requests = TrackedRequests()
        self._has_put_off = False

    # Before and while a step is decided

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Match:
        if not self._loads_any or request.skip_reading_prefix_cache:
            return NO_MATCH
        return self._loads.match(self._requests.of(request), num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        tracked = self._requests.of(request)
        tracked.is_loading = False
        if num_external_tokens:
            self._loads.plan(tracked, block_ids, num_external_tokens)

    def build_connector_meta(self, output: SchedulerOutput) -> Payload:
        if self._stores_any:
            self._plan_stores(output)
        loads, stores = self._loads.take_planned(), self._stores.take_planned()
        flush = [
            job.transfer.job_id
            for seq_id in output.preempted_seq_ids
            for job in self._jobs.stores_of(seq_id)
        ]
        self._has_put_off = bool(stores)
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

    def wants_step(self) -> bool:
        """Stores begin with the step after the one that they were planned in."""
        return self._has_put_off or self._stores.has_planned

    # What has happened

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if output.worker_metadata == NO_PAYLOAD:
            return
        for finished in unpack(output.worker_metadata, OffloadReport).finished:
            job = self._jobs.report(finished)
            if job is None:
                continue
            self._statistics.count(job)
            if job.transfer.is_load:
                self._loads.complete(job, self._requests.get(job.seq_id))
            else:
                self._stores.complete(job)

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its last full blocks are stored, too; what is copied is held, so nothing is delayed.

        Not of one that failed. What it has stored stays: others share its prefix, and what of it
        could not be read has been forgotten by then.
        """
        tracked = self._requests.pop(request.seq_id, None)
        if tracked is not None:
            self._loads.forget(request.seq_id)
            if request.status is not RequestStatus.FINISHED_ERROR and self._may_store(tracked):
                num_tokens = min(request.num_computed_tokens, request.num_tokens)
                self._stores.plan(tracked, block_ids, num_tokens)
                self._stores.settle(tracked)
        return False, None

    def withdraw(self, request: Request) -> None:
        self._stores.withdraw(request)

    def take_events(self) -> Iterable[KVEvent]:
        for event in self._manager.take_events():
            for key in event.keys:
                block_hash, group = parts(key)
                if event.removed:
                    yield BlockRemoved(block_hash, group, event.medium)
                else:
                    size = self._shape.size
                    yield BlockStored([block_hash], None, [], size, group, event.medium)

    def take_stats(self) -> list[KVMediumStats]:
        return [self._statistics.take(self._manager.usage)]

    # The life of the connector

    def fileno(self) -> int:
        return self._event_fd.descriptor

    def attend(self) -> None:
        self._event_fd.clear()
        self._loads.wake_all()

    def reset_cache(self) -> bool:
        return not self._jobs and self._manager.reset()

    def start_over(self) -> None:
        self._jobs.drop_all()
        self._stores.start_over()
        self._has_put_off = False
        self._manager.start_over()
        for tracked in self._requests.values():
            tracked.next_block = tracked.next_at = tracked.touched = 0
            tracked.is_loading = False
        self._loads.start_over()

    def close(self) -> None:
        self._manager.close()
        self._event_fd.close()

    def _may_store(self, tracked: TrackedRequest) -> bool:
        """Nothing that it holds may turn out not to have been loaded."""
        if not self._stores_any or tracked.is_loading:
            return False
        return self._is_sound(tracked.request.seq_id)

    def _plan_stores(self, output: SchedulerOutput) -> None:
        """Most sequences are far from filling a block: they cost a comparison each."""
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
        """num_tokens: that are computed with this step, enough to fill something."""
        request = tracked.request
        if not self._is_sound(request.seq_id):
            return  # what somebody else loads for it may fail yet
        # A token is known or not before the block that it fills is hashed.
        num_tokens = min(num_tokens, request.num_tokens)
        if num_tokens >= tracked.next_at:
            self._stores.plan(tracked, self._block_ids(request.seq_id), num_tokens)
