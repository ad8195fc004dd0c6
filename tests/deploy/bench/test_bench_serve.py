"""`tokend bench serve`, from its arguments to its files, against a server in a thread."""

import json
import math
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy import cli
from deploy.bench.client import CHAT, COMPLETIONS
from deploy.bench.figures import METRICS, AnswerComparison, RunFigures, show
from tests.fakes.openai_server import FakeOpenAI, event, fake_openai, respond_normally, token


def bench(fake: FakeOpenAI, *words: str) -> int:
    return cli.main(["bench", "serve", "--url", fake.url, *words])


def document(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert isinstance(found, dict)
    return found


def test_several_loads_in_two_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, curves = tmp_path / "rows.json", tmp_path / "curves.html"
    rows.write_text("what was there before, and is longer" * 1000)
    words = ["--concurrency", "1..4", "--rounds", "2", "--max-requests", "10", "--warm-ups", "3"]
    sizes = ["--input-tokens", "20", "--output-tokens", "5", "--range-ratio", "0.5"]
    files = ["--json", str(rows), "--html", str(curves)]
    with fake_openai() as fake:
        assert bench(fake, *words, *sizes, *files, "--check-share", "0.2") == 0
    asked = [body for _, body in fake.seen[3:]]
    found = document(rows)
    assert (found["model"], found["url"]) == ("fake", fake.url)
    names = [f"concurrency {number}, round {turn}" for turn in (1, 2) for number in (1, 2, 4)]
    assert [each["name"] for each in found["runs"]] == names
    assert sum(each["num_completed"] for each in found["runs"]) == len(asked) == 60
    assert sum(each["output_tokens"] for each in found["runs"]) == sum(
        each["max_tokens"] for each in asked
    )
    assert sum(each["input_tokens"] for each in found["runs"]) == sum(
        len(each["prompt"]) for each in asked
    )
    assert all(each["temperature"] == 0 and each["ignore_eos"] for each in asked)
    repeated = Counter(str(each["prompt"]) for each in asked)
    assert Counter(repeated.values()) == {
        6: 2,
        1: 48,
    }  # two requests are checked in each of six runs
    assert (found["answers_compared"], found["answers_different"]) == (10, 0)
    assert found["runs"][0]["ttft_ms_p50"] <= found["runs"][0]["ttft_ms_p99"]

    page = curves.read_text()
    for drawing in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + drawing.split("</svg>")[0] + "</svg>")
    assert page.count("<svg") == 6
    assert "http" not in page.replace(fake.url, "")
    printed = capsys.readouterr().out
    started = datetime.fromisoformat(found["started"])
    mean_in, mean_out = (
        sum(each[name] for each in found["runs"]) / 60 for name in ("input_tokens", "output_tokens")
    )
    for line in (
        f"started {started:%Y-%m-%d %H:%M:%S} UTC; per request on average "
        f"{mean_in:,.0f} tokens in, {mean_out:,.0f} out",
        "--concurrency=1,2,4",
        "--range-ratio=0.5",
        "(--check-share) were answered again 10 times, 0 of them with another text",
    ):
        assert line in " ".join(printed.split())
        assert line in page


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        (
            "--request-rate 100 --burstiness 2",
            "--burstiness=2 --lowest-token-id --input-tokens",
            "--trace-scale --prefix-groups --turns --system-tokens",
        ),
        (
            "--endpoint chat --dataset shared-prefix --prefix-groups 3",
            "--prefix-groups=3 --prefix-tokens",
            "--burstiness --prompts --lowest-token-id --highest-token-id",
        ),
        ("--prompts text", "--prompts=text", "--lowest-token-id"),
        ("--dataset agent --turns 2", "--turns=2 --system-tokens --tools", "--prompts"),
        ("--trace {trace}", "--trace-scale --prompts", "--dataset --input-tokens --output-tokens"),
    ],
)
def test_only_settings_in_effect_are_printed(
    words: str, shown: str, hidden: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": []}\n')
    with fake_openai() as fake:
        assert bench(fake, *words.format(trace=trace).split(), "--max-requests", "1") == 0
    printed = " ".join(capsys.readouterr().out.split())
    settings = printed.partition("settings: ")[2]
    assert [each for each in shown.split() if each not in settings] == []
    assert [each for each in hidden.split() if f"{each}=" in settings] == []


def test_wide_tables_are_transposed_on_a_narrow_screen() -> None:
    times = {metric: [1.0, 2.0] for metric in METRICS}
    runs = [RunFigures(f"concurrency {number}", 1.0, 0.5, None, times, []) for number in (1, 2)]
    narrow, wide = (Console(file=StringIO(), width=width) for width in (40, 150))
    for console in (narrow, wide):
        show(console, ["head"], runs, AnswerComparison())
    lines = narrow.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[0] == "head"
    assert sum("output tokens/s" in line for line in lines) == 2
    assert "…" not in narrow.file.getvalue()
    assert sum("output tokens/s" in line for line in wide.file.getvalue().splitlines()) == 1


def test_errors_are_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors in the stream, answers that are too short, answers that change."""
    number = 0

    def badly(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        nonlocal number
        number += 1
        if number % 3 == 0:
            return [token(path, "x"), event(error={"message": "out of blocks"})]
        return [token(path, f"x{number}"), token(path, "y", last=True), b"data: [DONE]\n\n"]

    file = tmp_path / "rows.json"
    words = ["--concurrency", "1", "--max-requests", "9", "--warm-ups", "0", "--rounds", "2"]
    with fake_openai(badly) as fake:
        assert bench(fake, *words, "--check-share", "1", "--json", str(file), "--model", "m") == 0
    first, second = document(file)["runs"]
    assert (first["num_completed"], first["errors"]) == (6, {"out of blocks": 3})
    assert (first["output_tokens"], first["num_other_length"]) == (12, 6)
    assert second["num_failed"] == 3
    text = capsys.readouterr().out
    assert "3 failed: out of blocks" in text
    assert "were answered again 6 times, 6 of them with another text" in " ".join(text.split())
    assert "after 2 characters: 'y', then '0y'" in text
    assert "a difference need not be an error" in text


def test_a_run_without_answers_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def never(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        return [event(error="no")]

    with fake_openai(never) as fake:
        assert bench(fake, "--num-prompts", "2", "--warm-ups", "0") == 1
        assert "all requests failed" in capsys.readouterr().err
        assert bench(fake) == 1
        assert "a warm-up request failed: no" in capsys.readouterr().err
    assert bench(fake) == 1
    assert "no server answers at http://127.0.0.1:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["--dataset", "multi-turn", "--turns", "3"], CHAT),
        (["--dataset", "agent", "--turns", "3", "--system-tokens", "9", "--tools", "1"], CHAT),
        (["--dataset", "multi-turn", "--endpoint", "completions"], COMPLETIONS),
        (["--dataset", "shared-prefix", "--prefix-groups", "2"], COMPLETIONS),
        (["--prompts", "text"], COMPLETIONS),
        (["--endpoint", "chat"], CHAT),
        (["--request-rate", "500,1000", "--burstiness", "0.5"], COMPLETIONS),
        (["--request-rate", "500", "--ramp-seconds", "0.01", "--concurrency", "2"], COMPLETIONS),
        (["--extra-body", '{"top_k": 3}', "--no-ignore-eos", "--temperature", "1"], COMPLETIONS),
    ],
)
def test_every_kind_of_load_reaches_the_server(words: list[str], path: str) -> None:
    sizes = ["--input-tokens", "6", "--output-tokens", "3", "--max-requests", "12"]
    with fake_openai() as fake:
        assert bench(fake, *sizes, *words) == 0
    runs = 2 if "500,1000" in words else 1
    assert len(fake.seen) == 4 + 12 * runs
    assert {each for each, _ in fake.seen} == {path}
    if "--extra-body" in words:
        fields = [(body["top_k"], body.get("ignore_eos")) for _, body in fake.seen]
        assert set(fields) == {(3, None)}


def test_a_trace_is_replayed_once(tmp_path: Path) -> None:
    trace, file = tmp_path / "trace", tmp_path / "rows.json"
    lines = [{"timestamp": 10 * each, "input_length": 5, "output_length": 2} for each in range(6)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    with fake_openai() as fake:
        assert bench(fake, "--trace", str(trace), "--warm-ups", "0", "--json", str(file)) == 0
    (run,) = document(file)["runs"]
    assert (run["num_completed"], run["input_tokens"], run["output_tokens"]) == (6, 30, 12)
    assert run["duration_s"] >= 0.05


def test_goodput_counts_requests_within_all_limits(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["--max-requests", "4", "--concurrency", "1", "--json", str(file), "--goodput"]
    for limits, part in ((["ttft:60000", "e2el:60000"], 1), (["ttft:60000", "e2el:0.0001"], 0)):
        with fake_openai() as fake:
            assert bench(fake, *words, *limits) == 0
        (run,) = document(file)["runs"]
        assert math.isclose(run["goodput_requests_per_s"], part * run["requests_per_s"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "4..x"], "--concurrency"),
        (["--concurrency", "1,2", "--request-rate", "3"], "one --concurrency"),
        (["--request-rate", "-1"], "--request-rate"),
        (["--goodput", "itl:3"], "ttft, tpot, e2el"),
        (["--burstiness", "0"], "--burstiness"),
        (["--check-share", "2"], "--check-share"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--dataset", "file"], "--file"),
        (["--file", "x"], "--dataset file"),
        (["--dataset", "file", "--file", "/nowhere/x"], "/nowhere/x"),
        (["--json", "/nowhere/x"], "/nowhere/x"),
        (["--lowest-token-id", "9", "--highest-token-id", "8"], "--highest-token-id"),
        (["--url", "localhost"], "not a URL"),
    ],
)
def test_usage_errors_are_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:9", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_the_fake_server_is_deterministic() -> None:
    body = {"prompt": [1], "max_tokens": 2}
    assert list(respond_normally("", body)) == list(respond_normally("", body))
