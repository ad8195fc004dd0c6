"""`python -m tests.benchmarks.simulator.replay`: the command, its table and its errors."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.command import run
from tests.benchmarks.simulator import replay as replay_bench
from tests.benchmarks.simulator.replay import POLICIES
from tests.fakes.traced_engine import TracedEngine, random_load


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> str:
    engine = TracedEngine(24)
    random_load(7, engine)
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    path.write_bytes(engine.content)
    return str(path)


def replay(*words: str) -> int:
    return run(replay_bench.main, words)


def test_policies_in_a_table_and_as_json(trace: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "figures.json"
    assert replay(trace, "--policy", ",".join(POLICIES), "--json", str(file)) == 0
    rows = json.loads(file.read_text())
    assert [each["policy"] for each in rows] == list(POLICIES)
    for row in rows:
        assert row["jobs"]["p99"] >= row["jobs"]["p50"] > 0
        assert row["ttft"]["mean"] <= row["completion"]["mean"]
        assert 0 < row["hit_rate"] < 1
    table = capsys.readouterr().out
    for word in (*POLICIES, "job, mean", "first token, p99", "preemptions", "prefix cache hits"):
        assert word in table


def test_a_trace_is_followed(trace: str, tmp_path: Path, capsys) -> None:
    assert replay(trace, "--verify") == 0
    assert "are the same" in capsys.readouterr().out
    other = tmp_path / "other.jsonl"
    text = Path(trace).read_text().replace('"num_blocks":24', '"num_blocks":400')
    other.write_text(text)
    assert replay(str(other), "--verify") == 1
    assert "then they differ: step " in capsys.readouterr().out


def test_drawn_jobs_and_the_trace_of_their_replay(tmp_path: Path, capsys) -> None:
    tape = tmp_path / "tape.jsonl"
    words = ["--synthetic", "--jobs", "3", "--seed", "4", "--step-ms", "5,0.1,0,0"]
    assert replay(*words, "--policy", "continuum", "--pin-policy", "fixed") == 0
    assert replay(*words, "--record", str(tape)) == 0
    assert "of 3 jobs" in capsys.readouterr().out.replace("\n", " ")
    assert replay(str(tape), "--verify") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either a FILE or --synthetic"),
        (["a.jsonl", "--synthetic"], "either a FILE or --synthetic"),
        (["--synthetic"], "--synthetic needs --step-ms"),
        (["a.jsonl", "--policy", "fcfs,best"], "there is no policy 'best'"),
        (["none.jsonl"], "none.jsonl: No such file"),
        (["a.jsonl", "--step-ms", "1,2"], "--step-ms"),
        (["a.jsonl", "--policy", "fcfs,priority", "--record", "b.jsonl"], "--record takes one"),
    ],
)
def test_invalid_arguments_are_refused(words: list[str], message: str, capsys) -> None:
    assert replay(*words) == 2
    assert message in capsys.readouterr().err
