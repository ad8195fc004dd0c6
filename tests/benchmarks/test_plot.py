"""Plots: positions of values, labels of axes, and colours of curves."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.plot import PlotPanel, label, linear_scale, plot_page

VALUES = st.lists(st.floats(1e-3, 1e7), min_size=1, max_size=20)


@given(VALUES)
def test_an_axis_from_zero_fits_all_values(values: list[float]) -> None:
    scale = linear_scale(values)
    parts = [scale.position(value) for value in sorted(values)]
    assert parts == sorted(parts)
    assert 0.5 < parts[-1] <= 1 + 1e-9
    assert (scale.ticks[0], scale.position(scale.ticks[-1])) == (0.0, 1.0)
    steps = {round(b - a, 9) for a, b in zip(scale.ticks, scale.ticks[1:], strict=False)}
    assert max(steps) - min(steps) <= 1e-6 * max(steps)


def test_labels() -> None:
    assert [label(each) for each in (0.0, 0.125, 2.5, 10.0, 12500.0)] == [
        *("0", "0.125", "2.5", "10", "12,500")
    ]


def test_repeated_colours_are_dashed() -> None:
    curves = {f"curve {number}": [(1.0, 0.5), (2.0, 1.0)] for number in range(8)}
    text = plot_page("t", [], [PlotPanel("x", curves)], "x")
    drawing = ElementTree.fromstring("<svg" + text.split("<svg")[1].split("</svg>")[0] + "</svg>")
    lines = list(drawing.iter("polyline"))
    assert lines[0].get("style") == lines[7].get("style") != lines[1].get("style")
    assert [line.get("stroke-dasharray") is None for line in lines] == [True] * 7 + [False]
