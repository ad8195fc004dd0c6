"""The whole worker on a CUDA device without a GPU: tokens equal those of the reference on a CPU.

Weights, cache, attention by the strict FlashInfer, graphs, sampling and the tokens that stay
on the device: everything is on a fake device, which refuses whatever would wait or race.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from proto.config import DeviceConfig
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput
from tests.fakes.fake_cuda import CUDA, FakeCuda, InThisThread
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import CONFIGS, tiny_model
from tests.worker.test_model_runner import BLOCK, CHUNKS, NUM_BLOCKS, Engine
from worker.ahead import AheadRunner
from worker.attention.base import AttentionShape
from worker.attention.kv_store import store_by_index
from worker.attention.reference import ReferenceAttention
from worker.batch.rows import Rows
from worker.cuda_runner import CudaRunnerMaker, Kernels
from worker.kv_cache import KVCache, kv_cache_geometry
from worker.kv_layout import kv_layout
from worker.layers import activation, linear, norm
from worker.loader import forms, weights
from worker.model_runner import ModelRunner
from worker.models import kernel_stack
from worker.models.decoder import Decoder
from worker.models.registry import spec_of
from worker.sample.backend import ReferenceBackend
from worker.sample.device_draw import draw_by_torch
from worker.sample.sampler import Sampler

DTYPE = torch.bfloat16
HEAD_DIMS = {"llama": 64, "mistral-window": 128, "gemma3-pattern-untied": 256}


class OneAtATime:
    """A runner whose caller waits for each step."""

    def __init__(self, runner: AheadRunner) -> None:
        self._runner = runner

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self._runner.launch(step).result()


class Model:
    """A tiny model that can be loaded on any device."""

    def __init__(self, name: str, folder: Path) -> None:
        plain = CONFIGS[name]
        config = type(plain)(**plain.to_dict() | {"head_dim": HEAD_DIMS[name]})
        tiny_model(config).save_pretrained(folder)
        self.prepared = prepare_checkpoint(folder, folder / "prepared")
        self.spec = spec_of(self.prepared)

    def load(self, device: torch.device) -> Decoder:
        return weights.load_model(self.prepared, self.spec, DTYPE, device, lambda fraction: None)

    def cache(self, device: torch.device) -> KVCache:
        layout = kv_layout(self.spec.windows)
        geometry = kv_cache_geometry(layout, self.spec.num_kv_heads, self.spec.head_dim, DTYPE)
        return KVCache(geometry, layout, NUM_BLOCKS, BLOCK, device)

    def rows(self) -> Rows:
        layout = kv_layout(self.spec.windows)
        return Rows(len(CHUNKS), self.spec.max_position, BLOCK, layout.num_groups)

    def prompts(self) -> dict[int, list[int]]:
        generator = torch.Generator().manual_seed(1)
        return {
            handle: torch.randint(0, 96, (sum(chunks),), generator=generator).tolist()
            for handle, chunks in CHUNKS.items()
        }


class OnFakeCuda:
    """A runner and what it runs on."""

    def __init__(self, model: Model, cuda: FakeCuda, **settings: Any) -> None:
        self.library = FakeFlashInfer(cuda.device)
        with cuda.loading():
            decoder = model.load(CUDA)
            self.cache = model.cache(CUDA)
        self.rows = model.rows()
        self.progress: list[float] = []
        self.maker = CudaRunnerMaker(
            DeviceConfig(**settings),
            decoder,
            cuda.device,
            Kernels(lambda: self.library, store_by_index, draw_by_torch),
            Sampler(ReferenceBackend()),
            DTYPE,
        )
        self.runner = self.maker.runner(self.cache, self.rows, self.progress.append)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(weights, "ThreadPoolExecutor", InThisThread)
    # The reference on the CPU is to round as the device does: by torch alone.
    for module in (activation, norm, kernel_stack):
        monkeypatch.setattr(module, "row_kernels", lambda: None)
    for module in (linear, forms):
        monkeypatch.setattr(module, "can_pack", lambda device, dtype: False)
    with FakeCuda() as fake:
        yield fake


@pytest.fixture(params=HEAD_DIMS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return Model(request.param, tmp_path)


def reference_tokens(model: Model) -> dict[int, list[int]]:
    decoder, cache = model.load(torch.device("cpu")), model.cache(torch.device("cpu"))
    spec = model.spec
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scale)
    attention = ReferenceAttention(cache, shape)
    runner = ModelRunner(decoder, attention, Sampler(ReferenceBackend()), model.rows(), cache)
    return Engine(runner, cache).generate(model.prompts())


def test_tokens_equal_those_of_the_reference(model: Model, cuda: FakeCuda) -> None:
    worker = OnFakeCuda(model, cuda)
    engine: Any = Engine(OneAtATime(worker.runner), worker.cache)
    found = engine.generate(model.prompts())
    assert found == reference_tokens(model)
    assert cuda.device.num_replays > 30
