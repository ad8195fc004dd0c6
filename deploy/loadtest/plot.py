"""Curves as one HTML file that needs nothing else: inline SVG, no script."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Points = Sequence[tuple[float, float]]

_WIDTH: Final = 860
_HEIGHT: Final = 220
_LEFT: Final = 70
_BOTTOM: Final = 30
_TOP: Final = 10
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_STEPS: Final = 4
_ROUND: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_FEW: Final = 24


@dataclass(frozen=True)
class Panel:
    """One drawing. curves: (x, y) by name; both axes begin at 0.

    x_title: where it is not that of the page. A curve of few points shows each of them.
    """

    title: str
    curves: Mapping[str, Points]
    x_title: str = ""


def page(title: str, notes: Sequence[str], panels: Sequence[Panel], x_title: str) -> str:
    """The whole file. notes: lines above the drawings."""
    lines = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    drawings = "".join(_figure(panel, panel.x_title or x_title) for panel in panels)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        "<style>body{font:14px sans-serif;max-width:60em;margin:2em auto}"
        "svg{width:100%;height:auto}text{font:11px sans-serif}h2{font-size:15px}</style>"
        f"<h1>{html.escape(title)}</h1><ul>{lines}</ul>{drawings}</html>\n"
    )


def _figure(panel: Panel, x_title: str) -> str:
    curves = {name: points for name, points in panel.curves.items() if points}
    xs = [x for points in curves.values() for x, _ in points] or [0.0]
    ys = [y for points in curves.values() for _, y in points] or [0.0]
    frame = _Frame(_round_end(max(xs)), _round_end(max(ys)))
    shapes = frame.axes(x_title)
    legend = []
    for number, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        shapes.append(frame.curve(points, colour))
        legend.append(f'<span style="color:{colour}">{html.escape(name)}</span>')
    return (
        f"<h2>{html.escape(panel.title)}</h2><p>{' · '.join(legend)}</p>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(shapes)}</svg>'
    )


@dataclass(frozen=True)
class _Frame:
    """From values to places in the drawing; both axes begin at 0."""

    max_x: float
    max_y: float

    def axes(self, x_title: str) -> list[str]:
        found = []
        for step in range(_STEPS + 1):
            part = step / _STEPS
            x, y = self._place(part * self.max_x, part * self.max_y)
            bottom = _HEIGHT - _BOTTOM
            found += [
                f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH}" y2="{y:.1f}" stroke="#ddd"/>',
                f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">'
                f"{part * self.max_y:,.4g}</text>",
                f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="{_anchor(step)}">'
                f"{_label(part * self.max_x)}</text>",
            ]
        middle = (_LEFT + _WIDTH) / 2
        title = html.escape(x_title)
        found.append(f'<text x="{middle}" y="{_HEIGHT - 2}" text-anchor="middle">{title}</text>')
        return found

    def curve(self, points: Points, colour: str) -> str:
        places = " ".join("{:.1f},{:.1f}".format(*self._place(x, y)) for x, y in points)
        line = f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        if len(points) > _FEW:
            return line
        centres = (self._place(x, y) for x, y in points)
        return line + "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in centres
        )

    def _place(self, x: float, y: float) -> tuple[float, float]:
        height = _HEIGHT - _BOTTOM - _TOP
        return (
            _LEFT + x / self.max_x * (_WIDTH - _LEFT),
            _TOP + height - y / self.max_y * height,
        )


def _round_end(highest: float) -> float:
    """Of an axis from 0 on which every step is a round number, and the highest value has room."""
    if highest <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(highest / _STEPS))
    step = next(each for each in _ROUND if each * scale * _STEPS >= highest * (1 - 1e-9))
    return step * scale * _STEPS


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.3g}"


def _anchor(step: int) -> str:
    return "start" if step == 0 else "end" if step == _STEPS else "middle"
