"""Figures that a run is judged by: what each was, what it may be, and whether that was kept.

Knows nothing of what is measured; a figure that could not be taken is NaN and keeps no limit.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from rich.table import Table

from proto.errors import TokendError

# From many figures to a few.


def quantile(values: Sequence[float], part: float) -> float:
    """The nearest rank: the least of the values that `part` of them (0 to 1) do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * part) - 1)]


def percentile(values: Sequence[float], percent: float) -> float:
    """`percent` is 0 to 100; linear between the two nearest values, as numpy's default is."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


_SIGNS: Final = {"at most": "≤", "at least": "≥"}


@dataclass(frozen=True)
class Limit:
    """One figure. bound: what it may be, in the same unit as the value."""

    name: str
    value: float
    kind: Literal["at most", "at least"]
    bound: float
    unit: str = ""

    @property
    def kept(self) -> bool:
        """Also a figure exactly at the bound keeps it; NaN does not."""
        return self.value <= self.bound if self.kind == "at most" else self.value >= self.bound

    def describe(self) -> str:
        """In words, with the figure and the bound."""
        return f"{self.name}: {self._figure(self.value)}, {self.kind} {self._figure(self.bound)}"

    def plain(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        value = self.value if self.value == self.value else None
        return asdict(self) | {"value": value, "kept": self.kept}

    def cells(self) -> tuple[str, str, str, str]:
        """Name, value, bound, verdict."""
        bound = f"{_SIGNS[self.kind]} {self._figure(self.bound)}"
        return self.name, self._figure(self.value), bound, "kept" if self.kept else "MISSED"

    def _figure(self, value: float) -> str:
        return f"{value:,.3f}".rstrip("0").rstrip(".") + (f" {self.unit}" if self.unit else "")


def limits_table(limits: Sequence[Limit]) -> Table:
    """A row each, the verdict last."""
    table = Table(title="limits")
    for name in ("limit", "was", "may be", "verdict"):
        table.add_column(name, justify="right" if name in ("was", "may be") else "left")
    for each in limits:
        table.add_row(*each.cells())
    return table


def judge(command: str, limits: Sequence[Limit]) -> None:
    """Raises TokendError naming each limit that was missed."""
    missed = [each.describe() for each in limits if not each.kept]
    if missed:
        raise TokendError(f"{command}: {len(missed)} limits missed: " + "; ".join(missed))


def limits_json(limits: Sequence[Limit], figures: Mapping[str, Any]) -> str:
    """The limits with their verdicts, and beside them whatever else was measured."""
    return json.dumps({"limits": [each.plain() for each in limits], **figures}, indent=1) + "\n"
