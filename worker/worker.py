"""The worker process: load the model, then run the steps that the engine sends.

    supervisor ── boot ──▶ load weights ── Prepared ──▶ supervisor ── TakePlace ──▶ worker
    worker ── WorkerReady ──▶ engine
    engine ── InitializeCache ──▶ allocate ── CacheReady ──▶ engine
    engine ── SchedulerOutput ──▶ its runner ── ModelRunnerOutput ──▶ engine
    engine ── GrammarOutput ──▶ before sampling, if the step has constrained rows

When the engine dies, the supervisor sends the epoch of the next one (`NewEngine`). The worker drops
rows and KV, keeps its weights, and starts again with `WorkerReady`. Without a new engine it exits
after 30 s.

Workers of one model join a rank group when they initialise their caches, and leave it when the
engine dies. A rank that waits for another rank in a step then loses the group and waits for the
supervisor; the same happens when another worker dies. Start with `prepare` and `Worker.run`.
"""

import gc
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Final

from proto import PROTOCOL_VERSION
from proto.errors import ProcessDiedError, ProtocolError
from proto.messages.lifecycle import (
    CacheReady,
    InitializeCache,
    NewEngine,
    PhaseClock,
    ProcessBoot,
    ProtocolViolation,
    Shutdown,
    WaitingForRanks,
    WorkerReady,
)
from proto.messages.lora import DropAdapter, LoadAdapter
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.profiler import ProfileCall
from proto.messages.scheduler_output import GrammarOutput, SchedulerOutput
from proto.runtime.faults import FaultInjector
from proto.runtime.process import Main, describe, freeze_heap
from proto.runtime.run_directory import TORCH_FOLDER_VARIABLE, pixels_folder
from proto.runtime.sockets import Link, Poller, worker_path
from worker.create_device import create_device
from worker.kv_connector.steps import ConnectorSteps, no_connector_steps
from worker.loaded_model import LoadedModel, load
from worker.models.families import use_families
from worker.parallel.group import LONG_WAIT_SECONDS, GroupLostError, RankGroup
from worker.profiler import StepProfiler
from worker.runner_builder import RunnerBuilder
from worker.step.runner_parts import PendingStep, Runner

logger = logging.getLogger("tokend.worker")

ENGINE_SECONDS: Final = 30.0
"""How long a worker keeps its weights without an engine; a new one usually takes two seconds."""

InOrder = InitializeCache | SchedulerOutput | ProfileCall | LoadAdapter | DropAdapter
"""Messages from an engine that are handled in the order of their arrival."""
FromEngine = InOrder | GrammarOutput
"""The messages from an engine to a worker."""


class StepAbandonedError(Exception):
    """Raised in a step that waits for grammar masks when its engine dies or the worker stops."""


class Inbox:
    """Messages from the engine that the worker has not processed, in the order of arrival.

    Grammar masks are kept apart: a step fetches its own while it runs, and by then the next step
    may have arrived before them. The engine sends masks only for the oldest step in flight, so new
    masks replace old ones.
    """

    def __init__(self) -> None:
        self._messages: deque[InOrder] = deque()
        self._grammars: dict[int, GrammarOutput] = {}

    def add_messages(self, messages: Iterable[FromEngine]) -> None:
        """Add messages in the order of their arrival; only the latest masks are kept."""
        for message in messages:
            if isinstance(message, GrammarOutput):
                self._grammars = {message.step: message}
            else:
                self._messages.append(message)

    def pop_message(self) -> InOrder | None:
        return self._messages.popleft() if self._messages else None

    def pop_grammars(self, step: int) -> GrammarOutput | None:
        """Remove and return the masks of a step; None if they have not arrived."""
        return self._grammars.pop(step, None)


class EngineWait:
    """The time limit for a new engine: from the loss of one to the first message of the next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf

    def begin(self) -> None:
        """Start the time limit, unless it is running."""
        self._end = min(self._end, self._clock() + ENGINE_SECONDS)

    def end(self) -> None:
        """Stop the time limit, because an engine has connected."""
        self._end = math.inf

    def seconds_left(self) -> float | None:
        """Return the rest of the limit, None if it is stopped; raise ProcessDiedError after it."""
        left = self._end - self._clock()
        if left <= 0.0:
            raise ProcessDiedError(f"no engine has connected for {ENGINE_SECONDS:g} s")
        return None if left == math.inf else left


class RankWaitTimer:
    """Finds steps that take long on the device, perhaps because they wait for other ranks there.

    The host cannot see for what its device waits. A rank with a slow step reports that it waits, so
    that the supervisor blames it only if all ranks wait; a rank whose host hangs reports nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step: int | None = None
        self._is_reported = False
        self._since = 0.0

    def is_due(self, step: int | None) -> bool:
        """Return True, once a step, when it was the oldest unfinished one for LONG_WAIT_SECONDS.

        step: its number now; None if all are finished.
        """
        if step is None or step != self._step:
            self._step, self._is_reported, self._since = step, False, self._clock()
            return False
        if self._is_reported or self._clock() - self._since < LONG_WAIT_SECONDS:
            return False
        self._is_reported = True
        return True


def prepare(boot: ProcessBoot, supervisor: Link) -> Main:
    """Load the model; return what serves one engine after the other until `Shutdown`."""
    os.environ.setdefault(TORCH_FOLDER_VARIABLE, os.path.join(boot.run_dir, "torch"))
    return partial(_serve, PreparedWorker(boot, supervisor))


def _serve(prepared: "PreparedWorker", boot: ProcessBoot, supervisor: Link) -> None:
    def connect_engine(worker_epoch: int) -> Link:
        path = worker_path(boot.run_dir, worker_epoch, boot.rank)
        return Link.connect(path, FromEngine)

    Worker(prepared, boot, connect_engine, supervisor).run()


class PreparedWorker:
    """What a worker has before it has an engine: its device, the loaded model, its group of ranks.

    boot: that of the start. phases: of the start so far.
    """

    def __init__(self, boot: ProcessBoot, supervisor: Link) -> None:
        self.phases = PhaseClock(boot.born_at)
        self.phases.end("imports")
        self._boot = boot
        self._supervisor = supervisor
        config = boot.config
        use_families(config.model.model_families)
        self.device = create_device(config, boot.index, boot.starts_alone)
        self.device.check_kv_dtype(config.cache.kv_cache_dtype)
        size = config.parallel.tensor_parallel_size
        self.group = RankGroup() if size == 1 else self._create_group(size)
        self.loaded = load(
            config,
            boot.model,
            self.device,
            self.group,
            supervisor.send,
            # A worker that replaces a dead one tries to load: requests wait, memory may return.
            must_fit=not boot.replaces_dead,
            draft=boot.draft_model,
            weights_fd=boot.weights_fd,
        )
        self.phases.end("weights")

    def take_place(self) -> LoadedModel:
        """Return the model; of a standby worker with a plan of the memory that is free now."""
        self.phases.skip()
        boot = self._boot
        if boot.has_place:
            return self.loaded
        return self.loaded.planned_again(boot.config, boot.draft_model, boot.weights_fd)

    def report_long_wait(self) -> None:
        """Report that this rank waits for others in the middle of a step."""
        self._supervisor.send(WaitingForRanks(self._boot.rank))

    def _create_group(self, size: int) -> RankGroup:
        """Return the group of this daemon's `size` ranks, not yet joined."""
        return self.device.rank_group()(
            run_dir=self._boot.run_dir,
            rank=self._boot.rank,
            size=size,
            device=self.device.torch_device,
            on_long_wait=self.report_long_wait,
            is_interrupted=lambda: bool(Poller([self._supervisor]).wait(0.0)),
        )


class Worker:
    """One worker process. connect_engine: connects to the engine of a worker epoch."""

    def __init__(
        self,
        prepared: PreparedWorker,
        boot: ProcessBoot,
        connect_engine: Callable[[int], Link],
        supervisor: Link,
    ) -> None:
        self._phases = prepared.phases
        self._loaded = prepared.take_place()
        self._report_long_wait = prepared.report_long_wait
        self._boot = boot
        self._supervisor = supervisor
        self._connect_engine = connect_engine
        self._epoch = boot.worker_epoch
        self._engine_epoch = boot.epoch
        self._has_reported_engine = False
        self._engine = connect_engine(boot.worker_epoch)
        self._poller = Poller([supervisor, self._engine])
        self._connector = no_connector_steps(self._poller)
        self._inbox = Inbox()
        self._stopped = False
        self._engine_wait = EngineWait()
        self._runner: Runner | None = None
        self._launched: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self._fault_injector = FaultInjector.of(boot.faults, "worker", boot.index, boot.incarnation)
        self._has_lost_group = False
        config, device = boot.config, prepared.device
        self._group = prepared.group
        self._rank_wait = RankWaitTimer()
        if device.runs_largest_step:
            self._group.join(self._epoch, "memory")  # the largest step needs all ranks
        self._adapters = self._loaded.adapters
        if self._adapters is not None:
            self._poller.add(self._adapters.descriptor)
        self._profiler = StepProfiler(
            config.trace.parsed_profiler(), boot.rank, boot.index, device.profiler_activities()
        )
        self._runner_builder = RunnerBuilder(
            config,
            self._loaded,
            self._fault_injector,
            supervisor.send,
            pixels_folder(boot.run_dir),
        )
        if device.runs_largest_step:
            self._phases.end("memory of the largest step")

    def run(self) -> None:
        """Run steps until `Shutdown`; raise ProcessDiedError if a dead engine is not replaced."""
        try:
            self._run_loop()
        finally:
            self._connector.close()
            if self._adapters is not None:
                self._adapters.close()

    def _run_loop(self) -> None:
        self._engine.send(self._ready_message())
        freeze_heap()  # while the engine plans; later steps must not wait for it
        while not self._stopped:
            self._receive_messages(self._poll_seconds(self._engine_wait.seconds_left()))
            while not self._stopped and (message := self._inbox.pop_message()) is not None:
                self._handle_message(message)
                self._send_finished_steps()
            self._send_finished_steps()

    def _poll_seconds(self, seconds: float | None) -> float | None:
        """Return how long to wait for messages: not at all while a device may finish a step."""
        return 0.0 if self._launched else seconds

    def receive_grammars(self, step: SchedulerOutput) -> GrammarOutput:
        """Wait for the masks of a step; raise StepAbandonedError if they will not arrive."""
        epoch = self._epoch
        while (grammars := self._inbox.pop_grammars(step.step)) is None:
            self._send_finished_steps()  # the engine derives the masks from their tokens
            self._receive_messages(self._poll_seconds(None))
            if self._stopped or self._epoch != epoch:
                raise StepAbandonedError
        return grammars

    def _receive_messages(self, seconds: float | None) -> None:
        """Wait at most this time, then handle commands and queue the engine's messages."""
        readable = self._poller.wait(seconds)
        if self._supervisor in readable and self._handle_commands():
            self._stopped = True
            return
        self._connector.report_if_ready(readable)
        if self._adapters is not None and self._adapters.descriptor in readable:
            for answer in self._adapters.take_finished():
                self._engine.send(answer)
        messages = self._engine.receive()
        if self._engine.num_undecodable:
            self._report_invalid_engine()
            return
        self._inbox.add_messages([message for message in messages if message.epoch == self._epoch])

    def _handle_commands(self) -> bool:
        """Handle commands of the supervisor. Return True for `Shutdown`."""
        for message in self._supervisor.receive():
            if isinstance(message, Shutdown):
                return True
            if isinstance(message, NewEngine):
                self._engine_epoch = message.epoch
                self._change_engine(message.worker_epoch)
        return False

    def _report_invalid_engine(self) -> None:
        """Report an undecodable message: a step is lost, so nothing more can be computed."""
        if not self._has_reported_engine:
            self._has_reported_engine = True
            self._supervisor.send(
                ProtocolViolation(
                    "engine_core", 0, self._engine_epoch, "it sent an undecodable message"
                )
            )

    def _change_engine(self, epoch: int) -> None:
        """Drop rows, KV and steps of the old engine, and connect to the next one."""
        logger.warning("the engine died: waiting for the next one")
        self._poller.remove(self._engine)
        self._engine.close()
        self._connector.close()  # no copy may write to a cache that is freed
        self._connector = no_connector_steps(self._poller)
        self._profiler.discard()
        if self._adapters is not None:
            self._adapters.clear()
        self._runner = None
        self._launched.clear()
        gc.collect()  # a cycle may hold the KV pool, and the next one is as large
        self._group.leave()  # which waits for the end of graphs that the group is part of
        self._has_lost_group = False
        self._has_reported_engine = False
        self._epoch = epoch
        self._inbox = Inbox()
        self._engine = self._connect_engine(epoch)
        self._poller.add(self._engine)
        self._engine.send(self._ready_message())
        self._engine_wait.begin()

    def _handle_message(self, message: InOrder) -> None:
        """Process a message; if the rank group is lost, wait for the supervisor instead."""
        if self._has_lost_group:
            return
        try:
            if isinstance(message, InitializeCache):
                self._initialize_cache(message)
            elif isinstance(message, ProfileCall):
                self._engine.send(self._profiler.answer(message))
            elif isinstance(message, LoadAdapter | DropAdapter):
                self._change_adapters(message)
            else:
                self._launch_step(message)
        except GroupLostError as error:
            logger.warning("%s", error)
            self._has_lost_group = True
            self._engine_wait.begin()

    def _initialize_cache(self, message: InitializeCache) -> None:
        """Allocate the KV pool and build the runner for an engine."""
        self._engine_wait.end()
        if message.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"engine speaks protocol {message.protocol_version}, worker {PROTOCOL_VERSION}"
            )
        self._group.join(message.epoch)
        self._runner, connector = self._runner_builder.build_model_runner(message)
        self._connector = ConnectorSteps(
            connector, self._epoch, self._group.rank, self._poller, self._engine.send
        )
        self._engine.send(CacheReady(message.epoch, self._boot.rank))

    def _change_adapters(self, message: LoadAdapter | DropAdapter) -> None:
        if self._adapters is None:
            raise ProtocolError("the engine sent an adapter to a worker without --enable-lora")
        if isinstance(message, LoadAdapter):
            self._adapters.begin_load(message)
        else:
            self._adapters.drop(message.lora_int_id)

    def _launch_step(self, step: SchedulerOutput) -> None:
        """Start a step; a device may still be computing the previous one."""
        if self._runner is None:
            raise ProtocolError("the engine sent a step before InitializeCache")
        with self._reporting_errors(step):
            if step.has_result:
                self._fault_injector.begin_step()
            self._connector.before_step(step)
            keep_cores = nullcontext() if self._adapters is None else self._adapters.computing()
            with self._profiler.step(step), keep_cores:
                self._launched.append((step, self._runner.launch(step, self.receive_grammars)))
            self._connector.after_launch()

    def _send_finished_steps(self) -> None:
        """Send the results of finished steps, the oldest first."""
        while self._launched and self._launched[0][1].is_ready():
            step, pending = self._launched.popleft()
            with self._reporting_errors(step):
                output = pending.result()
                self._connector.after_step(step)
            self._engine.send(output)
        oldest = self._launched[0][0].step if self._launched else None
        if self._group.size > 1 and self._rank_wait.is_due(oldest):
            self._report_long_wait()

    @contextmanager
    def _reporting_errors(self, step: SchedulerOutput) -> Iterator[None]:
        """Report the error of a step to the engine; drop it if the engine has died."""
        try:
            yield
        except StepAbandonedError:
            pass
        except GroupLostError:
            raise  # the rank that caused it reports the error
        except Exception as error:
            self._engine.send(
                ModelRunnerOutput(
                    step.epoch, step.step, [], [], error=describe(error, self._boot.rank)
                )
            )
            raise

    def _ready_message(self) -> WorkerReady:
        loaded, draft = self._loaded, self._loaded.draft
        return WorkerReady(
            protocol_version=PROTOCOL_VERSION,
            epoch=self._epoch,
            rank=self._boot.rank,
            geometry=loaded.geometry,
            kv_cache_bytes=self._runner_builder.kv_cache_bytes,
            vocab_size=loaded.model.spec.vocab_size,
            fingerprint=loaded.fingerprint(self._boot.config.cache.block_size),
            model_fingerprint=loaded.model_fingerprint(self._boot.config.cache.block_size),
            device_name=loaded.device.name,
            weights=loaded.weights,
            phases=self._phases.phases,
            computes_ahead=loaded.device.computes_ahead and loaded.pooling_head is None,
            step_tokens=self._runner_builder.step_tokens,
            compute=loaded.model.spec.compute_shape,
            num_state_slots=loaded.plan.num_state_slots,
            is_batch_invariant=loaded.is_batch_invariant,
            draft_method="" if draft is None else draft.method,
            max_draft_len=0 if draft is None else draft.max_model_len,
            draft_bytes_per_token=0 if draft is None else draft.geometry.bytes_per_token,
            draft_weight_bytes=0 if draft is None else draft.weight_format.memory.total(),
            draft_fingerprint=b"" if draft is None else draft.fingerprint,
            routing_bytes=self._runner_builder.routing_bytes,
            kernels=loaded.device.kernels,
            kv_cache_grows=loaded.device.commits_lazily
            and not self._boot.config.cache.kv_cache_populate,
        )
