"""What engines say of agents: the pins of their jobs, and how long jobs and tools take.

Owns its cells of the sheet and the names. Gauges of pins are with those of the engines.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_server.metrics.metric_sheet import Counter, Histogram, MetricSheet
from proto.stats import KVMediumStats, SchedulerStats

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
        """Add the statistics of one step."""
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


# HTTP requests by route, under the names of FastAPI's usual instrumentation.


DURATION_SECONDS: Final = (0.1, 0.5, 1.0)
LEFT_OUT: Final = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
"""And what is below these."""
NO_ROUTE: Final = "none"
_STATUSES: Final = ("2xx", "3xx", "4xx", "5xx")
_NO_METHOD: Final = "none"

_Place = tuple[str, str]
"""Handler, which is a route's template, and method."""


class HttpCounters:
    """routes: those that there are; whatever is none of them counts as no route."""

    def __init__(self, sheet: MetricSheet, routes: Iterable[BaseRoute]) -> None:
        places = sorted(
            (route.path, method)
            for route in routes
            if isinstance(route, Route) and not _is_left_out(route.path)
            for method in (route.methods or set()) - {"HEAD"}
        )
        self._requests: dict[_Place, dict[str, Counter]] = {}
        self._seconds: dict[_Place, Histogram] = {}
        for place in (*places, (NO_ROUTE, _NO_METHOD)):
            self._requests[place] = {status: Counter(sheet) for status in _STATUSES}
            self._seconds[place] = Histogram(sheet, DURATION_SECONDS)

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """status: that was sent. seconds: from the headers to the last byte."""
        path = str(getattr(scope.get("route"), "path", scope["path"]))
        if _is_left_out(path):
            return
        place = (path, scope["method"])
        if place not in self._requests:
            place = (NO_ROUTE, _NO_METHOD)
        self._requests[place][f"{min(max(status // 100, 2), 5)}xx"].add()
        self._seconds[place].observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Routes that were asked for."""
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests answered.", labels=("handler", "method", "status")
        )
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds",
            "Headers to last byte.",
            labels=("handler", "method"),
        )
        bounds = [*map(repr, DURATION_SECONDS), "+Inf"]
        for place, by_status in self._requests.items():
            counts = {status: counter.value for status, counter in by_status.items()}
            if not any(counts.values()):
                continue
            for status, number in counts.items():
                if number:
                    requests.add_metric((*place, status), number)
            in_buckets, total = self._seconds[place].totals()
            buckets = list(zip(bounds, accumulate(in_buckets), strict=True))
            seconds.add_metric(place, buckets, total)
        yield requests
        yield seconds


class RequestCountMiddleware:
    """Middleware that counts what goes through it."""

    def __init__(self, app: ASGIApp, counters: HttpCounters) -> None:
        self._app = app
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begun = 0, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = status or 500  # which the server will say
            raise
        finally:
            if status:  # else its client left before there was one
                self._counters.answered(scope, status, time.perf_counter() - begun)


def _is_left_out(path: str) -> bool:
    return "/" + path.removeprefix("/").partition("/")[0] in LEFT_OUT


# What KV connectors copied, by medium.


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
        """Add the statistics of one step."""
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


# The last statistics of each engine, received by any API server.


_PLACES: Final = 3
"""Engines that an API server keeps statistics of; more than two are never there at once."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """Those of SchedulerStats."""

    num_running: float
    num_waiting: float
    kv_cache_usage: float
    num_deferred: float
    num_queued_reqs: float
    num_queued_tokens: float
    cpu_offload_usage: float
    num_pinned_blocks: float
    num_pinned_jobs: float


_NAMES: Final = tuple(field.name for field in fields(Gauges))
_HEAD: Final = 2
_RECORD: Final = _HEAD + len(_NAMES)
"""A place has the epoch of an engine, 0 for none; the time; and the gauges."""


class EngineGauges:
    """Gauges of the known engines, by epoch."""

    def __init__(self, sheet: MetricSheet) -> None:
        self._sheet = sheet
        self._places = [sheet.take(_RECORD) for _ in range(_PLACES)]
        self._known: set[int] = set()

    def meet(self, epoch: int) -> None:
        """Its figures count from now on."""
        self._known.add(epoch)

    def forget(self, epoch: int) -> None:
        """It is gone, and with it what its gauges showed."""
        self._known.discard(epoch)
        for place in self._places:
            if self._sheet.own(place, 1) == [epoch]:
                self._sheet.write(place, [0.0])

    def write(self, epoch: int, timestamp: float, stats: SchedulerStats) -> None:
        """timestamp: monotonic seconds of the engine."""
        held = [self._sheet.own(place, _HEAD) for place in self._places]
        index = next((index for index, (owner, _) in enumerate(held) if owner == epoch), None)
        if index is None:
            index = min(range(_PLACES), key=lambda each: (held[each][0] != 0, held[each][1]))
        values = [float(getattr(stats, name)) for name in _NAMES]
        self._sheet.write(self._places[index], [epoch, timestamp, *values])

    def latest(self) -> Iterator[Gauges]:
        """Of each engine that has said something, to whomever."""
        newest: dict[int, list[float]] = {}
        for place in self._places:
            for record in self._sheet.of_each(place, _RECORD):
                epoch = int(record[0])
                if epoch in self._known and record[1] >= newest.get(epoch, record)[1]:
                    newest[epoch] = record
        for record in newest.values():
            yield Gauges(*record[_HEAD:])
