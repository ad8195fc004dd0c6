"""Comparison of servers: order of the runs, and figures over rounds."""

import json
import math
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy import cli
from deploy.bench import compare
from deploy.bench.compare import CompareBench, ComparedFigure, Comparison, round_ratios, specs_of
from deploy.bench.options import BenchParser
from deploy.bench.servers import RunningServer, ServerSpec
from proto.errors import ConfigError
from tests.fakes.openai_server import FakeOpenAI, fake_openai

SMALL = (
    *("--input-tokens", "6", "--output-tokens", "3", "--alone", "1", "--alone-input-tokens", "5"),
    *("--concurrency", "2", "--requests", "3", "--warm-ups", "1", "--checks", "2"),
)


def bench_of(*words: str) -> CompareBench:
    parser = BenchParser()
    compare.add_flags(parser)
    options = parser.parse_args(words)
    return CompareBench(options, specs_of(options))


def test_servers_are_compared_round_by_round() -> None:
    """The second round was slow for both servers: figures differ by half, ratios do not."""
    figure = ComparedFigure("x_ms", "x")
    comparison = Comparison(["ours", "theirs"], [figure])
    for number, (ours, theirs) in enumerate([(9.0, 10.0), (18.0, 20.0), (12.0, 10.0)]):
        comparison.note_turn(number, "ours", {"x_ms": ours})
        comparison.note_turn(number, "theirs", {"x_ms": theirs})
    ratios = comparison.ratios(figure, "theirs")
    assert ratios == pytest.approx({"median": 0.9, "min": 0.9, "max": 1.2})
    assert comparison.median("ours", figure) == 12.0
    console = Console(file=StringIO(), width=150)
    comparison.show(console, "title")
    assert "0.900 (0.900 to 1.200)" in console.file.getvalue()


def test_rounds_without_a_figure_are_skipped() -> None:
    ratios = round_ratios([1.0, math.nan, 3.0], [2.0, 1.0, math.nan])
    assert ratios == {"median": 0.5, "min": 0.5, "max": 0.5}
    assert round_ratios([math.nan], [1.0]) == {}
    comparison = Comparison(["a", "b"], [ComparedFigure("x", "x")])
    comparison.note_turn(0, "a", {})
    comparison.note_turn(0, "b", {"x": 1})
    figures = comparison.to_dict()["figures"]
    assert isinstance(figures, dict)
    assert figures["x"] == {"medians": {"a": None, "b": 1.0}, "ratios": {"a / b": {}}}


def test_the_longest_gaps_are_relative_to_the_median() -> None:
    gaps = {"itl_ms_p50": 20.0, "itl_ms_p99": 50.0}
    assert compare.with_gap_ratio(gaps) == {**gaps, "itl_p99_of_p50": 2.5}
    for none in ({}, {"itl_ms_p50": 0.0, "itl_ms_p99": 0.0}):  # one token, or all tokens at once
        assert compare.with_gap_ratio(none) == none


def prompts(fake: FakeOpenAI) -> list[str]:
    """Return the requests without the warm-up."""
    return [str(body["prompt"]) for _, body in fake.seen if body["max_tokens"] == 3]


def test_servers_alternate_with_the_same_new_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    with fake_openai() as one, fake_openai() as other:
        servers = ["--server", f"one={one.url}/v1", "--server", f"other={other.url}"]
        words = [*servers, *SMALL, "--rounds", "3", "--json", str(file)]
        assert cli.main(["bench", "compare", *words]) == 0
    assert len(prompts(one)) == 3 * (1 + 3 + 2)
    assert sorted(prompts(one)) == sorted(prompts(other))
    repeated = Counter(prompts(one))
    assert Counter(repeated.values()) == {
        1: 3 * (1 + 3),
        3: 2,
    }  # the checked requests of every round
    found = json.loads(file.read_text())
    assert found["servers"]["one"] == {
        "client_cpu_share": found["servers"]["one"]["client_cpu_share"],
        "num_requests": 18,
        "num_failed": 0,
        "errors": {},
        "answers_compared": 4,
        "answers_different": 0,
    }
    assert len(found["rounds"]) == 3
    assert set(found["figures"]) == {figure.key for figure in bench_of(*words).figures()}
    figure = found["figures"]["at_2_output_tokens_per_s"]
    rates = [each["one"]["at_2_output_tokens_per_s"] for each in found["rounds"]]
    assert figure["medians"]["one"] == sorted(rates)[1]
    assert figure["ratios"]["one / other"]["min"] > 0
    text = capsys.readouterr().out
    assert "one / other" in text
    assert "one: 18 requests, 0 failed" in text


def test_loads_are_repeated_beside_busy_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            processes.append(self)

    monkeypatch.setattr(compare.subprocess, "Popen", Popen)
    file = tmp_path / "figures.json"
    with fake_openai() as one, fake_openai() as other:
        servers = ["--server", f"one={one.url}/v1", "--server", f"other={other.url}"]
        words = [*servers, *SMALL, "--rounds", "1", "--busy", "2", "--json", str(file)]
        assert cli.main(["bench", "compare", *words]) == 0
        assert len(prompts(one)) == len(set(prompts(one))) == 2 * (1 + 3) + 2
    assert [each.returncode for each in processes] == [-signal.SIGKILL] * 4
    found = json.loads(file.read_text())
    assert set(found["figures"]) == {figure.key for figure in bench_of(*words).figures()}
    turn = found["rounds"][0]["one"]
    for load in ("alone", "at_2"):
        rates = [turn[f"{busy}{load}_output_tokens_per_s"] for busy in ("busy_", "")]
        assert turn[f"busy_{load}_kept"] == rates[0] / rates[1]


def started(monkeypatch: pytest.MonkeyPatch, fake: FakeOpenAI) -> list[str]:
    """Record starts and ends of servers, in order; all of them are one fake server."""
    events: list[str] = []

    @contextmanager
    def running(spec: ServerSpec) -> Iterator[RunningServer]:
        events.append(f"{spec.name} begins")
        yield RunningServer(fake.url)
        events.append(f"{spec.name} ends")

    monkeypatch.setattr(compare, "running", running)
    return events


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ["with begins", "without begins", "without ends", "with ends"]),
        (
            ["--restart"],
            [
                *("with begins", "with ends", "without begins", "without ends"),
                *("without begins", "without ends", "with begins", "with ends"),
            ],
        ),
        (
            ["--restart", "--rounds", "1"],  # a second start, which is only timed
            [
                *("with begins", "with ends", "with begins", "with ends"),
                *("without begins", "without ends", "without begins", "without ends"),
            ],
        ),
    ],
)
def test_daemons_run_together_or_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: list[str]
) -> None:
    with fake_openai() as fake:
        events = started(monkeypatch, fake)
        compare.main(["--other=--async-scheduling", *SMALL, "--rounds", "2", *flags])
    assert events == expected


@pytest.mark.parametrize(("flags", "shown"), [([], False), (["--restart"], True)])
def test_the_second_start_is_shown_where_there_is_one(flags: list[str], shown: bool) -> None:
    keys = [figure.key for figure in bench_of("--other=--seed 3", *flags).figures()]
    assert ("ready_again_s" in keys) == shown


def test_two_settings_are_two_commands() -> None:
    words = ["--other=--async-scheduling --seed 3", "--", "--dtype", "float32"]
    changed, plain = bench_of(*words).specs
    assert plain.command[1:] == (
        *("serve", "--port", "{port}", "--disable-log-requests"),
        *("--dtype", "float32"),
    )
    assert changed.command == (*plain.command, "--async-scheduling", "--seed", "3")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "needs two --server"),
        (["--server", "a=http://x", "--server", "a=http://y"], "needs two --server"),
        (["--server", "a=http://x", "--other", ""], "not both"),
        (["--server", "a=http://x", "--", "--dtype", "float32"], "go with --other"),
        (["--server", "http://x"], "NAME=URL"),
        (["--server", "a=serve --port 8000"], "no {port}"),
        (["--server", "a='serve {port}"], "quotation"),
    ],
)
def test_usage_errors_are_reported(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        compare.main(words)
