"""The worker process: load the model, then run the steps that the engine sends.

    supervisor ── boot ──▶ load weights ── WorkerReady ──▶ engine
    engine ── InitializeCache ──▶ allocate ── CacheReady ──▶ engine
    engine ── SchedulerOutput ──▶ ModelRunner ── ModelRunnerOutput ──▶ engine
    engine ── GrammarOutput ──▶ before sampling, if the step has constrained rows

When the engine dies, the supervisor names the epoch of the next one (`NewEngine`). The worker drops
rows and KV, keeps its weights, and starts again with `WorkerReady`. Without a new engine it exits
after 30 s.

Workers of one model join a rank group when they initialise their caches, and leave it when the
engine dies. A rank that waits for another one in a step then loses the group and waits for the
supervisor; the same happens when another worker dies.
"""

import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from proto import PROTOCOL_VERSION
from proto.errors import ProcessDiedError, ProtocolError
from proto.faults import FaultInjector
from proto.lifecycle import (
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
from proto.model_runner_output import ModelRunnerOutput
from proto.process import describe, freeze_heap
from proto.scheduler_output import GrammarOutput, SchedulerOutput
from proto.sockets import Link, Poller, worker_path
from worker.async_runner import PendingStep, Runner
from worker.device.choice import create_device
from worker.kv_connector.steps import ConnectorSteps, no_connector_steps
from worker.loaded_model import load
from worker.parallel.create import create_group
from worker.parallel.group import GroupLostError, RankWaitReporter
from worker.reports import SupervisorReports
from worker.runner_maker import RunnerMaker

# What the engine has sent and the worker has not served yet.
#
# Messages are served in order, but for masks: a step asks for its own while it is served, and
# by then the next step may have come before them. The engine sends masks of the oldest step in
# flight only, so those that come take the place of any that nobody has asked for.


FromEngine = InitializeCache | SchedulerOutput | GrammarOutput
"""The messages from an engine to a worker."""


class StepAbandonedError(Exception):
    """The engine of this step has died, or the worker is stopping."""


class Inbox:
    """Messages of one engine epoch that have not been processed."""

    def __init__(self) -> None:
        self._messages: deque[InitializeCache | SchedulerOutput] = deque()
        self._masks: dict[int, GrammarOutput] = {}

    def put(self, messages: Iterable[FromEngine]) -> None:
        """Add messages in the order of their arrival; only the latest masks are kept."""
        for message in messages:
            if isinstance(message, GrammarOutput):
                self._masks = {message.step: message}
            else:
                self._messages.append(message)

    def next(self) -> InitializeCache | SchedulerOutput | None:
        """Remove and return the oldest message; None if there is none."""
        return self._messages.popleft() if self._messages else None

    def masks_of(self, step: int) -> GrammarOutput | None:
        """Remove and return the masks of a step; None if they have not arrived."""
        return self._masks.pop(step, None)


#
# Owns the time since which there is none.


ENGINE_SECONDS: Final = 30.0
"""How long a worker keeps its weights without an engine; a new one usually takes two seconds."""


class EngineWait:
    """The time limit for a new engine: from the loss of one to the first message of the next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf

    def begin(self) -> None:
        """Start the time, unless it is running."""
        self._end = min(self._end, self._clock() + ENGINE_SECONDS)

    def end(self) -> None:
        """Stop the time: an engine is connected."""
        self._end = math.inf

    def seconds_left(self) -> float | None:
        """Return the rest, None if no engine is awaited; raise ProcessDiedError after the limit."""
        left = self._end - self._clock()
        if left <= 0.0:
            raise ProcessDiedError(f"no engine has come for {ENGINE_SECONDS:g} s")
        return None if left == math.inf else left


logger = logging.getLogger("tokend.worker")


def main(boot: ProcessBoot, supervisor: Link) -> None:
    """Load the model, then serve one engine after the other until `Shutdown`."""

    def meet(epoch: int) -> Link:
        path = worker_path(boot.run_dir, epoch, boot.index)
        return Link.connect(path, FromEngine)

    Worker(boot, meet, supervisor).run()


class Worker:
    """One worker process. meet: connects to the engine of a worker epoch."""

    def __init__(self, boot: ProcessBoot, meet: Callable[[int], Link], supervisor: Link) -> None:
        self._phases = PhaseClock(boot.born_at)
        self._phases.end("imports")
        self._boot = boot
        self._supervisor = supervisor
        self._meet = meet
        self._epoch = boot.worker_epoch
        self._engine_epoch = boot.epoch
        self._distrusts_engine = False
        self._engine = meet(boot.worker_epoch)
        self._poller = Poller([supervisor, self._engine])
        self._copies = no_connector_steps(self._poller)
        self._inbox = Inbox()
        self._stopped = False
        self._engine_wait = EngineWait()
        self._runner: Runner | None = None
        self._launched: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self._saboteur = FaultInjector.of(boot.faults, "worker", boot.index, boot.incarnation)
        self._has_lost_group = False
        config, reports = boot.config, SupervisorReports(supervisor, boot.index)
        device = create_device(config, boot.index)
        device.check_kv_dtype(config.cache.kv_cache_dtype)
        self._group = create_group(
            boot.run_dir,
            boot.index,
            config.parallel.tensor_parallel_size,
            device.torch_device,
            lambda: supervisor.send(WaitingForRanks(boot.index)),
            lambda: bool(Poller([supervisor]).wait(0.0)),
        )
        self._wait_reporter = RankWaitReporter(
            self._group.size, lambda: supervisor.send(WaitingForRanks(boot.index))
        )
        # Loading takes a while, and what has no room now has none beside the weights.
        device.kv_cache_bytes(config.cache)
        self._loaded = load(config, boot.model, device, self._group, reports)
        if self._loaded.on_cuda:
            self._group.join(self._epoch, "memory")  # the largest step needs all of them
        self._runners = RunnerMaker(config, self._loaded, self._saboteur, reports)
        self._phases.end("weights")

    def run(self) -> None:
        """Run steps until `Shutdown`; raise ProcessDiedError if no engine follows one that died."""
        try:
            self._run()
        finally:
            self._copies.close()

    def _run(self) -> None:
        self._engine.send(self._ready())
        freeze_heap()  # while the engine plans; what follows must not wait for it
        while not self._stopped:
            # A device that computes may be done before anything arrives: then it is looked at.
            self._receive(0.0 if self._launched else self._engine_wait.seconds_left())
            while not self._stopped and (message := self._inbox.next()) is not None:
                self._serve_with_others(message)
                self._send_results()
            self._send_results()

    def masks_of(self, step: SchedulerOutput) -> GrammarOutput:
        """Wait for the masks of a step; raise StepAbandonedError if they will not arrive."""
        epoch = self._epoch
        while (masks := self._inbox.masks_of(step.step)) is None:
            self._send_results()  # the engine derives them from these tokens
            self._receive(0.0 if self._launched else None)
            if self._stopped or self._epoch != epoch:
                raise StepAbandonedError
        return masks

    def _receive(self, seconds: float | None) -> None:
        """Wait at most this time, then handle commands and queue the engine's messages."""
        readable = self._poller.wait(seconds)
        if self._supervisor in readable and self._handle_commands():
            self._stopped = True
            return
        self._copies.report_if_ready(readable)
        messages = self._engine.receive()
        if self._engine.num_undecodable:
            self._distrust_engine()
            return
        self._inbox.put([each for each in messages if each.epoch == self._epoch])

    def _handle_commands(self) -> bool:
        """Handle commands of the supervisor. Return True for `Shutdown`."""
        for message in self._supervisor.receive():
            if isinstance(message, Shutdown):
                return True
            if isinstance(message, NewEngine):
                self._engine_epoch = message.epoch
                self._change_engine(message.worker_epoch)
        return False

    def _distrust_engine(self) -> None:
        """Report an undecodable message: a step is lost, so nothing more can be computed."""
        if not self._distrusts_engine:
            self._distrusts_engine = True
            self._supervisor.send(
                ProtocolViolation(
                    "engine_core", 0, self._engine_epoch, "it sent what is no message"
                )
            )

    def _change_engine(self, epoch: int) -> None:
        """Drop rows, KV and steps of the old engine, and connect to the next one."""
        logger.info("the engine died: waiting for the next one")
        self._poller.remove(self._engine)
        self._engine.close()
        self._copies.close()  # no copy may write to a cache that is freed
        self._copies = no_connector_steps(self._poller)
        self._runner = None
        self._launched.clear()
        gc.collect()  # a cycle may hold the KV pool, and the next one is as large
        self._group.leave()  # which waits for the end of graphs that the group is part of
        self._has_lost_group = False
        self._distrusts_engine = False
        self._epoch = epoch
        self._inbox = Inbox()
        self._engine = self._meet(epoch)
        self._poller.add(self._engine)
        self._engine.send(self._ready())
        self._engine_wait.begin()

    def _serve_with_others(self, message: InitializeCache | SchedulerOutput) -> None:
        """Process a message; if the rank group is lost, wait for the supervisor instead."""
        if self._has_lost_group:
            return
        try:
            self._serve(message)
        except GroupLostError as error:
            logger.warning("%s", error)
            self._has_lost_group = True
            self._engine_wait.begin()

    def _serve(self, message: InitializeCache | SchedulerOutput) -> None:
        if isinstance(message, InitializeCache):
            self._engine_wait.end()
            self._runner = self._initialize(message)
            self._engine.send(CacheReady(message.epoch, self._boot.index))
        elif self._runner is None:
            raise ProtocolError("the engine sent a step before InitializeCache")
        else:
            self._launch(self._runner, message)

    def _launch(self, runner: Runner, step: SchedulerOutput) -> None:
        """Start a step; a device may still be computing the previous one."""
        with self._reporting(step):
            if step.total_num_scheduled_tokens:
                self._saboteur.begin_step()
            self._copies.before_step(step)
            self._launched.append((step, runner.launch(step, self)))
            self._copies.after_step(step)

    def _send_results(self) -> None:
        """Send the results of completed steps, the oldest first."""
        while self._launched and self._launched[0][1].ready():
            step, launched = self._launched.popleft()
            with self._reporting(step):
                output = launched.result()
            self._engine.send(output)
        self._wait_reporter.await_step(self._launched[0][0].step if self._launched else None)

    @contextmanager
    def _reporting(self, step: SchedulerOutput) -> Iterator[None]:
        """Report the error of a step to the engine; drop it if the engine has died."""
        try:
            yield
        except StepAbandonedError:
            pass
        except GroupLostError:
            raise  # whoever caused it says more
        except Exception as error:
            self._engine.send(
                ModelRunnerOutput(
                    step.epoch, step.step, [], [], error=describe(error, self._boot.index)
                )
            )
            raise

    def _ready(self) -> WorkerReady:
        loaded = self._loaded
        return WorkerReady(
            protocol_version=PROTOCOL_VERSION,
            epoch=self._epoch,
            rank=self._boot.index,
            geometry=loaded.geometry,
            kv_cache_bytes=self._runners.kv_cache_bytes,
            vocab_size=loaded.model.spec.vocab_size,
            fingerprint=loaded.fingerprint(self._boot.config.cache.block_size),
            device_name=loaded.device.name,
            weights=loaded.weights,
            phases=self._phases.phases,
            computes_ahead=loaded.on_cuda,
            step_tokens=self._runners.step_tokens,
        )

    def _initialize(self, message: InitializeCache) -> Runner:
        if message.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"engine speaks protocol {message.protocol_version}, worker {PROTOCOL_VERSION}"
            )
        self._group.join(message.epoch)
        runner, connector = self._runners.make(message)
        self._copies = ConnectorSteps(
            connector, self._epoch, self._group.rank, self._poller, self._engine.send
        )
        return runner
