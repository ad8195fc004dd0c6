"""Plots: positions of values, axis labels, and a well-formed file."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench.plot import PlotPanel, Scale, label, linear_scale, log_scale, plot_page

VALUES = st.lists(st.floats(1e-3, 1e7), min_size=1, max_size=20)


def drawings(text: str) -> list[ElementTree.Element]:
    return [
        ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
        for part in text.split("<svg")[1:]
    ]


def check_scale(scale: Scale, values: list[float]) -> None:
    """Assert that all values lie on the axis in order and its ticks span it."""
    parts = [scale.position(value) for value in sorted(values)]
    assert parts == sorted(parts)
    assert -1e-9 <= parts[0] <= parts[-1] <= 1 + 1e-9
    marks = [scale.position(tick) for tick in scale.ticks]
    assert marks == sorted(set(marks))
    assert (marks[0], marks[-1]) == (pytest.approx(0.0), pytest.approx(1.0))


@given(VALUES)
def test_an_axis_from_zero_fits_all_values(values: list[float]) -> None:
    scale = linear_scale(values)
    check_scale(scale, values)
    assert scale.position(max(values)) > 0.5  # and does not waste space
    steps = {round(b - a, 9) for a, b in zip(scale.ticks, scale.ticks[1:], strict=False)}
    assert max(steps) - min(steps) <= 1e-6 * max(steps)


@given(VALUES)
def test_a_log_axis_fits_all_values(values: list[float]) -> None:
    scale = log_scale(values)
    check_scale(scale, values)
    assert len(scale.ticks) <= 14
    assert scale.ticks[0] >= min(values) / 2.5 - 1e-9


def test_equal_ratios_have_equal_distances() -> None:
    scale = log_scale([3.0, 80.0])
    assert list(scale.ticks) == [2, 5, 10, 20, 50, 100]
    assert scale.position(20) - scale.position(10) == pytest.approx(
        scale.position(10) - scale.position(5)
    )
    assert list(log_scale([7.0]).ticks) == [5, 10]
    assert list(log_scale([10.0]).ticks) == [10, 20, 50, 100]
    assert list(log_scale([0.0, -1.0]).ticks) == [1, 2, 5, 10]


def test_many_decades_have_ticks_at_powers_of_ten() -> None:
    ticks = log_scale([2e-3, 3e3]).ticks
    assert ticks == pytest.approx([2e-3, 1e-2, 0.1, 1, 10, 100, 1000, 5000])


def test_labels() -> None:
    assert [label(each) for each in (0.0, 0.125, 2.5, 10.0, 12500.0)] == [
        *("0", "0.125", "2.5", "10", "12,500")
    ]


def test_a_page_has_tables_names_and_both_colour_schemes() -> None:
    curves = {"p99 <x>": [(10.0, 5.0), (20.0, 9.0)], "p50": [(10.0, 4.0), (20.0, 8.0)]}
    panel = PlotPanel("by & by", curves, "tokens/s", names=["few", "many"])
    table = (["load", "<b>"], [["1 at once", "2.5"]])
    text = plot_page("a title", ["a note"], [panel, PlotPanel("none", {})], "ms", table)
    first, second = drawings(text)
    words = [each.text for each in first.iter("text")]
    assert {"few", "many", "tokens/s"} <= set(words)
    assert "ms" in [each.text for each in second.iter("text")]
    assert len(list(first.iter("circle"))) == 4
    assert "<td>1 at once</td><td>2.5</td>" in text
    assert "&lt;b&gt;" in text
    assert "by &amp; by" in text
    assert "prefers-color-scheme:dark" in text
    assert "http" not in text
    assert "<script" not in text


def test_overlapping_labels_are_omitted() -> None:
    points = [(1.0 + 0.01 * each, 1.0) for each in range(5)] + [(9.0, 1.0)]
    panel = PlotPanel("x", {"one": points}, names=["a", "b", "c", "d", "e", "far"])
    (drawing,) = drawings(plot_page("t", [], [panel], "x"))
    shown = [each.text for each in drawing.iter("text") if each.get("class") == "name"]
    assert shown == ["far", "e"]


def test_shares_are_percentages_and_repeated_colours_are_dashed() -> None:
    curves = {f"curve {number}": [(1.0, 0.5), (2.0, 1.0)] for number in range(8)}
    (drawing,) = drawings(
        plot_page("t", [], [PlotPanel("x", curves, log_x=True, shares=True)], "x")
    )
    assert "75%" in [each.text for each in drawing.iter("text")]
    lines = list(drawing.iter("polyline"))
    assert lines[0].get("style") == lines[7].get("style") != lines[1].get("style")
    assert [line.get("stroke-dasharray") is None for line in lines] == [True] * 7 + [False]
