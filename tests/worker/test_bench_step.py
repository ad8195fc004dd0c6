"""The step benchmark measures steps of a real worker."""

from pathlib import Path

import torch

from proto.settings.config import CacheConfig, ModelConfig, SchedulerConfig, ServeConfig
from tests.benchmarks.messages import StepWorkload
from tests.benchmarks.steps_program import BenchWorker, Steps, measure
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import save_tiny


def test_all_parts_of_a_step_are_timed(tmp_path: Path) -> None:
    """Gemma's layers have windows, hence several block tables, and norms after their products."""
    save_tiny("gemma3", tmp_path)
    workload = StepWorkload(
        config=ServeConfig(
            model=ModelConfig(dtype="float32"),
            cache=CacheConfig(kv_cache_memory=1 << 24),
            scheduler=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=3),
        ),
        model=prepare_checkpoint(tmp_path, tmp_path / "prepared"),
        num_rows=3,
        context_tokens=40,
        warm_up_steps=1,
        measured_steps=3,
    )
    worker = BenchWorker(workload.config, workload.model)
    steps = Steps(worker, workload)
    answers = [steps.run_decodes() for _ in range(4)]
    for answer in answers:
        assert answer.seq_ids == [0, 1, 2]
        assert len({tuple(tokens) for tokens in answer.sampled_token_ids}) == 1
    timings = measure(worker, workload)
    assert timings.num_rows == 3
    assert timings.num_steps == 3
    assert timings.num_threads == torch.get_num_threads()
    assert min(timings.product_ms_median, timings.attention_ms_median, timings.rest_ms_min) > 0
    assert timings.step_ms_min <= timings.step_ms_median <= timings.step_ms_p99
