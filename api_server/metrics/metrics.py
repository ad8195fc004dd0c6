"""What /metrics shows, under the names that vLLM's dashboards query.

Counters, histograms and gauges of an engine are listed in engine_metrics.toml; other metrics where
they are collected. The numbers lie in the `MetricSheet`, so each front end shows the values of all.
An observation costs a bisection and takes no lock; the text is made on request.

Metrics that vLLM has, too, have a label `engine`, the index of the engine; others are of all
engines together.
"""

import collections
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute

from api_server.metrics.engine_metrics import MEDIA, TABLES, EngineMetrics, known_medium
from api_server.metrics.http_metrics import HttpMetrics
from api_server.metrics.metric_sheet import (
    BroadcastCounter,
    Counter,
    EngineGauges,
    EngineValues,
    Gauge,
    Histogram,
    MetricSheet,
)
from proto.messages.kv_events import DEVICE_MEDIUM
from proto.messages.lifecycle import EngineReady, HealthStatus, Role, process_title
from proto.messages.lora import AdapterUsage
from proto.messages.stats import SchedulerStats

_JOINS: Final[Mapping[str, Callable[[list[float]], float]]] = {"sum": sum, "max": max}
_ENGINE_GAUGES: Final[Mapping[str, tuple[str, str, Callable[[list[float]], float]]]] = {
    field: (name, text, _JOINS[join]) for field, (name, text, join) in TABLES["gauges"].items()
}
"""Field of SchedulerStats → name and help text of the gauge, and what joins those of engines.

num_deferred is collected, too: `vllm:num_requests_waiting_by_reason` shows it."""
_TIER_MEDIA: Final = (DEVICE_MEDIUM, "CPU states", "disk states", *MEDIA)
"""Media whose size may be known, of which the first is the KV pool."""
_TIER_GAUGES: Final = {
    "num_blocks": ("tokend:kv_blocks", "Blocks for KV on a medium."),
    "num_free": ("tokend:kv_free_blocks", "Those of them that are not in use."),
}

_NO_STATUS: Final = HealthStatus()


class Metrics(Collector):
    """The metrics of the daemon.

    incarnation: restarts of this front end. num_hung: its restarts after a hang.
    model_name: value of the label, which a reload may change. in_flight: HTTP requests in flight.
    connections: open connections of clients.
    max_loras: most adapters in a step; None if none are served.
    engines: of each engine, what it and its requests feed.
    """

    def __init__(
        self,
        model_name: str,
        sheet: MetricSheet,
        incarnation: int = 0,
        num_hung: int = 0,
        num_engines: int = 1,
    ) -> None:
        self._sheet = sheet
        self.model_name = model_name
        self.max_loras: int | None = None
        self._adapter_usage: dict[int, AdapterUsage] = {}
        self._properties: dict[int, EngineReady] = {}
        self._ready = True
        self._missing_engines: Collection[int] = ()
        self._status = _NO_STATUS
        self._engine_gauges = EngineGauges(
            sheet,
            (
                *_ENGINE_GAUGES,
                "num_deferred",
                *(f"{field} {medium}" for field in _TIER_GAUGES for medium in _TIER_MEDIA),
            ),
            num_engines,
        )
        self.in_flight = Gauge(sheet)
        self.connections = Gauge(sheet)
        self._define_process_metrics(incarnation, num_hung)
        self.engines = [EngineMetrics(sheet) for _ in range(num_engines)]
        self._registry = CollectorRegistry()
        if sheet.num_rows == 1:  # with several front ends, they would differ between them
            for collector in (ProcessCollector, PlatformCollector, GCCollector):
                collector(registry=self._registry)
        self._registry.register(self)

    def _define_process_metrics(self, incarnation: int, num_hung: int) -> None:
        """Metrics that the supervisor's notifications feed."""
        roles = [process_title(role) for role in get_args(Role)]
        own_role = process_title("api_server")
        self._restarts = {role: BroadcastCounter(self._sheet) for role in roles}
        self._watchdog_kills = {role: BroadcastCounter(self._sheet) for role in roles}
        self._restarts[own_role].raise_to(incarnation)
        self._watchdog_kills[own_role].raise_to(num_hung)

    def register_http_metrics(self, routes: Iterable[BaseRoute]) -> HttpMetrics:
        """Return metrics of these routes, which are shown with the rest. Call once."""
        http_metrics = HttpMetrics(self._sheet, routes)
        self._registry.register(http_metrics)
        return http_metrics

    def render(
        self,
        *,
        ready: bool = True,
        missing_engines: Collection[int] = (),
        status: HealthStatus = _NO_STATUS,
    ) -> bytes:
        """Return all metrics in Prometheus' text format 0.0.4.

        ready, missing_engines: see `/health/ready`. status: the last one of the supervisor.
        """
        self._ready, self._missing_engines, self._status = ready, missing_engines, status
        return generate_latest(self._registry)

    # What happened. Each method belongs to one event.

    def count_restart(self, role: Role, hung: bool) -> None:
        """Count the restart of a process. hung: the watchdog had killed it."""
        self._restarts[process_title(role)].increment()
        if hung:
            self._watchdog_kills[process_title(role)].increment()

    def count_rejection(self, limit: str) -> None:
        """Count a request that no engine got because of a limit."""
        self.engines[0].count_rejection(limit)

    def count_cut_short(self, cause: str) -> None:
        """Count a request that ended before an engine got it."""
        self.engines[0].count_cut_short(cause)

    def count_tool_parse(self, has_calls: bool) -> None:
        """Count a finished choice of a request with tools, for engine 0: front ends parse it."""
        self.engines[0].count_tool_parse(has_calls)

    def add_engine(self, epoch: int, engine: int = 0) -> None:
        self._engine_gauges.add_engine(epoch, engine)

    def remove_engine(self, epoch: int) -> None:
        self._engine_gauges.remove_engine(epoch)

    def set_engine_info(self, engine: int, properties: EngineReady) -> None:
        """Show queue limits, weights and KV pool of a current engine."""
        self._properties[engine] = properties

    def note_adapter_usage(self, engine: int, usage: AdapterUsage) -> None:
        """Show which adapters an engine uses now."""
        self._adapter_usage[engine] = usage

    def record_scheduler_stats(
        self, stats: SchedulerStats, epoch: int, timestamp: float, engine: int = 0
    ) -> None:
        """Record gauges and deltas of a step. timestamp: monotonic seconds of the engine."""
        self._engine_gauges.write(epoch, timestamp, _gauges(stats))
        self.engines[engine].record_stats(stats)

    def latest_engine_gauges(self) -> list[EngineValues]:
        """Return the latest gauges of each engine, by their names in SchedulerStats."""
        return self._engine_gauges.latest_values()

    # What is shown.

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_engine_gauges()
        yield from self._collect_engine_info()
        if self.max_loras is not None:
            yield from self._collect_adapters(self.max_loras)
        for name, text, counters in (
            ("tokend:restarts", "Processes that died and were restarted.", self._restarts),
            (
                "tokend:watchdog_kills",
                "Processes killed because they hung.",
                self._watchdog_kills,
            ),
        ):
            restarts = CounterMetricFamily(name, text, labels=("role",))
            for role, counter in counters.items():
                restarts.add_metric((role,), counter.value)
            yield restarts
        yield from self._collect_families()

    def _collect_families(self) -> Iterator[Metric]:
        """Counters and histograms, by engine if vLLM has them, too, else of all together."""
        for families in zip(*(engine.families for engine in self.engines), strict=True):
            name, text, label, first = families[0]
            is_histogram = any(isinstance(member, Histogram) for member in first.values())
            kind: Any = HistogramMetricFamily if is_histogram else CounterMetricFamily
            shown = kind(name, text, labels=self._names(name, label))
            for value in self._shown_values(label, first):
                members = [family.members[value] for family in families]
                if not name.startswith("vllm:"):
                    shown.add_metric(self._values(None, label, value), *_values_of(members))
                    continue
                for index, member in enumerate(members):
                    shown.add_metric(self._values(index, label, value), *_values_of([member]))
            yield shown

    def _shown_values(self, label: str, values: Iterable[str]) -> list[str]:
        """Return the values of a label, without media that no engine uses."""
        return [
            value
            for value in values
            if label != "medium" or any(engine.was_used(value) for engine in self.engines)
        ]

    def _names(self, name: str, *labels: str) -> tuple[str, ...]:
        """Return the names of a metric's labels, without empty ones."""
        common = ("model_name", "engine") if name.startswith("vllm:") else ()
        return (*common, *filter(None, labels))

    def _values(self, engine: int | None, label: str, value: str) -> tuple[str, ...]:
        """Return the values of a metric's labels. engine: None for all together."""
        common = () if engine is None else (self.model_name, str(engine))
        return (*common, value) if label else common

    def _collect_engine_gauges(self) -> Iterator[Metric]:
        latest = self._engine_gauges.latest_values()
        by_engine: list[list[dict[str, float]]] = [[] for _ in self.engines]
        for values in latest:  # of an engine and its successor during a reload
            by_engine[values.engine].append(values.gauges)
        for field, (name, text, join) in _ENGINE_GAUGES.items():
            of_engines = [
                join([gauges[field] for gauges in engine] or [0.0]) for engine in by_engine
            ]
            yield self._gauge(name, text, of_engines, join)
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting to run: for KV blocks, or for something else.",
            labels=self._names("vllm:", "reason"),
        )
        for index, engine in enumerate(by_engine):
            num_deferred = sum(gauges["num_deferred"] for gauges in engine)
            num_waiting = sum(gauges["num_waiting"] for gauges in engine)
            for reason, number in (
                ("capacity", num_waiting - num_deferred),
                ("deferred", num_deferred),
            ):
                waiting.add_metric(self._values(index, "reason", reason), number)
        yield waiting
        for field, (name, text) in _TIER_GAUGES.items():
            by_medium = {
                medium: sum(values.gauges[f"{field} {medium}"] for values in latest)
                for medium in _TIER_MEDIA
                if any(values.gauges[f"num_blocks {medium}"] for values in latest)
            }
            yield _gauge_by("medium", name, text, by_medium)

    def _collect_engine_info(self) -> Iterator[Metric]:
        """Readiness; queue limits, weights and KV pool of the current engines."""
        engines = self._properties
        yield self._gauge("tokend:ready", "Whether /health/ready is true: 1 or 0.", [self._ready])
        yield _gauge_by(
            "engine",
            "tokend:engine_ready",
            "Whether an engine takes requests: 1 or 0.",
            {str(index): index not in self._missing_engines for index in range(len(self.engines))},
        )
        yield _gauge_by(
            "role",
            "tokend:standby_processes",
            "Standby processes that are ready to replace one that dies.",
            {"engine": self._status.standby_engines, "worker": self._status.standby_workers},
        )
        for what in ("queued_reqs", "queued_tokens"):
            limits = [getattr(engine, f"max_num_{what}") for engine in engines.values()]
            limit = sum(limits) if all(limits) else 0
            yield self._gauge(f"tokend:max_num_{what}", f"Limit of {what}; 0: none.", [limit])
        num_bytes: collections.Counter[str] = collections.Counter()
        shared: collections.Counter[str] = collections.Counter()
        for engine in engines.values():
            for memory in engine.weights:
                if memory.is_shared:
                    shared[memory.form] = max(shared[memory.form], memory.num_bytes)
                else:
                    num_bytes[memory.form] += memory.num_bytes
        yield _gauge_by(
            "form",
            "tokend:weights_bytes",
            "Memory of the weight matrices; of those that engines share, once.",
            num_bytes + shared,
        )
        if engines:
            info = GaugeMetricFamily(
                "vllm:cache_config_info",
                "The KV pool.",
                labels=self._names("vllm:", "block_size", "num_gpu_blocks"),
            )
            for index, engine in sorted(engines.items()):
                sizes = (str(engine.block_size), str(engine.num_blocks))
                info.add_metric((self.model_name, str(index), *sizes), 1)
            yield info

    def _collect_adapters(self, max_loras: int) -> Iterator[Metric]:
        """Which adapters have requests; the value is the time, as in vLLM."""
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters with running requests, and with waiting ones only.",
            labels=self._names(
                "vllm:", "max_lora", "waiting_lora_adapters", "running_lora_adapters"
            ),
        )
        for index in range(len(self.engines)):
            usage = self._adapter_usage.get(index)
            waiting = "" if usage is None else ",".join(usage.waiting)
            running = "" if usage is None else ",".join(usage.running)
            labels = (self.model_name, str(index), str(max_loras), waiting, running)
            info.add_metric(labels, time.time())
        yield info
        usages = self._adapter_usage.values()
        yield self._gauge(
            "tokend:lora_resident",
            "Adapters in the workers' memory.",
            [sum(usage.num_resident for usage in usages)],
        )
        num_corrupted: collections.Counter[str] = collections.Counter()
        for usage in usages:
            num_corrupted.update(usage.num_corrupted)
        yield _gauge_by(
            "adapter",
            "tokend:lora_corrupted_requests",
            "Requests of an adapter whose logits were not finite, since it was loaded.",
            num_corrupted,
        )

    def _gauge(
        self,
        name: str,
        text: str,
        values: Sequence[float],
        join: Callable[[list[float]], float] = sum,
    ) -> Metric:
        """Return a gauge with a value for each engine, or their join if vLLM has no such metric."""
        family = GaugeMetricFamily(name, text, labels=self._names(name))
        if not name.startswith("vllm:"):
            family.add_metric((), join(list(values)))
            return family
        for index, value in enumerate(values):
            family.add_metric(self._values(index, "", ""), value)
        return family


def _gauge_by(label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with a value for each value of a label."""
    family = GaugeMetricFamily(name, text, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family


def _values_of(members: Sequence[Counter | Histogram]) -> tuple[Any, ...]:
    """Return what counters or histograms of the same bounds show together."""
    histograms = [member for member in members if isinstance(member, Histogram)]
    if histograms:
        return Histogram.joined_buckets(histograms)
    return (sum(member.value for member in members if not isinstance(member, Histogram)),)


def _gauges(stats: SchedulerStats) -> dict[str, float]:
    """Return the gauges of an engine by name; those of a tier by their name and medium."""
    gauges = {name: float(getattr(stats, name)) for name in (*_ENGINE_GAUGES, "num_deferred")}
    gauges |= {f"{field} {medium}": 0.0 for field in _TIER_GAUGES for medium in _TIER_MEDIA}
    for tier in stats.kv_tiers:
        medium = known_medium(tier.medium, _TIER_MEDIA)
        gauges[f"num_blocks {medium}"] += tier.num_blocks
        gauges[f"num_free {medium}"] += max(0, tier.num_blocks - tier.num_used)
    return gauges
