"""From many figures to a few."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], part: float) -> float:
    """The nearest rank: the least of the values that `part` of them (0 to 1) do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * part) - 1)]
