"""Axes of a drawing: from values to a part of the axis, and which values are written beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

_STEPS: Final = 4
_ROUND: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_OF_A_DECADE: Final = (1.0, 2.0, 5.0, 10.0)
_MOST_TICKS: Final = 12


class Scale(Protocol):
    """One axis. ticks: values on it, from its one end to the other."""

    @property
    def ticks(self) -> Sequence[float]: ...

    def part(self, value: float) -> float:
        """Where a value lies: 0 at the one end, 1 at the other."""
        ...


@dataclass(frozen=True)
class LinearScale:
    """From 0 to `high`."""

    high: float

    @classmethod
    def to(cls, values: Sequence[float]) -> "LinearScale":
        """On which every step is a round number and all values have room."""
        return cls(_round_end(max(values, default=0.0)))

    @property
    def ticks(self) -> Sequence[float]:
        return [self.high * step / _STEPS for step in range(_STEPS + 1)]

    def part(self, value: float) -> float:
        return value / self.high


@dataclass(frozen=True)
class LogScale:
    """Equal ways for equal ratios, between two values of 1, 2, 5, 10, 20, …"""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> "LogScale":
        """All values above 0 have room, and the ends differ."""
        above = [value for value in values if value > 0] or [1.0]
        low = max(each for each in _nice(min(above)) if each <= min(above) * (1 + 1e-9))
        high = min(each for each in _nice(max(above)) if each >= max(above) * (1 - 1e-9))
        return cls(low, high if high > low else 10 * low)

    @property
    def ticks(self) -> Sequence[float]:
        """With many decades, powers of ten and the ends."""
        found, value = [], self.low
        while value < self.high * (1 - 1e-9):
            found.append(value)
            value = min(each for each in _nice(value) if each > value * (1 + 1e-9))
        found.append(self.high)
        if len(found) <= _MOST_TICKS:
            return found
        inner = [each for each in found[1:-1] if math.log10(each).is_integer()]
        return [found[0], *inner, found[-1]]

    def part(self, value: float) -> float:
        return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)


def label(value: float) -> str:
    """A value beside an axis."""
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.3g}"


def percent_label(part: float) -> str:
    return f"{part:.0%}"


def _nice(value: float) -> list[float]:
    """1, 2, 5 and 10 of the decade of a value, and those beside it."""
    power = math.floor(math.log10(value))
    return [each * 10.0**near for near in (power - 1, power, power + 1) for each in _OF_A_DECADE]


def _round_end(highest: float) -> float:
    if highest <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(highest / _STEPS))
    step = next(each for each in _ROUND if each * scale * _STEPS >= highest * (1 - 1e-9))
    return step * scale * _STEPS
