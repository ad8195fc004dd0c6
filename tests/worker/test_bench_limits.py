"""The limits benchmark times all products of the model and no others."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from proto.settings.config import CacheConfig, CpuWeights, ModelConfig, SchedulerConfig, ServeConfig
from tests.benchmarks.limits_program import LimitsWorker, measure, weight_bytes
from tests.benchmarks.messages import LimitsWorkload
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import save_tiny
from worker.cpu.device import CpuDevice
from worker.models.mlp import MlpSpec


def workload(folder: Path, name: str, form: CpuWeights) -> LimitsWorkload:
    save_tiny(name, folder)
    return LimitsWorkload(
        config=ServeConfig(
            model=ModelConfig(cpu_weights=form),
            cache=CacheConfig(kv_cache_memory=1 << 24),
            scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=3),
        ),
        model=prepare_checkpoint(folder, folder / "prepared"),
        rows=[1, 3, 32],
        prompt_tokens=12,
        rounds=2,
    )


@pytest.mark.skipif(not isinstance(CPU, CpuDevice), reason="no compiled kernels")
def test_all_products_of_a_step_are_timed(tmp_path: Path) -> None:
    """Gemma's layers have windows, hence several KV cache groups."""
    form: CpuWeights = "bf16"
    asked = workload(tmp_path, "gemma3", form)
    worker = LimitsWorker(asked.config, asked.model)
    spec = worker.loaded.model.spec
    attention, mlp = spec.attention_layers[0], spec.layers[0].mlp
    assert isinstance(mlp, MlpSpec)
    layer = [spec.hidden_size, attention.query_size, spec.hidden_size, mlp.intermediate_size]
    columns = [each for each, _ in worker.products.layers]
    assert columns == layer * spec.num_layers
    for width, linear in (*worker.products.layers, *worker.products.head):
        assert linear(torch.zeros(2, width, dtype=worker.loaded.dtype)).shape[0] == 2
    shapes = [linear(torch.zeros(1, n, dtype=worker.loaded.dtype)).shape[1] for n, linear in
              (*worker.products.layers, *worker.products.head)]  # fmt: skip
    timings = measure(worker, asked)
    numbers = sum(a * b for a, b in zip(shapes, [*columns, spec.hidden_size], strict=True))
    assert timings.weight_bytes == numbers * worker.loaded.dtype.itemsize
    assert timings.rows == [1, 3, 32]
    assert len(timings.layer_products_ms) == len(timings.head_product_ms) == 3
    assert min(*timings.layer_products_ms, *timings.head_product_ms) > 0
    assert min(timings.attention_ns_per_pair, timings.read_gb_per_s) > 0
    assert timings.weights == form
    windows = [window for _, window in timings.kv_bytes_per_token]
    assert set(windows) == set(spec.windows)
    # two prompts of 12 tokens fit into a step of 32
    assert worker.attention(asked).num_seqs == 2


class FormatMemory:
    """A weight format with the given memory by kind."""

    def __init__(self, name: str, **memory: int) -> None:
        self.name = name
        self.memory = Counter(memory)
        self.dense_names: list[str] = []

    read_product = read_ends = None  # type: ignore[assignment]


def test_a_row_reads_the_weights_of_the_first_format_once(tmp_path: Path) -> None:
    model = workload(tmp_path, "llama", "f32").model
    both = FormatMemory("packed+bf16", packed=1000, bf16=5000)
    assert weight_bytes(both, model, tied=True) == 1000  # type: ignore[arg-type]
    with_others = FormatMemory("packed", packed=1000, bf16=50)
    assert weight_bytes(with_others, model, tied=True) == 1050  # type: ignore[arg-type]
    untied = weight_bytes(with_others, model, tied=False)  # type: ignore[arg-type]
    assert 0 < untied < 1050  # an untied embedding is not multiplied
    tables = FormatMemory("f32", f32=0), FormatMemory("bf16", bf16=0)
    as_f32, as_bf16 = (weight_bytes(each, model, tied=False) for each in tables)  # type: ignore[arg-type]
    assert as_f32 == 2 * as_bf16 > 0
