"""The scheduler benchmark: JSON output, comparison with a peer, and errors."""

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks import scheduler
from tests.benchmarks.command import run
from tests.benchmarks.scheduler import all_workloads

FIELDS = {
    "workload",
    "schedule_us_median",
    "schedule_us_p99",
    "update_us_median",
    "update_us_p99",
    "encode_us_median",
    "decode_us_median",
    "wire_bytes_median",
}


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def bench(*words: str) -> int:
    return run(scheduler.main, words)


def test_json_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert bench("decode16", "hash1k", "--rounds", "1", "--json", str(file)) == 0
    hashing, decode = json.loads(file.read_text())
    assert (hashing["workload"], decode["workload"]) == ("hash1k", "decode16")
    assert hashing.keys() >= FIELDS
    assert all(decode[name] for name in FIELDS)
    assert decode["num_scheduled"] == 16
    assert hashing["hash_us_median"] > 0
    assert hashing["schedule_us_median"] is None
    assert decode["peer"] is None
    assert "decode16" in capsys.readouterr().out


def test_live_views_are_not_part_of_the_step_time(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert bench("full64", "full64-watched", "--rounds", "1", "--json", str(file)) == 0
    alone, watched = json.loads(file.read_text())
    assert alone["view_us_median"] is None
    assert watched["view_us_median"] > 0
    assert alone["num_scheduled"] == watched["num_scheduled"] == 64


def test_a_peer_runs_the_same_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The peer is a second copy of our own program."""
    peer = program(
        tmp_path / "python", f"exec {sys.executable} -m tests.benchmarks.scheduler_program"
    )
    file = tmp_path / "rows.json"
    assert bench("decode16", "--rounds", "2", "--peer-python", peer, "--json", str(file)) == 0
    (row,) = json.loads(file.read_text())
    assert row["rounds"] == 2
    assert row["peer"]["num_scheduled"] == 16
    assert row["ratio"] > 0
    assert "beside vLLM's own scheduler" in capsys.readouterr().out


def test_documented_rows_exist() -> None:
    names = [each.name for each in all_workloads()]
    assert names[:2] == ["decode256", "decode1024"]
    assert {"mixed", "preempt", "prefix32k", "hash1k", "waiting10000", "blocks1000000"} < set(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["decode25"], "there is no workload 'decode25'; there are: decode256"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--rounds", "few"], "invalid int value: 'few'"),
        (["--pear-python", "x"], "unrecognized arguments: --pear-python"),
        (["--json", "/nowhere/rows.json"], "--json /nowhere/rows.json: No such file"),
    ],
)
def test_usage_errors_are_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_a_failing_peer_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer = program(tmp_path / "python", "exit 3")
    assert bench("hash1k", "--peer-python", peer) == 1
    assert "ended while it measured hash1k" in capsys.readouterr().err
    assert bench("hash1k", "--peer-python", str(tmp_path / "none")) == 1
    assert "No such file" in capsys.readouterr().err
