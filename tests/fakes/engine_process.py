"""The real engine process; the test acts as its supervisor, workers and front ends."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from proto.codec import encode
from proto.messages.engine_io import (
    AdminReply,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
)
from proto.messages.lifecycle import (
    CacheReady,
    EngineReady,
    InitializeCache,
    NewWorkers,
    Shutdown,
    TakePlace,
    ToSupervisor,
    WorkerReady,
)
from proto.messages.lora import (
    AdapterList,
    AdapterReply,
    AdapterUsage,
    DropAdapter,
    LoadAdapter,
)
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.profiler import ProfileCall
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import SchedulerOutput
from proto.runtime.run_directory import RunDirectory
from proto.runtime.sockets import Link, Poller, front_end_path, supervisor_path, worker_path
from proto.settings.config import ServeConfig
from tests.fakes import lifecycle_messages
from tests.fakes.paged_runner import PagedRunner

FromEngine = (
    EngineReady | EngineCoreOutputs | AdminReply | AdapterList | AdapterReply | AdapterUsage
)
EPOCH = 3
BLOCK_SIZE = 16
VOCAB_SIZE = 1000
TIMEOUT_SECONDS = 20.0


class EngineProcess:
    """Starts `python -m engine_core` and acts as supervisor, worker and front ends."""

    def __init__(
        self, parent: str, *, config: ServeConfig, num_front_ends: int = 1, **boot_changes: Any
    ) -> None:
        self.directory = RunDirectory.create(parent)
        run_dir = self.directory.path
        self.supervisor = Link.bind(
            supervisor_path(run_dir, "engine_core", 0, 0),
            ToSupervisor,
        )
        self.worker = self._connect_as_worker(EPOCH)
        self.front_ends = [
            Link.connect(front_end_path(run_dir, EPOCH, index), FromEngine)
            for index in range(num_front_ends)
        ]
        self.runner = PagedRunner(BLOCK_SIZE)
        self.inbox: dict[Link, list[Any]] = {
            link: [] for link in (self.supervisor, self.worker, *self.front_ends)
        }
        death, self._alive = os.pipe()
        boot = lifecycle_messages.boot(
            "engine_core",
            epoch=EPOCH,
            worker_epoch=EPOCH,
            run_dir=run_dir,
            death_fd=death,
            config=config,
            model=lifecycle_messages.model(vocab_size=VOCAB_SIZE, max_position=4096),
            front_ends=(0,) * num_front_ends,
            **boot_changes,
        )
        descriptor = os.memfd_create("boot")
        os.write(descriptor, encode(boot))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine_core", "--boot-fd", str(descriptor)],
            pass_fds=(descriptor, death),
        )
        self.supervisor.send(TakePlace(boot))
        os.close(descriptor)
        os.close(death)

    def _connect_as_worker(self, epoch: int, rank: int = 0) -> Link:
        path = worker_path(self.directory.path, epoch, rank)
        return Link.connect(
            path, InitializeCache | SchedulerOutput | ProfileCall | LoadAdapter | DropAdapter
        )

    def add_worker(self, rank: int) -> Link:
        """Act as another worker beside rank 0."""
        link = self._connect_as_worker(EPOCH, rank)
        self.inbox[link] = []
        return link

    def replace_worker(self, epoch: int) -> None:
        """Act as a new worker of this epoch, without any state."""
        self.inbox.pop(self.worker)
        self.worker.close()
        self.worker = self._connect_as_worker(epoch)
        self.inbox[self.worker] = []
        self.runner = PagedRunner(BLOCK_SIZE)

    def restart_workers(self, epoch: int, **changes: Any) -> None:
        """Replace the workers by those of another epoch and notify the engine."""
        self.replace_worker(epoch)
        self.supervisor.send(NewWorkers(epoch))
        self.worker.send(self.worker_ready(epoch=epoch, **changes))

    def add_front_end(self, index: int, incarnation: int) -> Link:
        """Connect another incarnation of a front end."""
        path = front_end_path(self.directory.path, EPOCH, index, incarnation)
        link = Link.connect(path, FromEngine)
        self.inbox[link] = []
        return link

    def worker_ready(self, **changes: Any) -> WorkerReady:
        """Return the first message of the worker; its memory holds 100 blocks."""
        return lifecycle_messages.worker_ready(
            **{"epoch": EPOCH, "vocab_size": VOCAB_SIZE, **changes}
        )

    def start(self) -> EngineReady:
        """Report the worker ready, create its cache, and wait for EngineReady."""
        self.worker.send(self.worker_ready())
        self.expect(self.worker, InitializeCache)
        self.worker.send(CacheReady(EPOCH, 0))
        ready: EngineReady = self.expect(self.supervisor, EngineReady)
        return ready

    def request(
        self, request_id: int, prompt: list[int], max_tokens: int, **changes: Any
    ) -> EngineCoreRequest:
        message = EngineCoreRequest(
            epoch=EPOCH,
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens),
            seed=0,
            arrival_time=time.monotonic(),
        )
        return msgspec.structs.replace(message, **changes)

    def run_step(self) -> SchedulerOutput:
        """Receive steps until one has tokens; compute it and send the result."""
        while True:
            step: SchedulerOutput = self.expect(self.worker, SchedulerOutput)
            result: ModelRunnerOutput = self.runner.execute(step)
            self.worker.send(result)
            if step.total_num_scheduled_tokens:
                return step

    def outputs_of(self, request_id: int, front_end: int = 0) -> list[EngineCoreOutput]:
        """Run steps until a request, or a turn of it, ends; return all its outputs."""
        link = self.front_ends[front_end]
        found: list[EngineCoreOutput] = []
        while not found or found[-1].finish_reason is None:
            self.run_step()
            message = self.expect(link, EngineCoreOutputs, lambda each: each.outputs)
            found += [each for each in message.outputs if each.request_id == request_id]
        return found

    def expect(self, link: Link, kind: type, where: Callable[[Any], bool] = bool) -> Any:
        """Return the next message of a kind on a link; drop other messages before it."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            inbox = self.inbox[link]
            while inbox:
                message = inbox.pop(0)
                if isinstance(message, kind) and where(message):
                    return message
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"no {kind.__name__} received"
            Poller(self.inbox).wait(remaining)
            for each, received in self.inbox.items():
                received += each.receive()

    def cpu_seconds(self) -> float:
        """Return the CPU time of the engine so far."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def shutdown(self) -> int:
        """Request shutdown of the engine; return its exit status."""
        self.supervisor.send(Shutdown())
        poller = Poller([self.supervisor])
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self.supervisor.flush() and time.monotonic() < deadline:
            poller.wait(0.05)  # a connection alone does not end it
        return self.process.wait(TIMEOUT_SECONDS)

    def close(self) -> None:
        """End the engine as the death of its supervisor does, and clean up."""
        self.directory.leave()
        os.close(self._alive)
        try:
            self.process.wait(TIMEOUT_SECONDS)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            for link in self.inbox:
                link.close()


def is_idle(message: EngineCoreOutputs) -> bool:
    """Return whether the engine reports no running and no waiting request."""
    stats = message.stats
    return stats is not None and stats.num_running == stats.num_waiting == 0
