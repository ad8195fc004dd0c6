"""Two settings beside each other: who goes first, and what is made of the rounds."""

import argparse
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import pytest
from deploy.loadtest.client import Exchange, Load, LoadResult

from deploy.loadtest import compare
from proto.errors import ConfigError


def test_pairs_are_compared_round_by_round() -> None:
    """The second round was slow for both: the figures differ by half, the ratios do not."""
    pairs = compare.Pairs([10.0, 20.0, 10.0], [9.0, 18.0, 12.0])
    assert pairs.ratios() == pytest.approx([0.9, 0.9, 1.2])
    assert pairs.row() == ["10.00", "12.00", "-1.00", "0.900", "0.900 to 1.200"]


def test_each_takes_its_turn_with_the_same_new_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, Load]] = []

    def run_load(url: str, model: str, load: Load) -> LoadResult:
        asked.append((url, load))
        seconds = {"first": 0.04, "other": 0.03}[url]
        exchange = Exchange(0.0, [1.0, 1.0 + seconds * (load.output_tokens - 1)])
        exchange.output_tokens = load.output_tokens
        return LoadResult([exchange] * load.num_requests, 2.0)

    def daemon(flags: list[str]) -> AbstractContextManager[argparse.Namespace]:
        return nullcontext(
            SimpleNamespace(url="other" if "--async-scheduling" in flags else "first")
        )

    monkeypatch.setattr(compare, "run_load", run_load)
    monkeypatch.setattr(compare, "MeasuredDaemon", daemon)
    compare.main(["--other=--async-scheduling", "--rounds", "3", "--concurrency", "2"])
    measured = asked[2:]
    assert [url for url, _ in measured[::2]] == [
        "first",
        "other",
        "other",
        "first",
        "first",
        "other",
    ]
    by_url = {url: [load for asker, load in measured if asker == url] for url in ("first", "other")}
    assert by_url["first"] == by_url["other"]
    assert len({load.seed for load in by_url["first"]}) == 6
    row = next(line for line in capsys.readouterr().out.splitlines() if "per token alone" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")][1:5] == [
        "40.00",
        "30.00",
        "-10.00",
        "0.750",
    ]


def test_there_must_be_another_setting() -> None:
    with pytest.raises(ConfigError, match="--other"):
        compare.main([])
