"""Python calls of a worker's decode step, counted."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from proto.messages.scheduler_output import SchedulerOutput
from tests.benchmarks.logit_digests import Form, load, make_folder
from tests.fakes.fake_cuda_step import all_tokens_allowed, build_runner, watched
from tests.fakes.real_engine import runner_of
from tests.fakes.step_messages import StepMessages
from tests.python_calls import check_calls, counted_calls, same_version
from worker.cpu.kernels import Kernels

pytestmark = same_version


def calls_of_decode(execute: Any, steps: StepMessages, num_rows: int) -> Counter[str]:
    """Return the calls of the third decode of prompts."""

    def run(step: SchedulerOutput) -> None:
        execute(step)

    run(steps.next_step({seq_id: range(5) for seq_id in range(1, num_rows + 1)}))
    for _ in range(2):
        run(steps.next_step())
    step = steps.next_step()
    with counted_calls() as calls:
        run(step)
    return calls


@pytest.mark.parametrize(
    ("form", "how"),
    [
        (Form("bf16"), "one call of all layers"),
        (Form("f32", torch.float32), "layer by layer"),
    ],
    ids=str,
)
def test_a_decode_on_a_cpu(form: Form, how: str, kernels: Kernels, tmp_path: Path) -> None:
    decoder = load(make_folder("llama", tmp_path), form)
    runner = runner_of(decoder, 40, kv_dtype=form.dtype)
    calls = calls_of_decode(runner.execute, StepMessages(1, 8), 4)
    check_calls(f"worker on a CPU: a decode of 4 rows, {how}", calls)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_decode_on_a_gpu() -> None:
    with watched() as watch:
        runner, _, cache, _ = build_runner(watch, "llama")
        with watch:
            calls = calls_of_decode(
                lambda step: runner.launch(step, all_tokens_allowed).result(),
                StepMessages(cache.layout.num_groups, 8),
                2,
            )
    check_calls("worker on a GPU: a decode of 2 rows", calls)
