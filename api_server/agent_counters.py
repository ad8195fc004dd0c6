"""What engines say of agents: the pins of their jobs, and how long jobs and tools take.

Owns its cells of the sheet and the names. Gauges of pins are with those of the engines.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from api_server.metric_sheet import Counter, Histogram, MetricSheet
from proto.stats import SchedulerStats

TOOL_SECONDS: Final = (
    *(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0),
)
JOB_SECONDS: Final = (
    *(0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 3840.0, 7680.0, 15360.0),
)

_COUNTERS: Final = {
    "num_pins_taken": ("pins_taken", "Turns whose KV was kept for the next one."),
    "num_pins_hit": ("pins_hit", "Kept KV that a later turn of its job found."),
    "num_pins_expired": ("pins_expired", "Kept KV whose time was over."),
    "num_pins_given_up": ("pins_given_up", "Kept KV that gave way to other requests."),
}
"""Field of SchedulerStats: name and text of the metric."""
_HISTOGRAMS: Final = {
    "job_seconds": (
        "job_completion_seconds",
        "First arrival of a job to the end of its last step.",
        JOB_SECONDS,
    ),
    "tool_seconds": (
        "tool_duration_seconds",
        "End of a turn to the next arrival of its job.",
        TOOL_SECONDS,
    ),
}


class AgentCounters:
    """Of all engines."""

    def __init__(self, sheet: MetricSheet) -> None:
        self._counters = {field: Counter(sheet) for field in _COUNTERS}
        self._histograms = {
            field: Histogram(sheet, bounds) for field, (_, _, bounds) in _HISTOGRAMS.items()
        }

    def add(self, stats: SchedulerStats) -> None:
        """What an engine has told of a step."""
        for field, counter in self._counters.items():
            counter.add(getattr(stats, field))
        for field, histogram in self._histograms.items():
            for seconds in getattr(stats, field):
                histogram.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"tokend:{name}", text, self._counters[field].value)
        for field, (name, text, _) in _HISTOGRAMS.items():
            counts, total = self._histograms[field].totals()
            bounds = [*map(repr, self._histograms[field].bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            yield HistogramMetricFamily(f"tokend:{name}", text, buckets, total)
