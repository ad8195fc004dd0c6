"""The simulated grid of agents: cells, additional requests, and a resumed run."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import agents
from tests.benchmarks.command import run
from tests.benchmarks.line_program import LineProgram

WORDS = ["--jobs", "2", "--seeds", "3,4", "--policies", "fcfs,rule+host", "--processes", "2"]


def bench(file: Path, *words: str) -> dict:
    assert run(agents.main, [*WORDS, "--json", str(file), *words]) == 0
    return json.loads(file.read_text())


def test_a_grid_is_measured_and_reproducible(tmp_path: Path, capsys) -> None:
    place = ["--pools", "500", "--rates", "90"]
    found = bench(tmp_path / "first.json", *place)
    cells = found["cells"]
    assert [(each["seed"], each["pool_percent"], each["variant"]) for each in cells] == [
        (seed, 500, name) for seed in (3, 4) for name in ("fcfs", "rule+host")
    ]
    measured = {each["seed"]: each for each in found["measured"]}
    for each in cells:
        base = measured[each["seed"]]
        assert each["num_blocks"] == base["working_set_blocks"] * each["pool_percent"] // 100 + 1
        assert each["jobs_per_s"] == pytest.approx(0.9 * base["capacity_jobs_per_s"])
        assert each["job_s_p99"] >= each["job_s_mean"] > 0
    base_turns = {seed: each["num_requests"] for seed, each in measured.items()}
    for plain, host in zip(cells[::2], cells[1::2], strict=True):
        assert plain["ratio_mean"] == 1.0
        assert host["ratio_mean"] == pytest.approx(plain["job_s_mean"] / host["job_s_mean"])
        assert host["found_percent"] >= plain["found_percent"]
        assert host["pins_taken"] == base_turns[plain["seed"]] - 2
    assert measured[3] != measured[4]
    shown = capsys.readouterr().out
    assert "capacity, jobs/s" in shown
    assert "rule+host" in shown
    again = bench(tmp_path / "again.json", *place, "--seeds", "4", "--processes", "1")
    assert again["cells"] == [each for each in cells if each["seed"] == 4]
    assert again["measured"] == [measured[4]]


def test_other_requests_are_measured_separately(tmp_path: Path, capsys) -> None:
    place = ["--pools", "500", "--rates", "90", "--seeds", "3", "--policies", "fcfs"]
    alone = bench(tmp_path / "alone.json", *place)
    found = bench(tmp_path / "beside.json", *place, "--others", "2")
    assert found["grid"]["others"] == 2.0
    assert found["cells"][0]["other_s_mean"] > 0 == alone["cells"][0]["other_s_mean"]
    measured, before = found["measured"][0], alone["measured"][0]
    assert measured["num_requests"] == before["num_requests"] + 2 * 2
    assert measured["capacity_jobs_per_s"] < before["capacity_jobs_per_s"]
    assert "others" in capsys.readouterr().out


def test_an_interrupted_grid_is_resumed(tmp_path: Path, monkeypatch, capsys) -> None:
    place = ["--pools", "500", "--rates", "90", "--seeds", "3"]
    ledger = tmp_path / "replays.jsonl"
    first = bench(tmp_path / "first.json", *place, "--ledger", str(ledger))
    lines = ledger.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4  # capacity, working set, two policies
    ledger.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    played = []
    play = LineProgram.play

    def count(self, order, *rest):
        played.append(order)
        return play(self, order, *rest)

    monkeypatch.setattr(LineProgram, "play", count)
    assert bench(tmp_path / "again.json", *place, "--ledger", str(ledger)) == first
    assert len(played) == 1
    finished = ["--ledger", str(ledger), "--finished"]
    more = ["--pools", "500,1000", *place[2:]]
    assert bench(tmp_path / "known.json", *more, *finished)["cells"] == first["cells"]
    capsys.readouterr()
    bench(tmp_path / "known.json", *more, *finished, "--markdown")
    heading, _, *rows = capsys.readouterr().out.split("\n")[-5:-1]
    assert heading.startswith("| pool | arrivals | policy | mean |")
    assert [each.split(" | ")[2] for each in rows] == ["fcfs", "rule+host"]
    assert len(played) == 1
    assert sorted(ledger.read_bytes().splitlines(keepends=True)) == sorted(lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ledger", "."], "--ledger: .: Is a directory"),
        (["--ledger", "pyproject.toml"], "--ledger: pyproject.toml is no file of replays"),
        (["--finished"], "the ledger has no capacity of this load"),
        (["--policies", "fcfs,best"], "there is no 'best'"),
        (["--pools", "0"], "--pools"),
        (["--steps-of", "none.jsonl"], "none.jsonl: No such file"),
        (["--turns", "3"], "unrecognized arguments: --turns"),
    ],
)
def test_invalid_arguments_are_refused(words: list[str], message: str, capsys) -> None:
    assert run(agents.main, ["--jobs", "2", "--policies", "fcfs", *words]) != 0
    assert message in capsys.readouterr().err
