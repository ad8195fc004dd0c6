"""Progress bars, tables of processes, argument types and prompt words of the benchmarks."""

import io
from pathlib import Path

import pytest

from deploy.bench.client import Target
from deploy.bench.datasets import (
    WORDS,
    RequestSizes,
    SessionSeeds,
    prompt_sessions,
    random_ids,
)
from deploy.bench.load import LoadPattern, measure
from deploy.bench.options import BenchParser, several_counts, several_rates, writable, write
from proto.errors import ConfigError
from tests.benchmarks.processes import per_step
from tests.benchmarks.usage import ProcessUsage
from tests.fakes.openai_server import fake_openai


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_is_drawn_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, file = Terminal(), io.StringIO()
    pattern = LoadPattern(1, max_requests=5)
    with fake_openai() as fake:
        for stream in (file, terminal):
            sessions = prompt_sessions(SessionSeeds(0), RequestSizes(3, 2), random_ids())
            load_result = measure(Target(fake.url, "m"), sessions, pattern, "a run", stream)
    assert len(load_result.results) == 5
    assert file.getvalue() == ""
    assert "a run" in terminal.getvalue()
    assert "in flight" in terminal.getvalue()


def test_cpu_time_is_reported_per_step() -> None:
    def usage(cpu_seconds: float, resident_mib: float) -> ProcessUsage:
        return ProcessUsage(1, cpu_seconds, resident_mib, 0, 0)

    before = {"tokend: api 0": usage(1.0, 9), "tokend: engine 0": usage(2.0, 9)}
    after = {
        "tokend: api 0": usage(1.5, 30),
        "tokend: engine 0": usage(3.0, 20),
        "tokend: worker 1": usage(9.0, 5),
    }
    assert per_step(before, after, 100) == {
        "tokend: api 0": {"cpu_ms_per_step": 5.0, "resident_mib": 30},
        "tokend: engine 0": {"cpu_ms_per_step": 10.0, "resident_mib": 20},
        "engine + front end": {"cpu_ms_per_step": 15.0, "resident_mib": 50},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", [3]),
        ("1,16,4", [1, 16, 4]),
        ("1..8", [1, 2, 4, 8]),
        ("3..20,64", [3, 6, 12, 20, 64]),
        ("5..5", [5]),
    ],
)
def test_several_values_are_one_argument(text: str, expected: list[int]) -> None:
    assert several_counts(text) == expected


@pytest.mark.parametrize("text", ["", "0", "1,", "..4", "1..", "a"])
def test_invalid_values_are_named(text: str) -> None:
    parser = BenchParser(prog="bench")
    parser.add_argument("--counts", type=several_counts)
    parser.add_argument("--rates", type=several_rates)
    for flag in ("--counts", "--rates"):
        with pytest.raises(ConfigError, match=flag):
            parser.parse_args([f"{flag}={text}"])


def test_a_file_keeps_its_content_until_the_new_one_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("the last run, which was longer")
    with pytest.raises(KeyboardInterrupt), writable("--json", str(file)):
        raise KeyboardInterrupt
    assert file.read_text() == "the last run, which was longer"
    with writable("--json", str(file)) as files:
        write(files, "new")
    assert file.read_text() == "new"
    fresh = tmp_path / "y"
    with pytest.raises(KeyboardInterrupt), writable("--json", str(fresh)):
        raise KeyboardInterrupt
    assert not fresh.exists(), "nothing was written"
    with writable("--json", str(fresh), is_private=True) as files:
        write(files, "new")
    assert fresh.stat().st_mode & 0o777 == 0o600
    with writable("--json", None) as files:
        write(files, "nowhere")
    with (
        pytest.raises(ConfigError, match="--json /nowhere/x: No such file"),
        writable("--json", "/nowhere/x"),
    ):
        pytest.fail("it is open")


def test_prompt_words_are_plain_ascii() -> None:
    assert len(set(WORDS)) > 150
    assert all(word.isascii() and word.isalpha() for word in WORDS)
