"""Two tensor-parallel workers on simulated GPUs join a group to measure memory and one to serve."""

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from proto import PROTOCOL_VERSION
from proto.messages.lifecycle import (
    CacheReady,
    InitializeCache,
    NewEngine,
    Shutdown,
    ToSupervisor,
    WorkerReady,
)
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.runtime.sockets import Link, worker_path
from proto.settings.config import GIB, CacheConfig, ParallelConfig, SchedulerConfig, ServeConfig
from tests.fakes import lifecycle_messages
from tests.fakes.cuda_runner import Model, compute_by_torch
from tests.fakes.fake_cuda import CUDA, FakeCuda
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_nccl import FakeRanks
from tests.fakes.simulated_gpu import SimulatedGpu
from tests.fakes.started_worker import started_worker
from tests.fakes.stepped_engine import BLOCK
from tests.worker.parallel.test_two_workers import receive
from tests.worker.reference.torch_kernels import TorchEdits, draw_by_torch, store_by_index
from tests.worker.test_cuda_service import steps
from worker import loaded_model
from worker import worker as service
from worker.cuda import device as cuda_device
from worker.cuda.device import CudaDevice
from worker.worker import FromEngine

pytestmark = pytest.mark.suite("devices")

LIMIT_SECONDS = 60.0
SIZE = 2
NUM_BLOCKS = 20


class RecordingGpu(SimulatedGpu):
    """Records which groups the ranks had joined when the largest step was measured."""

    def __init__(self, rank: int, ranks: FakeRanks) -> None:
        super().__init__(free=(70 - 5 * rank) * GIB)
        self._joined = ranks.meetings[rank]
        self.joined_before: list[tuple[int, str]] = []

    def peak_bytes(self, run: Any) -> int:
        self.joined_before = list(self._joined)
        return super().peak_bytes(run)


class Pair:
    """Two workers in threads; the test acts as their supervisor and engines."""

    def __init__(self, model: Model, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run_dir = run_dir
        self._model = model
        self.current = threading.local()
        self.ranks = FakeRanks(SIZE)
        self.gpus = [RecordingGpu(rank, self.ranks) for rank in range(SIZE)]
        self.cudas = [FakeCuda() for _ in range(SIZE)]
        compute_by_torch(monkeypatch)
        self._replace_devices(monkeypatch)
        self.supervisors = [Link.bind(f"{run_dir}/s{rank}", ToSupervisor) for rank in range(SIZE)]
        self.links = list(self.supervisors)
        self.engines: list[Link] = []
        self.bind_engines(1)
        self.threads = [
            threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(SIZE)
        ]
        for thread in self.threads:
            thread.start()

    def _replace_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        current, load = self.current, loaded_model.load_model

        def load_model(*args: Any) -> Any:
            with current.cuda.loading():
                return load(*args)

        def group(*, rank: int, **_: Any) -> Any:
            return self.ranks.group(rank, current.cuda.device)

        def device(config: ServeConfig, rank: int, starts_alone: bool) -> CudaDevice:
            return CudaDevice(CUDA, self.gpus[rank])

        monkeypatch.setattr(loaded_model, "load_model", load_model)
        monkeypatch.setattr(service, "create_device", device)
        monkeypatch.setattr(CudaDevice, "rank_group", lambda self: group)
        library = lambda: FakeFlashInfer(current.cuda.device)  # noqa: E731
        monkeypatch.setattr(cuda_device, "Accelerator", lambda device: current.cuda.device)
        monkeypatch.setattr(cuda_device, "load_library", library)
        monkeypatch.setattr(cuda_device, "TritonStore", lambda: store_by_index)
        monkeypatch.setattr(cuda_device, "TritonDraw", lambda: draw_by_torch)
        monkeypatch.setattr(cuda_device, "TritonEdits", TorchEdits)

    def _run(self, rank: int) -> None:
        config = ServeConfig(
            cache=CacheConfig(block_size=BLOCK),
            scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64),
            parallel=ParallelConfig(tensor_parallel_size=SIZE),
        )
        boot = lifecycle_messages.boot(
            "worker", index=rank, config=config, model=self._model.prepared, run_dir=self._run_dir
        )
        self.current.cuda = self.cudas[rank]
        with self.cudas[rank]:
            started_worker(
                boot,
                lambda epoch: Link.connect(worker_path(self._run_dir, epoch, rank), FromEngine),
                Link.connect(f"{self._run_dir}/s{rank}", NewEngine | Shutdown),
            ).run()

    def bind_engines(self, epoch: int) -> None:
        messages = WorkerReady | CacheReady | ModelRunnerOutput
        self.engines = [
            Link.bind(worker_path(self._run_dir, epoch, rank), messages) for rank in range(SIZE)
        ]
        self.links += self.engines

    def start(self, epoch: int) -> list[WorkerReady]:
        ready = [receive(engine) for engine in self.engines]
        for engine in self.engines:
            engine.send(InitializeCache(PROTOCOL_VERSION, epoch, NUM_BLOCKS, BLOCK, 64))
        found = [receive(engine) for engine in self.engines]
        assert found == [CacheReady(epoch, rank) for rank in range(SIZE)]
        return ready

    def run_steps(self, epoch: int) -> list[list[list[int]]]:
        """Sampled tokens of all steps; both workers must return the same."""
        found = []
        for step in steps(num_decodes=5):
            for engine in self.engines:
                engine.send(step.__class__(**_fields(step) | {"epoch": epoch}))
            messages = [receive(engine) for engine in self.engines]
            assert messages[0].error is messages[1].error is None
            assert messages[0].sampled_token_ids == messages[1].sampled_token_ids
            found.append(messages[0].sampled_token_ids)
        return found

    def stop(self) -> None:
        for supervisor in self.supervisors:
            supervisor.send(Shutdown())
        for thread in self.threads:
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive()
        for link in self.links:
            link.close()


def _fields(step: Any) -> dict[str, Any]:
    return {name: getattr(step, name) for name in step.__struct_fields__}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        workers = Pair(Model("llama", tmp_path), run_dir, monkeypatch)
        yield workers
        workers.stop()


def test_ranks_join_before_memory_is_measured_and_again_for_every_engine(pair: Pair) -> None:
    first, second = pair.start(1)
    assert [gpu.joined_before for gpu in pair.gpus] == [[(1, "memory")]] * SIZE
    assert (first.kv_cache_bytes, second.kv_cache_bytes) == (61 * GIB, 56 * GIB)
    assert (first.step_tokens, first.computes_ahead) == (64, True)
    tokens = pair.run_steps(1)
    assert all(cuda.device.num_replays == 5 for cuda in pair.cudas)
    pair.bind_engines(2)
    for supervisor in pair.supervisors:
        supervisor.send(NewEngine(2, 2))
    pair.start(2)
    assert pair.ranks.meetings[1] == [(1, "memory"), (1, "steps"), (2, "steps")]
    assert pair.run_steps(2) == tokens
    assert len(tokens) == 6


@pytest.mark.parametrize("case", ["before they met", "of the host's", "of another shape"])
def test_the_fake_group_refuses_misuse(case: str) -> None:
    """Misuse that would hang NCCL or read foreign memory."""
    ranks, cuda = FakeRanks(1), FakeCuda()
    with cuda:
        group = ranks.group(0, cuda.device)
        x = cuda.device.zeros(4, torch.float32)
        if case == "before they met":
            with pytest.raises(Exception, match="before the ranks have met"):
                group.gather(x)
            return
        group.join(1)
        if case == "of the host's":
            with pytest.raises(Exception, match="host memory"):
                group.gather(torch.zeros(4))
            return
        assert group.gather(x).shape == (1, 4)
    two = FakeRanks(2)
    cudas = [FakeCuda(), FakeCuda()]
    raised: list[str] = []

    def exchange(rank: int) -> None:
        with cudas[rank]:
            each = two.group(rank, cudas[rank].device)
            each.join(1)
            try:
                each.gather(cudas[rank].device.zeros(4 + rank, torch.float32))
            except Exception as error:
                raised.append(str(error))

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert raised == ["ranks exchange tensors of different shapes"] * 2
