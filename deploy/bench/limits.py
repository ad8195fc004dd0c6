"""Limits of measured values, and percentiles.

A value that could not be measured is NaN and misses its limit.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from rich.table import Table

from proto.errors import TokendError


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least `part` (0 to 1) of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * part) - 1)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile (0 to 100), interpolated linearly like numpy's default."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


_SIGNS: Final = {"at most": "≤", "at least": "≥"}


@dataclass(frozen=True)
class Limit:
    """A measured value and its limit. bound: in the unit of the value."""

    name: str
    value: float
    kind: Literal["at most", "at least"]
    bound: float
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.kind == "at most" else self.value >= self.bound

    def describe(self) -> str:
        """Return value and bound in words."""
        return f"{self.name}: {self._format(self.value)}, {self.kind} {self._format(self.bound)}"

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, which has no NaN."""
        value = self.value if self.value == self.value else None
        return asdict(self) | {"value": value, "met": self.met}

    def cells(self) -> tuple[str, str, str, str]:
        """Return name, value, bound and verdict for a table."""
        bound = f"{_SIGNS[self.kind]} {self._format(self.bound)}"
        return self.name, self._format(self.value), bound, "met" if self.met else "MISSED"

    def _format(self, value: float) -> str:
        return f"{value:,.3f}".rstrip("0").rstrip(".") + (f" {self.unit}" if self.unit else "")


def limits_table(limits: Sequence[Limit]) -> Table:
    table = Table(title="limits")
    for name in ("limit", "value", "bound", "verdict"):
        table.add_column(name, justify="right" if name in ("value", "bound") else "left")
    for limit in limits:
        table.add_row(*limit.cells())
    return table


def check_limits(command: str, limits: Sequence[Limit]) -> None:
    """Raise TokendError naming each missed limit."""
    missed = [limit.describe() for limit in limits if not limit.met]
    if missed:
        what = "1 limit" if len(missed) == 1 else f"{len(missed)} limits"
        raise TokendError(f"{command}: {what} missed: " + "; ".join(missed))


def limits_json(limits: Sequence[Limit], figures: Mapping[str, Any]) -> str:
    """Return limits with verdicts, and further figures, as JSON."""
    return json.dumps({"limits": [limit.to_dict() for limit in limits], **figures}, indent=1) + "\n"
