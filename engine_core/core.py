"""The engine process: builds its parts, waits for the workers, and runs the busy loop.

Start with `main`. What owns what:

    core.py            the order of the start; `EngineCore` builds the parts that need no process
    busy_loop.py       the order of a step, the steps in flight, and every wait
    frontend_io.py     messages of the front ends, and what each of them is sent next
    supervisor_io.py   commands of the supervisor, heartbeats and health reports
    worker_group.py    the workers of the current epoch and their results
    scheduler/         all requests; kv_cache/ all blocks
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing

import msgspec

from engine_core.adapters import AdapterRegistry
from engine_core.busy_loop import OVERLAPPED, SYNCHRONOUS, BusyLoop, EngineIO
from engine_core.frontend_io import InputProcessor, OutputDispatcher
from engine_core.kv_cache.events import PoolObserver, ResidencyMeter
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import TransferRefs
from engine_core.kv_connector.base import (
    SchedulerConnector,
    SchedulerContext,
    create_scheduler_connector,
)
from engine_core.kv_events import KVEventPublisher, start_kv_events
from engine_core.pool_plan import PoolPlan, weight_memory
from engine_core.profiler import EngineProfiler
from engine_core.request import Request
from engine_core.scheduler.compute_meter import ComputeMeter
from engine_core.scheduler.features.base import NO_OBSERVER, SchedulerObserver, Unblock
from engine_core.scheduler.kv_transfer import Connect, IsStorable
from engine_core.scheduler.limits import ChunkRule, queue_capacity
from engine_core.scheduler.scheduler import Scheduler
from engine_core.speculation.drafting import Drafting, make_drafting
from engine_core.structured_output.manager import StructuredOutputManager, start_structured_output
from engine_core.supervisor_io import SupervisorIO
from engine_core.trace.file import start_trace
from engine_core.trace.recorder import TraceRecorder
from engine_core.transport import FrontEndLinks
from engine_core.validation import RequestLimits
from engine_core.worker_group import WorkerGroup
from proto import PROTOCOL_VERSION
from proto.messages.lifecycle import (
    EngineReady,
    Notice,
    PhaseClock,
    ProcessBoot,
    ProcessStart,
    WorkerReady,
)
from proto.messages.lora import AdapterCard
from proto.messages.multimodal import EncoderLimits
from proto.messages.pooling import MAX_INPUTS
from proto.messages.prepared_model import VisionFacts
from proto.runtime.process import freeze_heap
from proto.runtime.sockets import Link, Poller
from proto.settings.config import CPU_PREFILL_SLOWDOWN, SchedulerConfig, ServeConfig
from proto.settings.config_checks import check_token_budget, check_vision
from proto.settings.kv_events_config import KVEventsConfig
from proto.settings.kv_transfer_config import KVTransferConfig, kv_transfer_config
from proto.settings.lora_modules import parse_lora_modules
from proto.settings.pooler_config import pooler_of
from proto.settings.speculative_config import DEFAULT_METHODS

logger = logging.getLogger("tokend.engine")


def main(boot: ProcessBoot, supervisor: Link) -> None:
    """Run the engine of one epoch until the supervisor sends `Shutdown`."""
    clock = PhaseClock(boot.born_at)
    clock.end("imports")
    with ExitStack() as stack:
        front_ends = stack.enter_context(
            closing(FrontEndLinks(boot.run_dir, boot.epoch, boot.front_ends))
        )
        poller = Poller([supervisor])
        pools = pooler_of(boot.config.model, boot.model) is not None
        # It loads while the workers do.
        structured_output = None if pools else start_structured_output(boot)
        workers = WorkerGroup(boot, poller, supervisor)
        supervisor_io = SupervisorIO(supervisor, workers)
        _wait_for_workers(workers, supervisor_io, front_ends, poller, clock)
        if supervisor_io.is_stopped:
            return
        config = with_step_tokens(boot.config, workers.workers)
        if pools:
            config = with_pooling_limits(config)
        if not workers.workers[0].geometry.is_cached:
            config = without_kv_cache(config)
        worker, plan = workers.workers[0], workers.plan
        kv_events = start_kv_events(
            config.cache.parsed_kv_events(),
            boot.run_dir,
            boot.epoch,
            worker.geometry,
            boot.engine,
        )
        if kv_events is not None:
            stack.enter_context(closing(kv_events))
            notice = f"KV events: {kv_events.config.endpoint}"
            supervisor.send(Notice(notice))
        encoder: EncoderLimits | None = None
        if boot.model.vision is not None:
            encoder = encoder_limits(config, worker, boot.model.vision)
        recorder: TraceRecorder | None = None
        trace = start_trace(
            config.trace,
            scheduler_settings(config, worker),
            plan,
            worker,
            boot.epoch,
            config.cache.enable_prefix_caching,
            encoder,
            boot.engine,
        )
        if trace is not None:
            file, recorder = trace
            stack.enter_context(closing(file))
        profiling = config.trace.parsed_profiler()
        core = EngineCore(
            config=config,
            plan=plan,
            worker=worker,
            front_ends=front_ends,
            epoch=boot.epoch,
            kv_events=kv_events,
            structured_output=structured_output,
            recorder=recorder,
            profiler=None if profiling is None else EngineProfiler(profiling, workers, boot.engine),
            pools=pools,
            embedding_bytes=4 * boot.model.hidden_size * config.model.enable_prompt_embeds,
            encoder=encoder,
            workers=workers,
            supervisor=supervisor,
            adapters=boot.adapters or (),
        )
        if boot.pause_mode is not None:
            core.scheduler.pause(boot.pause_mode)
        supervisor_io.scheduler = core.scheduler
        if core.adapters is not None and boot.adapters is None:
            modules = parse_lora_modules(config.lora.lora_modules)
            core.adapters.load_modules(
                modules, lambda: _receive_from_workers(workers, supervisor_io, poller)
            )
            if supervisor_io.is_stopped:
                return
            clock.end("adapters")
        io = EngineIO(
            supervisor_io=supervisor_io,
            front_ends=front_ends,
            poller=poller,
            scheduler=core.scheduler,
            input_processor=core.input_processor,
            output_dispatcher=core.output_dispatcher,
            structured_output=structured_output,
            adapters=core.adapters,
        )
        max_in_flight = OVERLAPPED if overlaps(config, worker) else SYNCHRONOUS
        busy_loop = BusyLoop(
            *(core.scheduler, core.kv_cache, workers, io, max_in_flight),
            *(structured_output, core.adapters),
        )
        freeze_heap()
        clock.end("scheduler and KV cache")
        _report_ready(
            boot,
            config,
            workers,
            front_ends,
            supervisor,
            clock,
            core.drafts,
            None if kv_events is None else kv_events.config,
        )
        stack.callback(core.scheduler.kv_transfer.close)
        stack.callback(core.output_dispatcher.publish_kv_events)
        busy_loop.run_until_shutdown()


def _wait_for_workers(
    workers: WorkerGroup,
    supervisor_io: SupervisorIO,
    front_ends: FrontEndLinks,
    poller: Poller,
    clock: PhaseClock,
) -> None:
    """Wait until the first workers are ready, or the supervisor sends `Shutdown`."""
    while not workers.is_ready:
        poller.wait()
        supervisor_io.receive_commands()
        if supervisor_io.is_stopped:
            return
        for epoch in supervisor_io.pop_worker_epochs():
            workers.connect_workers(epoch)
        for front_end in supervisor_io.pop_front_ends():
            for link in front_ends.replace(front_end.index, front_end.incarnation)[0]:
                link.close()
        had_loaded = bool(workers.workers)
        workers.receive_results()
        if workers.workers and not had_loaded:
            clock.end("workers' weights")
    clock.end("KV cache and warm-up")


def _receive_from_workers(
    workers: WorkerGroup, supervisor_io: SupervisorIO, poller: Poller
) -> bool:
    """Wait for messages; return whether to go on: the supervisor has not sent `Shutdown`."""
    poller.wait()
    supervisor_io.receive_commands()
    if not supervisor_io.is_stopped:
        workers.receive_results()
    return not supervisor_io.is_stopped


def _report_ready(
    boot: ProcessBoot,
    config: ServeConfig,
    workers: WorkerGroup,
    front_ends: FrontEndLinks,
    supervisor: Link,
    clock: PhaseClock,
    drafts: str,
    kv_events: KVEventsConfig | None,
) -> None:
    """Send EngineReady to the supervisor and to all front ends, also to those that come later."""
    worker, plan = workers.workers[0], workers.plan
    num_cached, cache = 0, "no blocks"
    if worker.geometry.is_cached:
        num_cached = plan.num_usable_blocks // worker.geometry.num_block_groups * plan.block_size
        cache = f"{plan.num_usable_blocks} blocks of {plan.block_size} tokens"
        if plan.num_state_slots:
            cache += f", {plan.num_state_slots - 1} slots for recurrent states"
    queue = queue_capacity(config.scheduler, plan.num_usable_blocks, plan.block_size)
    ready = EngineReady(
        protocol_version=PROTOCOL_VERSION,
        epoch=boot.epoch,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_usable_blocks,
        block_size=plan.block_size,
        vocab_size=worker.vocab_size,
        device_name=worker.device_name,
        max_num_queued_reqs=queue.num_requests,
        max_num_queued_tokens=queue.num_tokens,
        kv_cache_bytes=plan.num_blocks
        * plan.block_size
        * sum(
            worker.geometry.bytes_per_token + worker.draft_bytes_per_token
            for worker in workers.workers
        ),
        kv_cache_tokens=num_cached,
        weights=weight_memory(workers.workers),
        routing_bytes=worker.routing_bytes,
        starts=(
            *(
                ProcessStart("worker", workers.first_index + worker.rank, worker.phases)
                for worker in workers.workers
            ),
            ProcessStart(boot.role, boot.index, clock.phases),
        ),
        kernels=worker.kernels,
        kv_cache_grows=worker.kv_cache_grows,
        drafts=drafts,
        kv_events=kv_events,
        engine=boot.engine,
    )
    if plan.notice:
        supervisor.send(Notice(plan.notice))
    # Logged before it is sent, so that the supervisor's message to the operator is the last one
    logger.info(
        "ready: %s, requests up to %d tokens, a queue of up to %s requests and %s tokens",
        cache,
        plan.max_model_len,
        queue.num_requests or "any number of",
        queue.num_tokens or "any number of",
    )
    supervisor.send(ready)
    front_ends.send_greeting(ready)


class EngineCore:
    """The engine without its process: scheduler, KV cache, input and output.

    config: with a token budget, see `with_step_tokens`. worker: rank 0, after loading.
    epoch: of the engine. pools: the model pools prompts. embedding_bytes: as in
    RequestLimits. The optional parts: None if the feature is off.

    encoder: of a model that reads images.
    workers, supervisor: for adapters. adapters: of an earlier engine.

    drafts: how tokens are drafted, for the operator; "" if they are not.
    """

    def __init__(
        self,
        config: ServeConfig,
        plan: PoolPlan,
        worker: WorkerReady,
        front_ends: FrontEndLinks,
        epoch: int,
        kv_events: KVEventPublisher | None = None,
        structured_output: StructuredOutputManager | None = None,
        recorder: TraceRecorder | None = None,
        profiler: EngineProfiler | None = None,
        *,
        pools: bool = False,
        embedding_bytes: int = 0,
        encoder: EncoderLimits | None = None,
        workers: WorkerGroup | None = None,
        supervisor: Link | None = None,
        adapters: Sequence[AdapterCard] = (),
    ) -> None:
        pool_observers: list[PoolObserver] = []
        observer: SchedulerObserver = NO_OBSERVER
        if kv_events is not None:
            pool_observers.append(kv_events.observer)
        if recorder is not None:
            pool_observers.append(recorder.block_counter)
            observer = recorder
        self.kv_cache = KVCacheManager(
            plan.num_blocks,
            plan.block_size,
            config.cache.enable_prefix_caching,
            worker.fingerprint,
            groups=worker.geometry.groups,
            longest_chunk=ChunkRule.from_config(config.scheduler).longest_chunk,
            num_state_slots=plan.num_state_slots,
            observers=tuple(pool_observers),
            state_observers=() if kv_events is None else (kv_events.observer,),
            residency=ResidencyMeter(config.cache.kv_cache_metrics_one_in),
            num_dropped_blocks=worker.num_dropped_blocks,
            eviction_policy=config.cache.eviction_policy,
        )
        transfer = kv_transfer_config(config.cache.kv_transfer_config)
        drafting = self._make_drafting(config, worker, structured_output, pools=pools)
        self.drafts = "" if drafting is None else drafting.description
        self.scheduler = Scheduler(
            scheduler_settings(config, worker),
            self.kv_cache,
            epoch=worker.epoch,
            max_model_len=plan.max_model_len,
            vocab_size=worker.vocab_size,
            grammars=structured_output,
            connect=connector_factory(config, plan, worker, transfer, self.kv_cache),
            load_failure_policy=transfer.kv_load_failure_policy,
            observer=observer,
            compute_meter=(
                ComputeMeter(
                    worker, config.scheduler.peak_tflops, config.scheduler.peak_memory_gbps
                )
                if config.scheduler.enable_mfu_metrics
                else None
            ),
            drafting=drafting,
            num_draft_positions=worker.num_draft_positions,
            report_begun=self._report_begun,
            lora=config.lora if config.lora.enable_lora else None,
            encoder=encoder,
        )
        self.adapters: AdapterRegistry | None = None
        if self.scheduler.adapters is not None:
            assert workers is not None
            assert supervisor is not None
            self.adapters = AdapterRegistry(
                self.scheduler, workers, front_ends, supervisor, epoch, adapters
            )
            self.adapters.announce_adopted()
        self.output_dispatcher = OutputDispatcher(
            *(front_ends, self.scheduler, self.kv_cache, epoch, kv_events),
            adapters=self.adapters,
        )
        limits = RequestLimits(
            worker.vocab_size,
            plan.max_model_len,
            config.scheduler.scheduling_policy == "priority",
            config.scheduler.crashes_until_isolated,
            pools=pools,
            embedding_bytes=embedding_bytes,
            vision=None if encoder is None else encoder.vision,
        )
        self.input_processor = InputProcessor(
            self.scheduler,
            self.kv_cache,
            self.output_dispatcher,
            limits,
            structured_output,
            profiler,
            self.adapters,
        )

    def _report_begun(self, request: Request, alone: bool) -> None:
        self.output_dispatcher.report_begun(request, alone=alone)

    def _make_drafting(
        self,
        config: ServeConfig,
        worker: WorkerReady,
        structured_output: StructuredOutputManager | None,
        *,
        pools: bool,
    ) -> Drafting | None:
        # By default only where drafts cannot change an answer.
        settings = config.speculation.parsed(DEFAULT_METHODS if worker.is_batch_invariant else ())
        if pools:
            if config.speculation.speculative_config is not None and settings.methods:
                logger.warning(
                    "--speculative-config: no drafts for this model: its outputs are pooled"
                )
            return None
        return make_drafting(settings, structured_output, worker.draft_method, worker.max_draft_len)


def connector_factory(
    config: ServeConfig,
    plan: PoolPlan,
    worker: WorkerReady,
    transfer: KVTransferConfig,
    kv_cache: KVCacheManager,
) -> Connect:
    """Return a function with which the scheduler creates the configured KV connector.

    The function raises ConfigError for an impossible configuration.
    """

    def connect(
        holds: TransferRefs, unblock: Unblock, is_storable: IsStorable
    ) -> SchedulerConnector:
        context = SchedulerContext(
            geometry=worker.geometry,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            fingerprint=worker.fingerprint,
            num_ranks=config.parallel.tensor_parallel_size,
            transfer_refs=holds,
            block_ids=kv_cache.block_ids,
            unblock=unblock,
            serve_config=config,
            is_storable=is_storable,
            state_slots=kv_cache if kv_cache.has_states else None,
        )
        return create_scheduler_connector(transfer, context)

    return connect


def overlaps(config: ServeConfig, worker: WorkerReady) -> bool:
    """Return whether steps are scheduled ahead: the setting, or what is faster on the device."""
    setting = config.scheduler.async_scheduling
    return worker.computes_ahead if setting is None else setting


def with_step_tokens(config: ServeConfig, workers: Sequence[WorkerReady]) -> ServeConfig:
    """Return the configuration with the largest step: the setting, or what fits all workers.

    Raises ConfigError for a token budget that is more.
    """
    if config.scheduler.max_num_batched_tokens is not None:
        return config
    step_tokens = min(worker.step_tokens for worker in workers)
    scheduler = msgspec.structs.replace(config.scheduler, max_num_batched_tokens=step_tokens)
    check_token_budget(scheduler)
    return msgspec.structs.replace(config, scheduler=scheduler)


def with_pooling_limits(config: ServeConfig) -> ServeConfig:
    """Return the configuration with a longer queue: one HTTP request may bring MAX_INPUTS texts."""
    scheduler = config.scheduler
    if scheduler.max_num_queued_reqs is None:
        scheduler = msgspec.structs.replace(scheduler, max_num_queued_reqs=4 * MAX_INPUTS)
    if scheduler.max_num_queued_tokens is None:
        scheduler = msgspec.structs.replace(scheduler, max_num_queued_tokens=0)
    return msgspec.structs.replace(config, scheduler=scheduler)


def without_kv_cache(config: ServeConfig) -> ServeConfig:
    """Return the configuration for a model that computes each prompt in one step."""
    scheduler = msgspec.structs.replace(config.scheduler, enable_chunked_prefill=False)
    cache = msgspec.structs.replace(config.cache, enable_prefix_caching=False)
    return msgspec.structs.replace(config, scheduler=scheduler, cache=cache)


def encoder_limits(config: ServeConfig, worker: WorkerReady, vision: VisionFacts) -> EncoderLimits:
    """Return how images are encoded: on a CPU in slices, elsewhere as a whole.

    Raises ConfigError for settings with which an image could never be computed.
    """
    scheduler = config.scheduler
    check_vision(scheduler, vision)
    num_running = scheduler.token_budget - vision.max_embeds + 1
    if vision.is_bidirectional and num_running < scheduler.max_num_seqs:
        logger.warning(
            "at most %d of --max-num-seqs %d requests run at a time: a step has %d tokens "
            "(--max-num-batched-tokens), of which an image needs %d at once",
            num_running,
            scheduler.max_num_seqs,
            scheduler.token_budget,
            vision.max_embeds,
        )
    max_input_tokens = scheduler.max_num_encoder_input_tokens
    if worker.computes_ahead:
        most = scheduler.token_budget if max_input_tokens is None else max_input_tokens
        max_input_tokens = max(most, vision.max_embeds)
    return EncoderLimits(
        vision=vision,
        cache_size=scheduler.encoder_cache_rows(vision.max_embeds),
        max_input_tokens=max_input_tokens,
        splits=not worker.computes_ahead,
    )


def scheduler_settings(config: ServeConfig, worker: WorkerReady) -> SchedulerConfig:
    """Return the scheduler's settings, with those resolved that depend on the workers' device."""
    slowdown = config.scheduler.max_prefill_slowdown
    if slowdown is None:
        slowdown = 0.0 if worker.computes_ahead else CPU_PREFILL_SLOWDOWN
    return msgspec.structs.replace(
        config.scheduler,
        async_scheduling=overlaps(config, worker),
        max_prefill_slowdown=slowdown,
    )
