"""--device reference: on the host, and in the memory of a fake accelerator."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from proto.settings.config import DeviceConfig, ServeConfig
from tests.fakes import fake_device
from tests.fakes.devices import REFERENCE
from tests.fakes.fake_cuda import CUDA, FakeCuda, SameThreadExecutor
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.stepped_engine import BLOCK, CHUNKS, NUM_BLOCKS, Engine
from tests.fakes.tiny_checkpoints import save_tiny
from worker.attention.kv_cache import KVCache
from worker.batch.input_batch import InputBatch
from worker.batch.transfers import Transfers
from worker.create_device import create_device
from worker.cuda.transfers import QueuedTransfers
from worker.loader import weights
from worker.models.decoder import Decoder
from worker.plan.memory_plan import layer_cache
from worker.reference.device import ReferenceDevice
from worker.step.runner_parts import RunnerParts

pytestmark = pytest.mark.suite("devices")


class ReferenceOnAccelerator(ReferenceDevice):
    """Plain torch in the memory of a fake accelerator, which may be waited for."""

    torch_device = CUDA
    has_results = maps_tables = False

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(DeviceConfig())
        self._cuda = cuda

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=CUDA)

    def transfers(self) -> Transfers:
        return QueuedTransfers(self._cuda.device)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(weights, "ThreadPoolExecutor", SameThreadExecutor)
    monkeypatch.setattr(fake_device, "SYNCHRONIZING", ())
    with FakeCuda() as fake:
        yield fake


def generate(device: ReferenceDevice, folder: Path, cuda: FakeCuda) -> dict[int, list[int]]:
    """Load the model in a folder on a device, and generate from prompts in chunks."""
    prepared = prepare_checkpoint(folder, folder / "prepared")
    spec, dtype = spec_of(prepared), torch.float32
    with cuda.loading():
        model: Decoder = weights.load_model(prepared, spec, dtype, device, lambda fraction: None)
        layout, geometry = layer_cache(spec, dtype)
        cache = KVCache(geometry, layout, NUM_BLOCKS, BLOCK, device.zeros)
    runner = device.model_runner(
        RunnerParts(
            config=DeviceConfig(),
            model=model,
            dtype=dtype,
            kv_cache=cache,
            batch=InputBatch(len(CHUNKS), spec.max_position, BLOCK, layout.num_groups),
        )
    )
    generator = torch.Generator().manual_seed(1)
    prompts = {
        seq_id: torch.randint(0, 96, (sum(chunks),), generator=generator).tolist()
        for seq_id, chunks in CHUNKS.items()
    }
    return Engine(runner, cache).generate(prompts)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3-pattern-untied", "gptoss", "mixtral", "deepseek2", "qwen2moe"]
)
def test_steps_in_memory_of_its_own_give_the_tokens_of_the_host(
    name: str, cuda: FakeCuda, tmp_path: Path
) -> None:
    """No operation mixes tensors of host and device."""
    save_tiny(name, tmp_path)
    found = generate(ReferenceOnAccelerator(cuda), tmp_path, cuda)
    assert found == generate(REFERENCE, tmp_path, cuda)
    assert cuda.device.queued > 100


def test_it_is_selected_by_name() -> None:
    device = create_device(ServeConfig(device=DeviceConfig(device="reference")), 0)
    assert isinstance(device, ReferenceDevice)
    assert "plain torch" in device.kernels
