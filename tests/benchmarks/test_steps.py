"""`python -m tests.benchmarks.steps`: JSON output and usage errors."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import steps
from tests.benchmarks.command import run
from tests.fakes.tiny_checkpoints import save_tiny
from tests.fakes.tiny_model_files import tokenizer_json


def bench(*words: str) -> int:
    return run(steps.main, words)


def test_json_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tiny("llama", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes(tokenizer_json())
    file = tmp_path / "rows.json"
    words = ("--rows", "1,3", "--context", "40", "--steps", "4", "--json", str(file))
    flags = ("--max-num-batched-tokens", "16", "--max-num-seqs", "4", "--kv-cache-memory", "64M")
    assert bench(*words, "--temperature", "0.8", "--", str(tmp_path / "model"), *flags) == 0
    rows = json.loads(file.read_text())
    assert [each["num_rows"] for each in rows] == [1, 3]
    for row in rows:
        assert row["num_steps"] == 4
        parts = [row["product_ms_median"], row["attention_ms_median"], row["rest_ms_median"]]
        assert all(part > 0 for part in parts)
        assert 0 < row["rest_share_median"] < 1
        assert row["step_ms_min"] <= row["step_ms_median"] <= row["step_ms_p99"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rows", "0"], "--rows: invalid _counts value: '0'"),
        (["--rows", "4,900"], "--rows: at most 256 sequences (--max-num-seqs)"),
        (["--steps", "few"], "invalid at_least_one value: 'few'"),
        (["--json", "/nowhere/rows.json"], "--json /nowhere/rows.json: No such file"),
        (["--", "--max-num-sets", "3"], "unknown flag --max-num-sets"),
    ],
)
def test_usage_errors_are_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
