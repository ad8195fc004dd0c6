"""Plots as one self-contained HTML file: inline SVG, no script, light and dark.

A drawing, in units of its viewBox:

    0        LEFT                                      WIDTH - RIGHT
    0    TOP  |                                              |
         label+ - - - - - - grid - - - - - - - - - - - - - - |
              |                                              |
         label+----------------------------------------------+   HEIGHT - BOTTOM
              tick           tick           tick
                            title of x                           HEIGHT
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# ---- Axes ----


_STEPS: Final = 4
_ROUND: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """An axis from the first of its ticks, 0, to the last."""

    ticks: Sequence[float]

    def position(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        return value / self.ticks[-1]


def linear_scale(values: Sequence[float]) -> Scale:
    """Return an axis from 0 that includes all values, with round numbers as ticks."""
    high = _round_end(max(values, default=0.0))
    return Scale([high * step / _STEPS for step in range(_STEPS + 1)])


def label(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.3g}"


def _round_end(highest: float) -> float:
    if highest <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(highest / _STEPS))
    step = next(size for size in _ROUND if size * scale * _STEPS >= highest * (1 - 1e-9))
    return step * scale * _STEPS


Points = Sequence[tuple[float, float]]

_WIDTH: Final = 560
_HEIGHT: Final = 300
_LEFT: Final = 58
_RIGHT: Final = 26
_BOTTOM: Final = 44
_TOP: Final = 16
_COLOURS: Final = 7
"""Colours in the style sheet; further curves repeat them, dashed."""
_FEW: Final = 24

_STYLE: Final = """
:root{color-scheme:light dark;
--paper:#fff;--ink:#1c1e21;--soft:#5f6670;--line:#e3e6ea;--axis:#9aa1ab;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#a0449b;--c4:#c28a00;--c5:#3a9bdc;--c6:#6b6b6b}
@media(prefers-color-scheme:dark){:root{
--paper:#16181c;--ink:#e8eaed;--soft:#a3aab4;--line:#2c3036;--axis:#69717c;--c0:#4fa8e0;--c1:#f08a4b;--c2:#3cc79b;--c3:#cf86cb;--c4:#e3b341;--c5:#8ecdf5;
--c6:#b3b3b3}}
body{font:14px/1.45 system-ui,sans-serif;background:var(--paper);color:var(--ink);max-width:1180px;
margin:2em auto;padding:0 1.2em}
h1{font-size:22px;margin:0 0 .6em}
h2{font-size:14px;margin:0 0 .3em}
ul{color:var(--soft);padding-left:1.2em;margin:.8em 0 1.6em}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:1.8em 2em}
figure{margin:0}
figcaption{color:var(--soft);font-size:13px;min-height:1.5em}
figcaption span{margin-right:1em;white-space:nowrap}
i{display:inline-block;width:1.5em;border-top:3px solid;margin-right:.4em;vertical-align:middle}
i.again{border-top-style:dashed}
svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}
.grid{stroke:var(--line)}
.axis{stroke:var(--axis)}
polyline{fill:none;stroke-width:2;stroke-linejoin:round}
"""


@dataclass(frozen=True)
class PlotPanel:
    """One plot. curves: points (x, y) by name; curves with few points get markers."""

    title: str
    curves: Mapping[str, Points]


def plot_page(title: str, notes: Sequence[str], panels: Sequence[PlotPanel], x_title: str) -> str:
    """Return the whole HTML file. notes: lines above the plots."""
    lines = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    drawings = "".join(_figure(panel, x_title) for panel in panels)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><ul>{lines}</ul>"
        f"<main>{drawings}</main></html>\n"
    )


def _figure(panel: PlotPanel, x_title: str) -> str:
    curves = {name: points for name, points in panel.curves.items() if points}
    x_scale = linear_scale([x for points in curves.values() for x, _ in points])
    y_scale = linear_scale([y for points in curves.values() for _, y in points])
    shapes = _axes(x_scale, y_scale, x_title)
    legend = []
    for number, (name, points) in enumerate(curves.items()):
        places = [(_x(x_scale, x), _y(y_scale, y)) for x, y in points]
        shapes += _curve(name, points, places, number)
        again = ' class="again"' if number >= _COLOURS else ""
        legend.append(f'<span><i{again} style="border-color:{_colour(number)}"></i>'
                      f"{html.escape(name)}</span>")  # fmt: skip
    return (
        f"<figure><h2>{html.escape(panel.title)}</h2><figcaption>{''.join(legend)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(shapes)}</svg></figure>'
    )


def _x(scale: Scale, value: float) -> float:
    return _LEFT + scale.position(value) * (_WIDTH - _RIGHT - _LEFT)


def _y(scale: Scale, value: float) -> float:
    return _TOP + (_HEIGHT - _BOTTOM - _TOP) * (1 - scale.position(value))


def _colour(number: int) -> str:
    return f"var(--c{number % _COLOURS})"


def _axes(x_scale: Scale, y_scale: Scale, x_title: str) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    found = []
    for value in y_scale.ticks:
        y = _y(y_scale, value)
        found += [
            f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>',
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label(value)}</text>',
        ]
    for value in x_scale.ticks:
        x = _x(x_scale, value)
        found += [
            f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>',
            f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{label(value)}</text>',
        ]
    found.append(f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    place = f'x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle"'
    found.append(f"<text {place}>{html.escape(x_title)}</text>")
    return found


def _curve(name: str, points: Points, places: Points, number: int) -> list[str]:
    """Return a line and, of few points, their markers. places: of the points in the drawing."""
    dashes = ' stroke-dasharray="6 4"' if number >= _COLOURS else ""
    title, colour = html.escape(name), _colour(number)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    found = [
        f'<polyline points="{line}" style="stroke:{colour}"{dashes}>'
        f"<title>{title}</title></polyline>"
    ]
    if len(points) <= _FEW:
        found += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="fill:{colour}">'
            f"<title>{title}: {label(point[0])}, {label(point[1])}</title></circle>"
            for point, (x, y) in zip(points, places, strict=True)
        ]
    return found
