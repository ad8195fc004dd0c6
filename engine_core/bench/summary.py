"""From many samples to a median and a 99th percentile."""

import statistics
from collections.abc import Sequence

from proto.benchmark import Timing


def timing(samples: Sequence[float]) -> Timing | None:
    """None when nothing was measured."""
    if not samples:
        return None
    ordered = sorted(samples)
    return Timing(statistics.median(ordered), ordered[int(len(ordered) * 0.99)])
