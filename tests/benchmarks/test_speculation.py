"""`python -m tests.benchmarks.speculation`: its requests, its table and usage errors."""

import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from rich.console import Console

from tests.benchmarks import speculation
from tests.benchmarks.command import run
from tests.benchmarks.cycles_model import CYCLE, _one_hot, _signs, successor
from tests.benchmarks.speculation import CYCLE_KINDS, KINDS, MakeRequest


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [*((KINDS, kind) for kind in KINDS), *((CYCLE_KINDS, kind) for kind in CYCLE_KINDS)],
)
def test_requests_are_greedy_and_differ(kinds: dict[str, MakeRequest], kind: str) -> None:
    """So that answers can be compared, and no request repeats another one by chance."""
    generator = random.Random(1)
    requests = [kinds[kind](generator) for _ in range(8)]
    assert all(each.checked and each.output_tokens >= 128 for each in requests)
    assert len({json.dumps(each.content) for each in requests}) == 8


def test_an_edit_has_the_file_in_its_prompt() -> None:
    prompt = speculation.edit_request(random.Random(3)).content["prompt"]
    text = prompt.partition("```python\n")[2].partition("\n```")[0]
    assert len(text.splitlines()) >= 39
    assert any(
        text in path.read_text() for path in (speculation.ROOT / "engine_core").rglob("*.py")
    )


def test_an_edit_in_cycles_has_most_of_its_answer_in_the_prompt() -> None:
    *old, first = speculation.edit_in_cycles(random.Random(3)).content["prompt"]
    answer = [successor(first, steps) for steps in range(1, 257)]
    equal = [a == b for a, b in zip(old[1:], answer, strict=True)]
    assert 200 < sum(equal) < 256
    assert successor(2 * CYCLE - 1) == CYCLE


def test_the_blocks_of_signs_are_those_of_the_file_format() -> None:
    signs = np.random.default_rng(1).integers(-1, 2, (3, 512)).astype(np.int8)
    six_bits = quants.dequantize(_signs(signs, 0.5).reshape(3, -1), GGMLQuantizationType.Q6_K)
    assert (six_bits == signs * 0.5).all()
    four_bits = quants.dequantize(_one_hot(signs).reshape(3, -1), GGMLQuantizationType.Q4_K)
    assert (four_bits == signs * 8).all()


def test_the_table_has_ratios_to_the_daemon_without_drafts() -> None:
    rows = [
        {
            "kind": "edit",
            "concurrency": 1,
            "different": 0,
            "tokens_per_s": {"off": 100.0, "on": on},
            "token_ms": {"off": 8.0, "on": 2.0},
        }
        for on in (150.0, 250.0)
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(speculation._table(rows, ["off", "on"]))
    (line,) = [each for each in console.export_text().splitlines() if "edit" in each]
    cells = [each.strip() for each in line.strip("│ ").split("│")]
    assert cells == ["edit", "1", "100", "200", "8.00", "2.00", "0.25", "2.00", "0"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--kinds", "edit,poem"], "--kinds: invalid _kinds value: 'edit,poem'"),
        (["--concurrency", "0"], "--concurrency: invalid several_counts value: '0'"),
        (["--json", "/nowhere/rows.json"], "/nowhere/rows.json"),
    ],
)
def test_usage_errors_are_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(speculation.main, words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_json_output(tmp_path: Path) -> None:
    """Two daemons with the packaged model: the same answers, figures of both."""
    file = tmp_path / "rows.json"
    words = ["--kinds", "chat", "--concurrency", "2", "--json", str(file)]
    assert run(speculation.main, [*words, "--", "--kv-cache-memory", "256M"]) == 0
    (row,) = json.loads(file.read_text())
    assert (row["kind"], row["concurrency"], row["requests"]) == ("chat", 2, 4)
    assert row["different"] == 0
    assert set(row["token_ms"]) == {"off", "on"}
    assert all(value > 0 for value in row["tokens_per_s"].values())
