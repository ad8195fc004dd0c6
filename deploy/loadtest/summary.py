"""From many figures to a few."""

import math
from collections.abc import Sequence


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
