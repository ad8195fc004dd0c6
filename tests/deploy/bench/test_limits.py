"""Limits of measurements: when they are met, how they are shown, and the exit status."""

import io
import json
import math

import pytest
from rich.console import Console

from deploy.bench.limits import Limit, check_limits, limits_json, limits_table
from proto.errors import TokendError

KEPT = Limit("others' throughput", 0.9, "at least", 0.9)
MISSED = Limit("engine 0: growth", 1.25, "at most", 1.0, "MiB")


@pytest.mark.parametrize(
    ("value", "kind", "met"),
    [
        (1.0, "at most", True),
        (1.001, "at most", False),
        (0.999, "at least", False),
        (1.0, "at least", True),
        (math.nan, "at most", False),
        (math.nan, "at least", False),
    ],
)
def test_a_limit_is_met_up_to_its_bound_and_not_by_a_missing_figure(
    value: float, kind: str, met: bool
) -> None:
    assert Limit("x", value, kind, 1.0).met is met  # type: ignore[arg-type]


def test_missed_limits_are_named_with_both_figures() -> None:
    check_limits("bench x", [KEPT])
    with pytest.raises(TokendError) as caught:
        check_limits("bench x", [KEPT, MISSED])
    assert str(caught.value) == (
        "bench x: 1 limit missed: engine 0: growth: 1.25 MiB, at most 1 MiB"
    )


def test_the_table_shows_every_verdict() -> None:
    text = io.StringIO()
    Console(file=text, width=110).print(limits_table([KEPT, MISSED]))
    kept, missed = [line for line in text.getvalue().splitlines() if ":" in line or "'" in line]
    assert "≥ 0.9" in kept
    assert "met" in kept
    assert "≤ 1 MiB" in missed
    assert "MISSED" in missed


def test_the_file_has_figures_and_verdicts_without_nan() -> None:
    text = limits_json([MISSED, Limit("y", math.nan, "at most", 1)], {"requests": 7})
    read = json.loads(text, parse_constant=pytest.fail)
    assert read["requests"] == 7
    first, second = read["limits"]
    assert (first["name"], first["bound"], first["met"]) == (MISSED.name, 1.0, False)
    assert (second["value"], second["met"]) == (None, False)
