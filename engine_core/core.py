"""The engine process, put together.

Owns the order of its start: workers load, the pool is sized, workers make their
KV tensors, front ends and supervisor hear that the engine is ready.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec

from engine_core.busy_loop import OVERLAPPED, SYNCHRONOUS, BusyLoop, EngineIO
from engine_core.executor.base import Executor
from engine_core.executor.local import FaultyExecutor, LocalExecutor
from engine_core.executor.worker_group import WorkerGroup
from engine_core.frontend_io import InputProcessor, OutputDispatcher
from engine_core.kv_cache.block import BlockIds
from engine_core.kv_cache.events import ResidencyMeter
from engine_core.kv_cache.integrity import check, check_in_slices
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import TransferRefs
from engine_core.kv_connector.base import SchedulerConnector, SchedulerContext
from engine_core.kv_connector.factory import create_scheduler_connector
from engine_core.kv_events import KVEventSink, make_kv_events
from engine_core.pool_plan import PoolPlan, plan_pool, weight_memory
from engine_core.scheduler.hooks import Unblock
from engine_core.scheduler.kv_transfer import Connect, IsStorable
from engine_core.scheduler.limits import ChunkRule, queue_capacity
from engine_core.scheduler.scheduler import Scheduler
from engine_core.structured_output.grammars import NO_GRAMMARS, Grammars, start_grammars
from engine_core.supervisor_io import HealthReport, SupervisorCommands, awaits_copies, owes_step
from engine_core.trace.tracing import NO_TRACING, Tracing, start_tracing
from engine_core.transport import FrontEndLinks
from engine_core.validation import RequestLimits
from engine_core.view.views import NO_VIEWS, EngineViews, Views
from proto import PROTOCOL_VERSION
from proto.config import SchedulerConfig, ServeConfig
from proto.errors import TokendError
from proto.faults import FaultInjector
from proto.kv_transfer_config import KVTransferConfig, kv_transfer_config
from proto.lifecycle import EngineReady, Notice, PhaseClock, ProcessBoot, ProcessStart, WorkerReady
from proto.process import freeze_heap
from proto.sockets import Link, Poller

logger = logging.getLogger("tokend.engine")


class IntegrityError(TokendError):
    """The books of the KV cache do not add up; what clients get could be another's."""


def main(boot: ProcessBoot, supervisor: Link) -> None:
    """Run the engine of one epoch until the supervisor asks for its end."""
    clock = PhaseClock(boot.born_at)
    clock.end("imports")
    with closing(FrontEndLinks(boot.run_dir, boot.epoch, boot.front_ends)) as front_ends:
        _serve(boot, supervisor, front_ends, clock)


def _serve(
    boot: ProcessBoot, supervisor: Link, front_ends: FrontEndLinks, clock: PhaseClock
) -> None:
    config, poller = boot.config, Poller([supervisor])
    grammars = start_grammars(boot)  # while workers load
    crew = WorkerGroup(
        _executors(boot),
        lambda workers: plan_pool(workers, config, boot.model.max_position),
        poller,
        supervisor.send,
        boot.worker_epoch,
    )
    vitals = HealthReport(crew)
    orders = SupervisorCommands(supervisor, vitals.report)
    if not _assemble(crew, orders, front_ends, poller, clock):
        return
    kv_events = make_kv_events(config.cache.kv_events_endpoint, boot.run_dir, boot.epoch)
    if kv_events.endpoint:
        supervisor.send(Notice(boot.role, boot.index, f"KV events: {kv_events.endpoint}"))
    with closing(kv_events), closing(_trace(boot, crew)) as tracing:
        stepper = _build(
            boot, crew, front_ends, orders, poller, kv_events, vitals, grammars, tracing
        )
        freeze_heap()
        clock.end("books")
        _announce(boot, crew, front_ends, supervisor, clock)
        with closing(stepper):
            stepper.run()


def _trace(boot: ProcessBoot, crew: WorkerGroup) -> Tracing:
    config, worker = with_step_tokens(boot.config, crew.workers), crew.workers[0]
    return start_tracing(
        config.trace,
        scheduler_settings(config, worker),
        crew.plan,
        worker,
        boot.epoch,
        config.cache.enable_prefix_caching,
    )


def _executors(boot: ProcessBoot) -> Callable[[int], Executor]:
    """Reaches the workers of an epoch."""
    run_dir, world_size = boot.run_dir, boot.config.parallel.tensor_parallel_size
    saboteur = FaultInjector.of(boot.faults, boot.role, boot.index, boot.incarnation)
    if saboteur.idle:
        return lambda epoch: LocalExecutor(run_dir, epoch, world_size)
    return lambda epoch: FaultyExecutor(run_dir, epoch, world_size, saboteur)


def _assemble(
    crew: WorkerGroup,
    orders: SupervisorCommands,
    front_ends: FrontEndLinks,
    poller: Poller,
    clock: PhaseClock,
) -> bool:
    """Hear from the workers until they are ready; False if asked for the end first."""
    while not crew.ready:
        poller.wait()
        orders.receive()
        if orders.stopped:
            return False
        for epoch in orders.take_worker_epochs():
            crew.connect_workers(epoch)
        for each in orders.take_front_ends():
            for link in front_ends.replace(each.index, each.incarnation)[0]:
                link.close()
        loaded = bool(crew.workers)
        crew.receive()
        if crew.workers and not loaded:
            clock.end("workers' weights")
    clock.end("KV cache and warm-up")
    return True


def _announce(
    boot: ProcessBoot,
    crew: WorkerGroup,
    front_ends: FrontEndLinks,
    supervisor: Link,
    clock: PhaseClock,
) -> None:
    worker, plan = crew.workers[0], crew.plan
    queue = queue_capacity(boot.config.scheduler, plan.num_usable_blocks, plan.block_size)
    ready = EngineReady(
        PROTOCOL_VERSION,
        boot.epoch,
        plan.max_model_len,
        plan.num_usable_blocks,
        plan.block_size,
        worker.vocab_size,
        worker.device_name,
        queue.num_requests,
        queue.num_tokens,
        plan.num_blocks
        * plan.block_size
        * sum(each.geometry.bytes_per_token for each in crew.workers),
        weight_memory(crew.workers),
        (
            *(ProcessStart("worker", each.rank, each.phases) for each in crew.workers),
            ProcessStart(boot.role, boot.index, clock.phases),
        ),
    )
    if plan.notice:
        supervisor.send(Notice(boot.role, boot.index, plan.notice))
    supervisor.send(ready)
    front_ends.greet(ready)
    logger.info(
        "ready: %d blocks of %d tokens, requests up to %d tokens, "
        "a queue of up to %s requests and %s tokens",
        plan.num_usable_blocks,
        plan.block_size,
        plan.max_model_len,
        queue.num_requests or "any number of",
        queue.num_tokens or "any number of",
    )


@dataclass(frozen=True)
class EngineParts:
    """The engine without its processes: from requests and results to messages."""

    scheduler: Scheduler
    kv_cache: KVCacheManager
    intake: InputProcessor
    outbox: OutputDispatcher
    views: Views


def build_parts(
    config: ServeConfig,
    plan: PoolPlan,
    worker: WorkerReady,
    front_ends: FrontEndLinks,
    epoch: int,
    kv_events: KVEventSink,
    grammars: Grammars = NO_GRAMMARS,
    tracing: Tracing = NO_TRACING,
) -> EngineParts:
    """What the daemon runs, and the benchmark measures. epoch: of the engine."""
    kv_cache = KVCacheManager(
        plan.num_blocks,
        plan.block_size,
        config.cache.enable_prefix_caching,
        worker.fingerprint,
        groups=worker.geometry.groups,
        longest_chunk=ChunkRule.from_config(config.scheduler).longest_chunk,
        observers=(*kv_events.observers, *tracing.pool_observers),
        residency=ResidencyMeter(config.cache.kv_cache_metrics_one_in),
        eviction_policy=config.cache.eviction_policy,
    )
    transfer = kv_transfer_config(config.cache.kv_transfer_config)
    scheduler = Scheduler(
        scheduler_settings(config, worker),
        kv_cache,
        epoch=worker.epoch,
        max_model_len=plan.max_model_len,
        vocab_size=worker.vocab_size,
        constraints=grammars.constraints,
        connect=connect_of(config, plan, worker, transfer, kv_cache.block_ids),
        load_failure_policy=transfer.kv_load_failure_policy,
        observer=tracing.scheduler_observer,
    )
    views = (
        EngineViews(front_ends, scheduler, kv_cache, epoch) if config.frontend.page else NO_VIEWS
    )
    outbox = OutputDispatcher(front_ends, scheduler, epoch, kv_events=kv_events, views=views)
    scheduler.report_crash_progress_to(outbox)
    limits = RequestLimits(
        worker.vocab_size,
        plan.max_model_len,
        config.scheduler.scheduling_policy == "priority",
        config.scheduler.crashes_until_isolated,
    )
    intake = InputProcessor(
        scheduler, kv_cache, outbox, limits, lambda: check(kv_cache), grammars, views
    )
    return EngineParts(scheduler, kv_cache, intake, outbox, views)


def connect_of(
    config: ServeConfig,
    plan: PoolPlan,
    worker: WorkerReady,
    transfer: KVTransferConfig,
    block_ids: Callable[[int], BlockIds],
) -> Connect:
    """How the scheduler comes to the connector that is configured; raises ConfigError there."""

    def connect(
        holds: TransferRefs, unblock: Unblock, is_storable: IsStorable
    ) -> SchedulerConnector:
        context = SchedulerContext(
            worker.geometry,
            plan.block_size,
            plan.num_blocks,
            worker.fingerprint,
            config.parallel.tensor_parallel_size,
            holds,
            block_ids,
            unblock,
            config,
            is_storable,
        )
        return create_scheduler_connector(transfer, context)

    return connect


def overlaps(config: ServeConfig, worker: WorkerReady) -> bool:
    """Whether steps are scheduled ahead: as the setting says, or where the workers gain by it."""
    setting = config.scheduler.async_scheduling
    return worker.computes_ahead if setting is None else setting


def with_step_tokens(config: ServeConfig, workers: Sequence[WorkerReady]) -> ServeConfig:
    """The configuration with a token budget: what is set, or what all workers have room for."""
    if config.scheduler.max_num_batched_tokens is not None:
        return config
    fewest = min(worker.step_tokens for worker in workers)
    scheduler = msgspec.structs.replace(config.scheduler, max_num_batched_tokens=fewest)
    return msgspec.structs.replace(config, scheduler=scheduler)


def scheduler_settings(config: ServeConfig, worker: WorkerReady) -> SchedulerConfig:
    """As they come out with these workers."""
    return msgspec.structs.replace(config.scheduler, async_scheduling=overlaps(config, worker))


def _build(
    boot: ProcessBoot,
    crew: WorkerGroup,
    front_ends: FrontEndLinks,
    orders: SupervisorCommands,
    poller: Poller,
    kv_events: KVEventSink,
    vitals: HealthReport,
    grammars: Grammars,
    tracing: Tracing,
) -> BusyLoop:
    plan = crew.plan
    config = with_step_tokens(boot.config, crew.workers)
    parts = build_parts(
        config, plan, crew.workers[0], front_ends, boot.epoch, kv_events, grammars, tracing
    )
    kv_cache = parts.kv_cache
    vitals.watch(lambda: owes_step(parts.scheduler), lambda: awaits_copies(parts.scheduler))
    if boot.pause_mode is not None:
        parts.scheduler.pause(boot.pause_mode)

    def check_when_idle() -> Iterator[None]:
        for found in check_in_slices(kv_cache):
            if found:
                raise IntegrityError("; ".join(found))
            yield
        num_lost = (
            kv_cache.num_usable_blocks
            - kv_cache.num_free_blocks
            - kv_cache.transfer_refs.num_blocks
        )
        if num_lost > 0 and not parts.scheduler.num_unfinished:
            raise IntegrityError(f"leak: {num_lost} blocks are in use by nobody")

    service = EngineIO(
        orders,
        front_ends,
        poller,
        parts.scheduler,
        parts.intake,
        parts.outbox,
        grammars,
        parts.views,
    )
    overlapped = overlaps(boot.config, crew.workers[0])
    max_in_flight = OVERLAPPED if overlapped else SYNCHRONOUS
    return BusyLoop(parts.scheduler, crew, service, check_when_idle, max_in_flight, grammars)
