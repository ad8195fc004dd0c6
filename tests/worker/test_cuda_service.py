"""The worker process on a simulated GPU: loading, sizing the pool, serving."""

import tempfile
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from proto import PROTOCOL_VERSION
from proto.messages.lifecycle import (
    CacheReady,
    InitializeCache,
    NewEngine,
    Progress,
    Shutdown,
    ToSupervisor,
    WorkerReady,
)
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from proto.runtime.sockets import Link, Poller
from proto.settings.config import GIB, CacheConfig, SchedulerConfig, ServeConfig
from tests.fakes import lifecycle_messages
from tests.fakes.cuda_runner import Model, compute_by_torch, host_runner
from tests.fakes.fake_cuda import CUDA, FakeCuda
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.simulated_gpu import SimulatedGpu
from tests.fakes.started_worker import started_worker
from tests.fakes.stepped_engine import BLOCK, new_request
from tests.worker.reference.torch_kernels import TorchEdits, draw_by_torch, store_by_index
from worker import loaded_model
from worker import worker as service
from worker.cuda import device as cuda_device
from worker.cuda.device import CudaDevice
from worker.worker import FromEngine

LIMIT_SECONDS = 60.0
NUM_BLOCKS = 20
PROMPT = [5, 9, 2, 40, 41]


class Running:
    """A worker with a fake GPU in a thread; the test acts as its supervisor and engine."""

    def __init__(
        self,
        model: Model,
        run_dir: str,
        monkeypatch: pytest.MonkeyPatch,
        step_tokens: int | None = 64,
    ) -> None:
        self.cuda = FakeCuda()
        compute_by_torch(monkeypatch)
        self._replace_devices(monkeypatch)
        self.supervisor = Link.bind(f"{run_dir}/s", ToSupervisor)
        self.engine = Link.bind(f"{run_dir}/e", WorkerReady | CacheReady | ModelRunnerOutput)
        config = ServeConfig(
            cache=CacheConfig(block_size=BLOCK),
            scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=step_tokens),
        )
        boot = lifecycle_messages.boot("worker", config=config, model=model.prepared)
        self._run_dir, self._boot = run_dir, boot
        self.received: list[Any] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _replace_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda, load = self.cuda, loaded_model.load_model
        gpu = SimulatedGpu(free=70 * GIB)

        def load_model(*args: Any) -> Any:
            with cuda.loading():
                return load(*args)

        monkeypatch.setattr(loaded_model, "load_model", load_model)
        monkeypatch.setattr(service, "create_device", lambda *_: CudaDevice(CUDA, gpu))
        monkeypatch.setattr(cuda_device, "Accelerator", lambda device: cuda.device)
        monkeypatch.setattr(cuda_device, "load_library", lambda: FakeFlashInfer(cuda.device))
        monkeypatch.setattr(cuda_device, "TritonStore", lambda: store_by_index)
        monkeypatch.setattr(cuda_device, "TritonDraw", lambda: draw_by_torch)
        monkeypatch.setattr(cuda_device, "TritonEdits", TorchEdits)

    def _run(self) -> None:
        def connect(epoch: int) -> Link:
            return Link.connect(f"{self._run_dir}/e", FromEngine)

        link = Link.connect(f"{self._run_dir}/s", NewEngine | Shutdown)
        with self.cuda:
            self.service = started_worker(self._boot, connect, link)
            self.service.run()

    def expect(self, kind: type) -> Any:
        """Wait for the next message of a kind, and remove it."""
        poller = Poller([self.supervisor, self.engine])
        while not any(isinstance(each, kind) for each in self.received):
            for each in (self.supervisor, self.engine):
                self.received += each.receive()
            found = any(isinstance(each, kind) for each in self.received)
            assert found or poller.wait(LIMIT_SECONDS), f"no {kind.__name__}"
        first = next(each for each in self.received if isinstance(each, kind))
        self.received.remove(first)
        return first


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model("llama", tmp_path)


@pytest.fixture
def running(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        worker = Running(model, run_dir, monkeypatch)
        yield worker
        worker.supervisor.send(Shutdown())
        worker.thread.join(LIMIT_SECONDS)
        worker.supervisor.close()
        worker.engine.close()


def steps(num_decodes: int, num_groups: int = 1) -> list[SchedulerOutput]:
    """Steps of a prompt and decodes; decodes are sent before their tokens are known."""
    request = new_request(1, PROMPT, [[1, 2, 3, 4]] * num_groups, len(PROMPT))
    nothing = CachedRequestData([], [], [], [], [], [])
    found = [scheduler_output(1, [request], nothing, len(PROMPT))]
    for index in range(num_decodes):
        cached = CachedRequestData([1], [len(PROMPT) + index], [1], [None], [], [])
        found.append(scheduler_output(2 + index, [], cached, 1))
    return found


def scheduler_output(
    step: int, new: list[NewRequestData], cached: CachedRequestData, num_tokens: int
) -> SchedulerOutput:
    return SchedulerOutput(
        epoch=1,
        step=step,
        new_requests=new,
        cached_requests=cached,
        total_num_scheduled_tokens=num_tokens,
        finished_seq_ids=[],
        preempted_seq_ids=[],
    )


def test_a_cuda_worker_runs_steps_before_their_tokens_are_known(
    model: Model, running: Running
) -> None:
    ready = running.expect(WorkerReady)
    assert ready.computes_ahead
    assert ready.device_name == "Some GPU (80.00 GiB)"
    assert ready.geometry.dtype == "bfloat16"
    # Of 72 GiB 10 are in use, and the largest step takes one.
    assert ready.kv_cache_bytes == 72 * GIB - 10 * GIB - GIB
    running.engine.send(InitializeCache(PROTOCOL_VERSION, 1, NUM_BLOCKS, BLOCK, 64))
    running.expect(CacheReady)
    sent = steps(num_decodes=6)
    for step in sent:
        running.engine.send(step)
    found = [running.expect(ModelRunnerOutput) for _ in sent]
    assert [each.step for each in found] == [step.step for step in sent]
    assert running.cuda.device.num_replays == 6
    with FakeCuda(), torch.inference_mode():
        runner = host_runner(model, 3)
        wanted = [runner.execute(step).sampled_token_ids for step in sent]
    assert [each.sampled_token_ids for each in found] == wanted
    shown = [each for each in running.received if isinstance(each, Progress)]
    assert Progress("capturing graphs", 1.0) in shown


def test_slots_for_states_are_part_of_the_memory_beside_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model("lfm2", tmp_path)
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        running = Running(model, run_dir, monkeypatch)
        ready = running.expect(WorkerReady)
        slots = ready.num_state_slots
        assert slots == 1 + 4 * 3, "twice the two of each sequence"
        states_bytes = slots * ready.geometry.state_bytes
        assert states_bytes > 0
        assert ready.kv_cache_bytes == 72 * GIB - 10 * GIB - GIB - states_bytes
        running.engine.send(
            InitializeCache(PROTOCOL_VERSION, 1, NUM_BLOCKS, BLOCK, 64, num_state_slots=slots)
        )
        running.expect(CacheReady)
        sent = steps(num_decodes=6, num_groups=2)
        for step in sent:
            running.engine.send(step)
        found = [running.expect(ModelRunnerOutput) for _ in sent]
        assert running.cuda.device.num_replays == 6
        running.supervisor.send(Shutdown())
        running.thread.join(LIMIT_SECONDS)
        running.supervisor.close()
        running.engine.close()
    with FakeCuda(), torch.inference_mode():
        runner = host_runner(model, 3)
        wanted = [runner.execute(step).sampled_token_ids for step in sent]
    assert [each.sampled_token_ids for each in found] == wanted


def test_masks_arrive_while_the_model_computes(running: Running) -> None:
    """The engine makes masks from earlier tokens, after it has sent two steps."""
    running.expect(WorkerReady)
    running.engine.send(InitializeCache(PROTOCOL_VERSION, 1, NUM_BLOCKS, BLOCK, 64))
    running.expect(CacheReady)
    found = []
    sent = [msgspec.structs.replace(each, constrained_seq_ids=[1]) for each in steps(3)]
    running.engine.send(sent[0])
    for step, following in pairwise([*sent, sent[-1]]):
        if following is not step:
            running.engine.send(following)
        masks = np.zeros(96, np.uint8)
        masks[20 + step.step] = 1
        packed = np.packbits(masks, bitorder="little").tobytes()
        running.engine.send(GrammarOutput(1, step.step, [1], packed))
        found.append(running.expect(ModelRunnerOutput))
    assert [each.sampled_token_ids for each in found] == [[[21]], [[22]], [[23]], [[24]]]
    assert running.cuda.device.num_replays == 3


def test_a_runner_is_freed_before_the_next_engine_initialises_its_pool(running: Running) -> None:
    """The pool takes most of the memory, and the next one is as large."""
    running.expect(WorkerReady)
    running.engine.send(InitializeCache(PROTOCOL_VERSION, 1, NUM_BLOCKS, BLOCK, 64))
    running.expect(CacheReady)
    for step in steps(num_decodes=2):
        running.engine.send(step)
        running.expect(ModelRunnerOutput)
    assert running.service._runner is not None
    runner = weakref.ref(running.service._runner)
    running.supervisor.send(NewEngine(2, 2))
    running.expect(WorkerReady)
    assert runner() is None
