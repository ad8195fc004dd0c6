"""From many figures to a few."""

from collections.abc import Sequence


def quantile(values: Sequence[float], part: float) -> float:
    """The one that `part` of the values (0 to 1) lie below; there must be one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
