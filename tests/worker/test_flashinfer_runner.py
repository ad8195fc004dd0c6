"""The model runner on the FlashInfer backend, without a GPU: tokens equal the reference's.

Tiny bfloat16 models with head sizes that the library supports. The engine of test_model_runner.py
mixes prefills and decodes and overwrites freed blocks of windows with NaN.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.devices import CPU, create_sampler
from tests.fakes.fake_device import DeviceAttentionForHost, FakeDevice, cache_on
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.stepped_engine import BLOCK, CHUNKS, NUM_BLOCKS, Engine
from tests.fakes.tiny_checkpoints import CONFIGS, tiny_model
from tests.worker.reference.torch_kernels import store_by_index
from worker.attention.backend import AttentionBackend
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.batch.input_batch import InputBatch
from worker.cuda.attention.flashinfer import FlashInferAttention
from worker.cuda.attention.flashinfer_group import Options
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.reference.attention import ReferenceAttention
from worker.step.model_runner import ModelRunner

DTYPE = torch.bfloat16
HEAD_DIMS = {"llama": 64, "mistral-window": 128, "gemma3-pattern-untied": 256}
OPTIONS = Options(capture_sizes=(1, 2, 3), capture_pages=NUM_BLOCKS * len(CHUNKS))


class Worker:
    """A runner over a cache of its own, with a choice of backends."""

    def __init__(self, decoder: Decoder) -> None:
        spec = decoder.spec
        layout = kv_layout(spec.windows)
        heads = spec.attention_shape
        geometry = kv_cache_geometry(layout, heads.num_kv_heads, heads.head_dim, DTYPE)
        self._decoder = decoder
        self.cache = KVCache(geometry, layout, NUM_BLOCKS, BLOCK)
        self.cache.buffer[1:] = float("nan")
        self.shape = spec.attention_shape
        self.rows = InputBatch(len(CHUNKS), spec.max_position, BLOCK, layout.num_groups)

    def tokens(self, backend: AttentionBackend, prompts: dict[int, list[int]]) -> Any:
        runner = ModelRunner(
            self._decoder, backend, create_sampler(), self.rows, self.cache, CPU.transfers()
        )
        runner.warm_up()
        return Engine(runner, self.cache).generate(prompts)


@pytest.fixture(params=HEAD_DIMS)
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    plain = CONFIGS[request.param]
    config = type(plain)(**plain.to_dict() | {"head_dim": HEAD_DIMS[request.param]})
    tiny_model(config).save_pretrained(tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    spec = spec_of(prepared)
    assert spec.attention_shape.head_dim == HEAD_DIMS[request.param]
    return load_model(prepared, spec, DTYPE, CPU, lambda fraction: None)


def test_tokens_equal_the_reference(decoder: Decoder) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = {
        seq_id: torch.randint(0, 96, (sum(chunks),), generator=generator).tolist()
        for seq_id, chunks in CHUNKS.items()
    }
    plain, faked = Worker(decoder), Worker(decoder)
    device = FakeDevice()
    library = FakeFlashInfer(device)
    backend = FlashInferAttention(
        cache_on(device, faked.cache),
        faked.shape,
        DTYPE,
        device,
        library,
        store_by_index,
        OPTIONS,
    )
    found = faked.tokens(DeviceAttentionForHost(device, backend), prompts)
    assert found == plain.tokens(ReferenceAttention(plain.cache, plain.shape), prompts)
    assert all(len(set(tokens)) > 5 for tokens in found.values())
    # Prefills, mixed decodes and decodes of every captured size have been planned.
    assert all(wrapper.num_plans for wrapper in library.wrappers)
