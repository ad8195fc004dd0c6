"""What KV connectors copied, by medium.

Owns its cells of the sheet. A medium that is not known here, of somebody else's, counts as another.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from api_server.metric_sheet import Counter, MetricSheet
from proto.stats import KVMediumStats

_MEDIA: Final = ("CPU", "disk", "remote", "other")
_FAMILIES: Final = {
    "load_bytes": ("vllm:kv_offload_load_bytes", "Bytes of KV loaded from a medium."),
    "load_seconds": ("vllm:kv_offload_load_time", "Seconds of loads from a medium."),
    "num_loads": ("tokend:kv_offload_loads", "Loads from a medium."),
    "store_bytes": ("vllm:kv_offload_store_bytes", "Bytes of KV stored on a medium."),
    "store_seconds": ("vllm:kv_offload_store_time", "Seconds of stores on a medium."),
    "num_stores": ("tokend:kv_offload_stores", "Stores on a medium."),
    "num_skipped": ("vllm:kv_offload_stores_skipped", "Blocks not stored: there, or not wanted."),
    "num_unstored": ("vllm:kv_offload_allocation_failure", "Blocks not stored for want of room."),
    "num_failed": ("tokend:kv_offload_failures", "Loads and stores that failed."),
}
"""Field of KVMediumStats: name and text of the metric."""


class OffloadCounters:
    """Of all engines."""

    def __init__(self, sheet: MetricSheet) -> None:
        self._counters = {
            (field, medium): Counter(sheet) for field in _FAMILIES for medium in _MEDIA
        }

    def add(self, media: Sequence[KVMediumStats]) -> None:
        """What an engine has told of a step."""
        for stats in media:
            medium = stats.medium if stats.medium in _MEDIA else _MEDIA[-1]
            for field in _FAMILIES:
                self._counters[field, medium].add(getattr(stats, field))

    def collect(self, names: Sequence[str], values: Sequence[str]) -> Iterator[Metric]:
        """names, values: labels that all have. A medium of which nothing was heard is left out."""
        counts = {place: counter.value for place, counter in self._counters.items()}
        used = [each for each in _MEDIA if any(counts[field, each] for field in _FAMILIES)]
        for field, (name, text) in _FAMILIES.items():
            family = CounterMetricFamily(name, text, labels=(*names, "medium"))
            for medium in used:
                family.add_metric((*values, medium), counts[field, medium])
            yield family
