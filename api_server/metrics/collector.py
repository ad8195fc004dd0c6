"""What /metrics shows, under the names that vLLM's dashboards look for.

Owns the names of what is counted. The numbers lie in the `MetricSheet`, changed on the
event loop only and turned into Prometheus' text when someone asks: an observation costs
a bisection, no lock. Each API server shows the values of all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, get_args

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

from api_server.metrics.counters import AgentCounters, EngineGauges, HttpCounters, OffloadCounters
from api_server.metrics.metric_sheet import Counter, Gauge, Histogram, MetricSheet, News
from api_server.metrics.request_histograms import RequestHistograms
from proto.lifecycle import Role, WeightMemory, process_title
from proto.stats import SchedulerStats

LABELS: Final = ("model_name", "engine")
ENGINE: Final = "0"

# Bounds as vLLM has them, so that its dashboards show the same quantiles.
FIRST_TOKEN_SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_SECONDS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
BLOCK_SECONDS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    *(10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
REQUEST_TOKENS: Final = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics(Collector):
    """The daemon's statistics.

    incarnation: restarts of this API server. num_hung: restarts after a hang.
    in_flight: HTTP requests in flight, counted by the middleware.
    connections: of clients, entered and left by each. requests: observed by each request's stream.
    """

    def __init__(
        self, model_name: str, sheet: MetricSheet, incarnation: int = 0, num_hung: int = 0
    ) -> None:
        self._labels = (model_name, ENGINE)

        def counters(*names: str) -> dict[str, Counter]:
            return {name: Counter(sheet) for name in names}

        def news() -> dict[str, News]:
            return {process_title(role): News(sheet) for role in get_args(Role)}

        self._engines = EngineGauges(sheet)
        self._num_preemptions = Counter(sheet)
        self._prefix_cache_queries = Counter(sheet)
        self._prefix_cache_hits = Counter(sheet)
        self._external_queries = Counter(sheet)
        self._external_hits = Counter(sheet)
        self._corrupted_requests = Counter(sheet)
        self._queue_limits = (0, 0)
        self._weights: tuple[WeightMemory, ...] = ()
        self._rejections = counters("max_num_queued_reqs", "max_num_queued_tokens", "restart")
        self._cut_short = counters(
            "disconnect", "slow_reader", "queue_timeout", "timeout", "operator", "cancel"
        )
        self._prompt_tokens = Counter(sheet)
        self._generation_tokens = Counter(sheet)
        self._restarts = news()
        self._restarts[process_title("api_server")].raise_to(incarnation)
        self._watchdog_kills = news()
        self._watchdog_kills[process_title("api_server")].raise_to(num_hung)
        self._parsed = counters("tool_call", "no_tool_call")
        self._ended = counters("stop", "length", "repetition", "abort", "error")
        self._first_token = Histogram(sheet, FIRST_TOKEN_SECONDS)
        self._inter_token = Histogram(sheet, INTER_TOKEN_SECONDS)
        self._latency = Histogram(sheet, REQUEST_SECONDS)
        self._queue = Histogram(sheet, REQUEST_SECONDS)
        self._prompt_lengths = Histogram(sheet, REQUEST_TOKENS)
        self._generation_lengths = Histogram(sheet, REQUEST_TOKENS)
        self._step_tokens = Histogram(sheet, STEP_TOKENS)
        self._block_lifetime = Histogram(sheet, BLOCK_SECONDS)
        self._block_idle = Histogram(sheet, BLOCK_SECONDS)
        self._block_reuse_gap = Histogram(sheet, BLOCK_SECONDS)
        self._offload = OffloadCounters(sheet)
        self._agents = AgentCounters(sheet)
        self._discarded = counters("late", "after_stop", "repeated")
        self.in_flight = Gauge(sheet)
        self.connections = Gauge(sheet)
        self.requests = RequestHistograms(
            sheet, token_seconds=INTER_TOKEN_SECONDS, seconds=REQUEST_SECONDS, tokens=REQUEST_TOKENS
        )
        self._sheet = sheet
        self._cache: dict[str, str] = {}
        self._registry = CollectorRegistry()
        if sheet.num_rows == 1:  # else they would be of whichever process is asked
            for collector in (ProcessCollector, PlatformCollector, GCCollector):
                collector(registry=self._registry)
        self._registry.register(self)

    def count_http(self, routes: Iterable[BaseRoute]) -> HttpCounters:
        """Shown with the rest from now on; to be called once."""
        counters = HttpCounters(self._sheet, routes)
        self._registry.register(counters)
        return counters

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def restarted(self, role: Role, hung: bool) -> None:
        """A process died and was started again. hung: it was killed, because it did not move."""
        self._restarts[process_title(role)].add()
        if hung:
            self._watchdog_kills[process_title(role)].add()

    def meet_engine(self, epoch: int) -> None:
        """Count the statistics of this engine from now on."""
        self._engines.meet(epoch)

    def forget_engine(self, epoch: int) -> None:
        """It is gone, and with it what its gauges showed."""
        self._engines.forget(epoch)

    def scheduler_stats(self, stats: SchedulerStats, epoch: int, timestamp: float) -> None:
        """Gauges and deltas of a step; gauges of engines beside each other are added up.

        timestamp: monotonic seconds of the engine.
        """
        self._engines.write(epoch, timestamp, stats)
        self._num_preemptions.add(stats.num_preemptions)
        self._prefix_cache_queries.add(stats.prefix_cache_queries)
        self._prefix_cache_hits.add(stats.prefix_cache_hits)
        self._external_queries.add(stats.external_prefix_cache_queries)
        self._external_hits.add(stats.external_prefix_cache_hits)
        self._corrupted_requests.add(stats.num_corrupted)
        self._offload.add(stats.kv_media)
        self._agents.add(stats)
        self._discarded["late"].add(stats.num_discarded_tokens)
        for number in stats.request_preemptions:
            self.requests.preempted(number)
        if stats.num_scheduled_tokens:
            self._step_tokens.observe(stats.num_scheduled_tokens)
        for eviction in stats.kv_evictions:
            self._block_lifetime.observe(eviction.lifetime)
            self._block_idle.observe(eviction.idle)
            for gap in eviction.reuse_gaps:
                self._block_reuse_gap.observe(gap)

    def queue_limits(self, num_requests: int, num_tokens: int) -> None:
        """What the engine lets wait; 0 for no limit."""
        self._queue_limits = num_requests, num_tokens

    def discarded(self, cause: str, num_tokens: int) -> None:
        """Count tokens that are not shown: "after_stop" (a stop string) or "repeated"."""
        self._discarded[cause].add(num_tokens)

    def cache_config(self, **settings: object) -> None:
        """How the engine's KV pool is laid out."""
        self._cache = {name: str(value) for name, value in settings.items()}

    def weight_memory(self, weights: tuple[WeightMemory, ...]) -> None:
        """What the weights take, by form."""
        self._weights = weights

    def admission_rejected(self, reason: str) -> None:
        """A request was refused because too many wait; `reason`: the limit."""
        self._rejections[reason].add()

    def cut_short(self, cause: str) -> None:
        """A request was ended before its end: by its client, an operator, a limit of time."""
        self._cut_short[cause].add()

    def prompt_accepted(self, num_tokens: int) -> None:
        self._prompt_tokens.add(num_tokens)
        self._prompt_lengths.observe(num_tokens)

    def queue_time(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def first_token(self, seconds: float, num_tokens: int) -> None:
        """`seconds` from the arrival of the request to the first token of a choice."""
        self._first_token.observe(seconds)
        self._generation_tokens.add(num_tokens)

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """`seconds` since the choice's last output."""
        self._inter_token.observe(seconds)
        self._generation_tokens.add(num_tokens)

    def choice_ended(self, reason: str, num_tokens: int) -> None:
        """`reason`: stop, length, repetition, abort or error."""
        self._ended[reason].add()
        self._generation_lengths.observe(num_tokens)

    def choice_parsed(self, has_calls: bool) -> None:
        """The whole text of a choice that might call tools was read."""
        self._parsed["tool_call" if has_calls else "no_tool_call"].add()

    def request_ended(self, seconds: float) -> None:
        """A request was answered in full, `seconds` after it arrived."""
        self._latency.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        engines = list(self._engines.latest())
        num_running = sum(each.num_running for each in engines)
        num_waiting = sum(each.num_waiting for each in engines)
        usage = max((each.kv_cache_usage for each in engines), default=0.0)
        for name, text, value in (
            ("num_requests_running", "Requests in execution batches.", num_running),
            ("num_requests_waiting", "Requests waiting to run.", num_waiting),
            ("kv_cache_usage_perc", "KV blocks in use, 0 to 1.", usage),
            (
                "kv_offload_cpu_cache_usage_perc",
                "Host memory for KV in use, 0 to 1.",
                max((each.cpu_offload_usage for each in engines), default=0.0),
            ),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        num_requests, num_tokens = self._queue_limits
        for name, text, value in (
            ("queued_reqs", "Choices not begun.", sum(each.num_queued_reqs for each in engines)),
            (
                "queued_tokens",
                "Prompt tokens of those.",
                sum(each.num_queued_tokens for each in engines),
            ),
            (
                "pinned_blocks",
                "KV blocks kept for jobs between turns.",
                sum(each.num_pinned_blocks for each in engines),
            ),
            ("pinned_jobs", "Those jobs.", sum(each.num_pinned_jobs for each in engines)),
            ("max_num_queued_reqs", "Most choices not begun; 0: any.", num_requests),
            ("max_num_queued_tokens", "Most prompt tokens of those; 0: any.", num_tokens),
        ):
            yield GaugeMetricFamily(f"tokend:{name}", text, value)
        weights = GaugeMetricFamily(
            "tokend:weights_bytes", "Memory of the weights of products.", labels=("form",)
        )
        for held in self._weights:
            weights.add_metric((held.form,), held.num_bytes)
        yield weights
        if self._cache:
            info = GaugeMetricFamily(
                "vllm:cache_config_info", "The KV pool.", labels=(*LABELS, *self._cache)
            )
            info.add_metric((*self._labels, *self._cache.values()), 1)
            yield info
        deferred = sum(each.num_deferred for each in engines)
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting to run: for room, or for something else.",
            labels=(*LABELS, "reason"),
        )
        waiting.add_metric((*self._labels, "capacity"), num_waiting - deferred)
        waiting.add_metric((*self._labels, "deferred"), deferred)
        yield waiting

    def _counters(self) -> Iterator[Metric]:
        for name, text, counter in (
            ("num_preemptions", "Preemptions by the scheduler.", self._num_preemptions),
            ("prompt_tokens", "Prompt tokens accepted.", self._prompt_tokens),
            ("generation_tokens", "Tokens generated.", self._generation_tokens),
            (
                "prefix_cache_queries",
                "Tokens looked up in the prefix cache.",
                self._prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", self._prefix_cache_hits),
            (
                "external_prefix_cache_queries",
                "Tokens that the KV connector was asked for.",
                self._external_queries,
            ),
            (
                "external_prefix_cache_hits",
                "Tokens whose KV the connector had.",
                self._external_hits,
            ),
            ("corrupted_requests", "Requests with scores not finite.", self._corrupted_requests),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            family.add_metric(self._labels, counter.value)
            yield family
        own = dict(zip(LABELS, self._labels, strict=True))
        for name, text, label, counters, others in (
            ("vllm:request_success", "Choices ended.", "finished_reason", self._ended, own),
            (
                "vllm:tool_call_parser_invocations",
                "Choices that might call tools.",
                "outcome",
                self._parsed,
                own,
            ),
            ("vllm:admission_rejections", "Refused by limit.", "reason", self._rejections, own),
            ("tokend:requests_cut_short", "Requests ended.", "cause", self._cut_short, {}),
            ("tokend:discarded_tokens", "Tokens that nobody got.", "cause", self._discarded, {}),
            ("tokend:restarts", "Processes started again.", "role", self._restarts, {}),
            ("tokend:watchdog_kills", "Those that hung.", "role", self._watchdog_kills, {}),
        ):
            yield _by_label(name, text, others, label, counters)

        yield from self._offload.collect(LABELS, self._labels)
        yield from self._agents.collect()

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self._first_token),
            ("inter_token_latency_seconds", "Time between outputs.", self._inter_token),
            ("e2e_request_latency_seconds", "Arrival to last token.", self._latency),
            ("request_queue_time_seconds", "Time before the first step.", self._queue),
            ("request_prompt_tokens", "Prompt tokens of a request.", self._prompt_lengths),
            ("request_generation_tokens", "Tokens of a choice.", self._generation_lengths),
            ("iteration_tokens_total", "Tokens computed in a step.", self._step_tokens),
            ("kv_block_lifetime_seconds", "KV block written to overwritten.", self._block_lifetime),
            ("kv_block_idle_before_evict_seconds", "Last use to overwritten.", self._block_idle),
            ("kv_block_reuse_gap_seconds", "Time between uses.", self._block_reuse_gap),
        ):
            yield _family(histogram, f"vllm:{name}", text, self._labels)
        yield from self.requests.collect(LABELS, self._labels)


def _by_label(
    name: str,
    text: str,
    others: Mapping[str, str],
    label: str,
    counters: Mapping[str, Counter] | Mapping[str, News],
) -> Metric:
    """A counter for each value of `label`. others: labels that all of them have."""
    family = CounterMetricFamily(name, text, labels=(*others, label))
    for value, counter in counters.items():
        family.add_metric((*others.values(), value), counter.value)
    return family


def _family(
    histogram: Histogram, name: str, text: str, labels: Sequence[str]
) -> HistogramMetricFamily:
    """Prometheus' form: cumulative counts."""
    counts, total = histogram.totals()
    names = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    family = HistogramMetricFamily(name, text, labels=LABELS)
    family.add_metric(labels, list(zip(names, accumulate(counts), strict=True)), total)
    return family
