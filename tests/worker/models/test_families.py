"""Every family through scheduler and model runner, greedy token for token against transformers.

A request runs alone, then with others: prompts are computed in chunks, requests are preempted, the
worker is replaced while they run, and prompts come again and are found in the prefix cache. From a
Hugging Face folder on one rank and on two, and from a GGUF file. tests/e2e/test_families.py does
the same with the real daemon.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from proto.messages.prepared_model import PreparedModel
from proto.messages.scheduler_output import SchedulerOutput
from tests.e2e.reference import Reference
from tests.fakes.devices import CPU, REFERENCE
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.prepared_models import prepare_checkpoint, prepared_file
from tests.fakes.ranks import LockstepRunners, Ranks
from tests.fakes.real_engine import BLOCK, engine_for, load, runner_of
from tests.fakes.tiny_families import GENERATING, IN_GGUF_FILES, save_folder, save_gguf
from worker.host.device import HostDevice

NUM_OUTPUT_TOKENS = 12
NUM_BLOCKS = 15
"""For each group of layers: a little more than the longest request needs."""
CHUNK = 16
PROMPTS = [
    torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (23, 40, 11, 1, 30, 37)
]


def prove(harness: EngineHarness, new_runner: Callable[[], Any], reference: Reference) -> None:
    """Run the requests, and assert that each of the situations has happened."""
    steps: list[SchedulerOutput] = []

    def run(prompts: list[list[int]], death_after: int | None = None) -> tuple[int, int]:
        """Return how often requests were preempted and how many prompt tokens were cached."""
        rows = [harness.add_one(prompt, NUM_OUTPUT_TOKENS, temperature=0.0) for prompt in prompts]
        while harness.scheduler.num_unfinished:
            steps.append(harness.step_with_progress())
            if death_after and sum(len(harness.tokens_of(row)) for row in rows) >= death_after:
                harness.lose_workers(runner=new_runner())
                death_after = None
        harness.step()
        assert death_after is None, "the worker did not die"
        outputs = [harness.tokens_of(row) for row in rows]
        assert [len(output) for output in outputs] == [NUM_OUTPUT_TOKENS] * len(rows)
        reference.assert_greedy(list(zip(prompts, outputs, strict=True)))
        return sum(row.num_preemptions for row in rows), sum(row.num_cached_tokens for row in rows)

    harness.runner = new_runner()
    assert run(PROMPTS[:1]) == (0, 0)
    preemptions, _ = run(PROMPTS[1:])
    assert preemptions > 0
    chunks = [new.num_scheduled_tokens for step in steps for new in step.new_requests]
    assert max(chunks) == CHUNK < len(PROMPTS[0])
    run(PROMPTS[:2], death_after=8)
    run(PROMPTS[:1])
    _, cached = run(PROMPTS[:1])
    assert cached == (len(PROMPTS[0]) - 1) // BLOCK * BLOCK


def prove_on_one_rank(prepared: PreparedModel, model: Any, device: HostDevice = CPU) -> None:
    decoder = load(prepared, device=device)
    harness, num_blocks = engine_for(decoder, NUM_BLOCKS, max_num_batched_tokens=CHUNK)
    prove(harness, lambda: runner_of(decoder, num_blocks, device=device), Reference(model, None))


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(CPU, id="cpu"),
        pytest.param(REFERENCE, id="reference", marks=pytest.mark.suite("devices")),
    ],
)
@pytest.mark.parametrize("architecture", GENERATING)
def test_a_folder(architecture: str, device: HostDevice, tmp_path: Path) -> None:
    model = save_folder(architecture, tmp_path)
    prove_on_one_rank(prepare_checkpoint(tmp_path, tmp_path / "prepared"), model, device)


def prove_on_two_ranks(prepared: PreparedModel, model: Any, device: HostDevice = CPU) -> None:
    with Ranks(2) as ranks:
        decoders = [load(prepared, group, device) for group in ranks.groups]
        harness, num_blocks = engine_for(decoders[0], NUM_BLOCKS, max_num_batched_tokens=CHUNK)

        def new_runner() -> LockstepRunners:
            runners = [runner_of(each, num_blocks, device=device) for each in decoders]
            return LockstepRunners(ranks, runners)

        prove(harness, new_runner, Reference(model, None))


@pytest.mark.suite("families")
@pytest.mark.parametrize("architecture", GENERATING)
def test_a_folder_on_two_ranks(architecture: str, tmp_path: Path) -> None:
    model = save_folder(architecture, tmp_path)
    prove_on_two_ranks(prepare_checkpoint(tmp_path, tmp_path / "prepared"), model)


@pytest.mark.parametrize("architecture", IN_GGUF_FILES)
def test_a_gguf_file(architecture: str, tmp_path: Path) -> None:
    path, model = save_gguf(architecture, tmp_path)
    prove_on_one_rank(prepared_file(path), model)


@pytest.mark.suite("families")
@pytest.mark.parametrize("device", [CPU, REFERENCE], ids=["cpu", "reference"])
@pytest.mark.parametrize(
    "architecture", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"]
)
def test_a_gguf_file_on_two_ranks(architecture: str, device: HostDevice, tmp_path: Path) -> None:
    """Of linear attention with six value heads for the two key heads of a rank.

    Those of Qwen 3.5 are in three parts of a tensor.
    """
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 12}
    path, model = save_gguf(architecture, tmp_path, **heads)
    prove_on_two_ranks(prepared_file(path), model, device)
