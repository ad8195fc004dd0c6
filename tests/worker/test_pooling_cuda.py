"""Pooling on a simulated GPU, through scheduler and runner, against transformers in float32.

The fake device refuses calls that would wait for it, and the fake FlashInfer a violated contract.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from proto import PROTOCOL_VERSION
from proto.messages.lifecycle import CacheReady, InitializeCache, Shutdown, WorkerReady
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.pooling import PoolingParams
from proto.messages.prepared_model import PreparedModel
from proto.messages.scheduler_output import CachedRequestData
from proto.settings.config import DeviceConfig, ModelConfig, ServeConfig
from tests.fakes.adapters import Served, make_adapter, merged
from tests.fakes.cuda_runner import compute_by_torch, gpu_of
from tests.fakes.devices import GPU
from tests.fakes.fake_cuda import FakeCuda, SlotsWithoutTriton
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_ragged_wrapper import FakeRagged
from tests.fakes.pooling_engine import PoolingEngine, prepare
from tests.fakes.real_engine import BLOCK
from tests.fakes.stepped_engine import new_request
from tests.fakes.tiny_encoders import save_encoder
from tests.fakes.tiny_pooling import hidden_states, pooled, save_causal, save_modules
from tests.worker.adapters.test_steps import Adapting, prompts
from tests.worker.test_cuda_service import Running, scheduler_output
from worker.attention.kv_cache import KVCache
from worker.batch.input_batch import InputBatch
from worker.cuda.runner_builder import build_runner
from worker.loader.weights import load_model
from worker.plan.memory_plan import layer_cache
from worker.step.pooling import PoolingHead, PoolingRunner
from worker.step.runner_parts import RunnerParts

BF16 = torch.bfloat16
PROMPTS = [
    torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (23, 40, 11, 1, 57)
]
ALIKE = 0.99
"""Cosine of a vector in bfloat16 and in float32, of random weights."""


class CudaPoolingEngine(PoolingEngine):
    """A PoolingEngine whose runner is on a fake CUDA device, in bfloat16.

    paths: of adapters 1, 2 …
    """

    def __init__(
        self,
        prepared: PreparedModel,
        cuda: FakeCuda,
        config: ModelConfig | None = None,
        paths: Sequence[Path] = (),
    ) -> None:
        self._cuda = cuda
        self._paths = paths
        self._config = ServeConfig(model=config or ModelConfig())
        self.library = FakeFlashInfer(cuda.device)
        super().__init__(prepared, config or ModelConfig())

    def new_runner(self) -> PoolingRunner:
        spec, cuda = self.decoder.spec, self._cuda
        accelerator: Any = cuda.device
        with cuda.loading():
            step = SlotsWithoutTriton(lambda: accelerator)
            served = None
            if self._paths:
                served = Served(self.prepared, BF16, device=GPU, config=self._config, step=step)
            decoder = (
                load_model(self.prepared, spec, BF16, GPU, lambda part: None)
                if served is None
                else served.decoder
            )
            layout, geometry = layer_cache(spec, BF16)
            cache = KVCache(geometry, layout, self.num_blocks, BLOCK, GPU.zeros)
        for number, path in enumerate(self._paths, 1):
            assert served is not None
            served.load(path, number)
        parts = RunnerParts(
            config=DeviceConfig(),
            model=decoder,
            adapters=served and served.store,
            dtype=BF16,
            kv_cache=cache,
            batch=InputBatch(64, spec.max_position, BLOCK, layout.num_groups),
            pooling_head=PoolingHead.load(self.pooler, self.prepared),
        )
        runner = build_runner(gpu_of(cuda, self.library), parts)
        return runner._runner  # type: ignore[return-value]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    compute_by_torch(monkeypatch)
    with FakeCuda() as fake:
        yield fake


def alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(F.cosine_similarity(found, wanted, dim=0) > ALIKE)


@pytest.mark.parametrize("name", ["bert", "modernbert", "embedding gemma"])
def test_embeddings_of_encoders(name: str, cuda: FakeCuda, tmp_path: Path) -> None:
    """Attention reads no page; windows, narrow heads, and texts of one token among others."""
    folder = tmp_path / "model"
    model = save_encoder(name, folder)
    save_modules(folder, model.config.hidden_size, "mean_tokens")
    engine = CudaPoolingEngine(prepare(folder), cuda)
    requests = [engine.add(prompt) for prompt in PROMPTS]
    tokens = engine.add(PROMPTS[0], task="token_embed")
    engine.harness.run()
    assert all(isinstance(each, FakeRagged) for each in engine.library.wrappers)
    for request in requests:
        with torch.inference_mode():
            hidden = model(torch.tensor([request.prompt_token_ids])).last_hidden_state[0]
        assert alike(engine.result(request), pooled(hidden, "mean_tokens"))
    with torch.inference_mode():
        hidden = model(torch.tensor([PROMPTS[0]])).last_hidden_state[0]
    found = engine.result(tokens).view(len(PROMPTS[0]), -1)
    assert (F.cosine_similarity(found, hidden) > ALIKE).all()


def test_embeddings_with_adapters(cuda: FakeCuda, tmp_path: Path) -> None:
    """Of prompts in chunks, beside one without an adapter."""
    folder = tmp_path / "model"
    model = save_causal(folder)
    save_modules(folder, model.config.hidden_size, "lasttoken")
    paths = [make_adapter(model, tmp_path / f"a{seed}", seed, r=4 * seed) for seed in (1, 2)]
    engine = CudaPoolingEngine(prepare(folder), cuda, paths=paths)
    requested = prompts((1, 0, 2, 1, 2))
    engine.harness.runner = Adapting(engine.harness.runner, requested)  # type: ignore[assignment]
    requests = [engine.add(prompt) for prompt, _ in requested]
    engine.harness.run()
    models = [model, *(merged(model, path) for path in paths)]
    for request, (prompt, number) in zip(requests, requested, strict=True):
        wanted, plain = (
            pooled(hidden_states(one, prompt), "lasttoken") for one in (models[number], model)
        )
        assert alike(engine.result(request), wanted)
        assert number == 0 or not alike(plain, wanted), "it is not visible"


def test_scores_of_pairs(cuda: FakeCuda, tmp_path: Path) -> None:
    """Token types belong to their tokens, although sequences of one token come first."""
    folder = tmp_path / "model"
    model = save_encoder("bert", folder, num_labels=3)
    engine = CudaPoolingEngine(prepare(folder), cuda)
    requests = [engine.add(prompt, task="classify", second_start=9) for prompt in PROMPTS]
    engine.harness.run()
    for request in requests:
        types = torch.zeros(1, len(request.prompt_token_ids), dtype=torch.long)
        types[:, 9:] = 1
        with torch.inference_mode():
            logits = model(torch.tensor([request.prompt_token_ids]), token_type_ids=types).logits[0]
        assert torch.allclose(engine.result(request), logits.softmax(0), atol=0.05)


@pytest.mark.parametrize("kind", ["lasttoken", "mean_tokens"])
def test_embeddings_of_a_causal_model(kind: str, cuda: FakeCuda, tmp_path: Path) -> None:
    """By paged attention, in chunks, beside others and with a cached prefix."""
    folder = tmp_path / "model"
    model = save_causal(folder, head_dim=64)
    save_modules(folder, model.config.hidden_size, kind)
    engine = CudaPoolingEngine(prepare(folder), cuda)
    requests = [engine.add(prompt) for prompt in PROMPTS[:4]]
    engine.harness.run()
    requests.append(engine.add(PROMPTS[2]))
    engine.harness.run()
    for request in requests:
        wanted = pooled(hidden_states(model, request.prompt_token_ids), kind)
        assert alike(engine.result(request), wanted)


def test_a_score_is_the_difference_of_two_logits(cuda: FakeCuda, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = save_causal(folder, with_head=True, head_dim=64)
    config = ModelConfig(pooler_config='{"true_token_id": 7, "false_token_id": 5}')
    engine = CudaPoolingEngine(prepare(folder), cuda, config)
    requests = [engine.add(prompt, task="classify") for prompt in PROMPTS[:4]]
    engine.harness.run()
    for request in requests:
        with torch.inference_mode():
            logits = model(torch.tensor([request.prompt_token_ids])).logits[0, -1]
        wanted = (logits[7] - logits[5]).sigmoid()
        assert abs(engine.result(request)[0] - wanted) < 0.05


class _Folder:
    """What Running wants of a model."""

    def __init__(self, prepared: PreparedModel) -> None:
        self.prepared = prepared


def test_a_worker_of_an_encoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It sizes its memory by the largest step, and computes no step before the one before."""
    folder = tmp_path / "model"
    model = save_encoder("modernbert", folder)
    save_modules(folder, model.config.hidden_size, "mean_tokens")
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        made: Any = _Folder(prepare(folder))
        running = Running(made, run_dir, monkeypatch, step_tokens=None)
        ready = running.expect(WorkerReady)
        assert not ready.computes_ahead
        assert not ready.kv_cache_bytes
        running.engine.send(InitializeCache(PROTOCOL_VERSION, 1, 2, BLOCK, 128))
        running.expect(CacheReady)
        request = msgspec.structs.replace(
            new_request(1, PROMPTS[0], [[]], len(PROMPTS[0])),
            pooling_params=PoolingParams(task="embed", needs_all_tokens=True),
        )
        nothing = CachedRequestData([], [], [], [], [], [])
        running.engine.send(scheduler_output(1, [request], nothing, len(PROMPTS[0])))
        (row,) = running.expect(ModelRunnerOutput).pooler_outputs
        running.supervisor.send(Shutdown())
        running.thread.join(60)
        running.supervisor.close()
        running.engine.close()
    with torch.inference_mode():
        hidden = model(torch.tensor([PROMPTS[0]])).last_hidden_state[0]
    found = torch.from_numpy(np.frombuffer(row.data, "<f4").copy())
    assert alike(found, pooled(hidden, "mean_tokens"))
