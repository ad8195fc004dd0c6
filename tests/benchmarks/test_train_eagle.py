"""`python -m tests.benchmarks.train_eagle`: the head that is trained is the head that is served."""

import random
from pathlib import Path

import pytest
import torch

from tests.benchmarks import train_eagle as bench
from tests.benchmarks.train_eagle import Answer, Batches, Target, TrainedHead, questions_of
from tests.e2e.reference import packaged_model
from worker.attention.backend import AttentionInputs


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(packaged_model())


def test_training_and_serving_compute_the_same(target: Target, tmp_path: Path) -> None:
    """Every position, and the states that follow the head's own."""
    torch.manual_seed(3)
    head = TrainedHead(target)
    bench.save(head, target, tmp_path)
    prompt = target.prompt("What is tea?")
    states = target.states(prompt)
    tokens = torch.tensor([*prompt[1:], 7])
    with torch.no_grad():
        embedded = target.decoder.embed(tokens)[None].float()
        first, second = head.passes(embedded, states[None].float(), 2)
    served = target.drafting_runner(bench.NUM_BLOCKS, tmp_path).runner._drafter
    assert served is not None
    positions = torch.arange(len(tokens))
    table = torch.arange(bench.LONGEST // bench.BLOCK, dtype=torch.int32)[None].numpy()
    plan = served._attention.plan  # type: ignore[attr-defined]
    forward = served._head.forward  # type: ignore[attr-defined]

    def run(at: slice, features: torch.Tensor) -> torch.Tensor:
        found = positions[at]
        ends = (int(found[0]), int(found[-1]) + 1)
        starts, lens = (
            torch.tensor(values, dtype=torch.int32).numpy()
            for values in ([0, len(found)], [ends[1]])
        )
        plan([AttentionInputs(starts, lens, table, found.numpy())])
        result: torch.Tensor = forward(
            tokens[at],
            features,
            found,
            served._attention,  # type: ignore[attr-defined]
        )
        return result

    states_of_head = run(slice(None), states)
    assert torch.cosine_similarity(states_of_head.float(), first[0]).min() > 0.999
    last = run(slice(len(tokens) - 1, None), states_of_head[-2:-1])
    assert torch.cosine_similarity(last.float(), second[0, -1:]).min() > 0.999


def test_positions_that_count_give_tokens_of_the_answer() -> None:
    class States:
        def states(self, token_ids: list[int]) -> torch.Tensor:
            return torch.tensor(token_ids, dtype=torch.bfloat16)[:, None]

    answers = [Answer([10, 11, 12, 20, 21, 22], 3), Answer([13, 14, 23], 2), Answer([15], 1)]
    batches = Batches(States(), answers, 2)  # type: ignore[arg-type]
    ((tokens, states, counts),) = batches.epoch(random.Random(0))
    found = sorted(zip(states[counts][:, 0].tolist(), tokens[counts].tolist(), strict=True))
    # The state behind is known, and gives the token after the next one.
    assert found == [(11, 12), (12, 20), (13, 14), (20, 21)]


def test_questions_held_out_are_about_other_subjects() -> None:
    subjects = bench.SUBJECTS
    assert len(set(subjects)) == len(subjects)
    trained, held_out = (
        set(questions_of(part))
        for part in (subjects[: -bench.HELD_OUT], subjects[-bench.HELD_OUT :])
    )
    assert not trained & held_out
    assert min(len(trained), len(held_out)) > 100


def test_a_head_is_trained_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In seconds: it learns nothing that is worth a figure."""
    words = ["--questions", "6", "--max-tokens", "8", "--minutes", "0.05", "--measured", "3"]
    bench.main([*words, "--folder", str(tmp_path)])
    output = capsys.readouterr().out
    assert "tokens of 6 answers" in output
    assert "temperature 0.8" in output
    assert "tokens a step" in output
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
