"""What is measured as a limit is the model's own work: all of its products, and no other."""

import tempfile
from pathlib import Path

import pytest
import torch

from proto.benchmark import LimitsWorkload
from proto.config import CacheConfig, CpuWeights, ModelConfig, SchedulerConfig, ServeConfig
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import save_tiny
from worker.bench_limits import LimitsWorker, measure, weight_bytes


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


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("form", ["f32", "bf16"])
def test_all_products_of_a_step_are_timed(name: str, form: CpuWeights, tmp_path: Path) -> None:
    asked = workload(tmp_path, name, form)
    with tempfile.TemporaryDirectory() as run_dir:
        worker = LimitsWorker(asked, run_dir)
        spec = worker._model.spec
        layer = [spec.hidden_size, spec.query_size, spec.hidden_size, spec.intermediate_size]
        columns = [each for each, _ in worker.products.layers]
        assert columns == layer * spec.num_layers
        for width, linear in (*worker.products.layers, *worker.products.head):
            assert linear(torch.zeros(2, width, dtype=worker.dtype)).shape[0] == 2
        shapes = [linear(torch.zeros(1, n, dtype=worker.dtype)).shape[1] for n, linear in
                  (*worker.products.layers, *worker.products.head)]  # fmt: skip
        timings = measure(worker, asked)
    numbers = sum(a * b for a, b in zip(shapes, [*columns, spec.hidden_size], strict=True))
    assert timings.weight_bytes == numbers * worker.dtype.itemsize
    assert timings.rows == [1, 3, 32]
    assert len(timings.layer_products_ms) == len(timings.head_product_ms) == 3
    assert min(*timings.layer_products_ms, *timings.head_product_ms) > 0
    assert min(timings.attention_ns_per_pair, timings.read_gb_per_s) > 0
    assert timings.weights == form
    windows = [window for _, window in timings.kv_bytes_per_token]
    assert set(windows) == set(spec.windows)
    # as many prompts of 12 tokens as a step of 32 has room for
    assert worker.attention(asked).num_seqs == 2


def test_few_rows_read_the_first_of_two_forms(tmp_path: Path) -> None:
    asked = workload(tmp_path, "llama", "f32")
    as_float, as_bf16, as_int8 = (
        weight_bytes(asked.model, form, tied=False) for form in ("f32", "bf16", "int8+bf16")
    )
    assert as_float == 2 * as_bf16
    assert as_int8 == pytest.approx(as_bf16 * 17 / 32, abs=32)
