"""What /metrics shows, under the names that vLLM's dashboards look for.

Owns every counter and histogram of the front end. They are plain numbers, changed
on the event loop only and turned into Prometheus' text when someone asks: an
observation costs a bisection, no lock.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
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

from proto.lifecycle import Role, process_title
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
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts per bucket. `bounds`: upper ends, ascending, without infinity."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, labels: Sequence[str]) -> HistogramMetricFamily:
        """Prometheus' form: cumulative counts."""
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric(labels, buckets, self._sum)
        return family


class Metrics(Collector):
    """The daemon's statistics, as seen by one front end."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self._labels = (model_name, ENGINE)
        tokens = one_two_five(max_model_len)
        self._stats: dict[int, SchedulerStats] = {}
        self._num_preemptions = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0
        self._corrupted_requests = 0
        self._queue_limits = (0, 0)
        self._rejections: defaultdict[str, int] = defaultdict(int)
        self._rejections.update(max_num_queued_reqs=0, max_num_queued_tokens=0, restart=0)
        self._cut_short: defaultdict[str, int] = defaultdict(int)
        self._cut_short.update(disconnect=0, slow_reader=0, queue_timeout=0, timeout=0)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._restarts = {process_title(role): 0 for role in get_args(Role)}
        self._watchdog_kills = dict(self._restarts)
        self._ended: defaultdict[str, int] = defaultdict(int)
        self._ended.update(stop=0, length=0, abort=0, error=0)
        self._first_token = Histogram(FIRST_TOKEN_SECONDS)
        self._inter_token = Histogram(INTER_TOKEN_SECONDS)
        self._latency = Histogram(REQUEST_SECONDS)
        self._queue = Histogram(REQUEST_SECONDS)
        self._prompt_lengths = Histogram(tokens)
        self._generation_lengths = Histogram(tokens)
        self._step_tokens = Histogram(STEP_TOKENS)
        self._block_lifetime = Histogram(BLOCK_SECONDS)
        self._block_idle = Histogram(BLOCK_SECONDS)
        self._block_reuse_gap = Histogram(BLOCK_SECONDS)
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._registry.register(self)

    def text(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def restarted(self, role: Role, hung: bool) -> None:
        """A process died and was started again. hung: it was killed, because it did not move."""
        self._restarts[process_title(role)] += 1
        self._watchdog_kills[process_title(role)] += hung

    def forget_engine(self, epoch: int) -> None:
        """It is gone, and with it what its gauges showed."""
        self._stats.pop(epoch, None)

    def scheduler_stats(self, stats: SchedulerStats, epoch: int) -> None:
        """Gauges and deltas of a step; gauges of engines beside each other are added up."""
        self._stats[epoch] = stats
        self._num_preemptions += stats.num_preemptions
        self._prefix_cache_queries += stats.prefix_cache_queries
        self._prefix_cache_hits += stats.prefix_cache_hits
        self._corrupted_requests += stats.num_corrupted
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

    def admission_rejected(self, reason: str) -> None:
        """A request was refused because too many wait; `reason`: the limit."""
        self._rejections[reason] += 1

    def cut_short(self, cause: str) -> None:
        """A request was ended before its end: by its client, by a limit of time."""
        self._cut_short[cause] += 1

    def prompt_accepted(self, num_tokens: int) -> None:
        self._prompt_tokens += num_tokens
        self._prompt_lengths.observe(num_tokens)

    def queue_time(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def first_token(self, seconds: float, num_tokens: int) -> None:
        """`seconds` from the arrival of the request to the first token of a choice."""
        self._first_token.observe(seconds)
        self._generation_tokens += num_tokens

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """`seconds` since the choice's last output."""
        self._inter_token.observe(seconds)
        self._generation_tokens += num_tokens

    def choice_ended(self, reason: str, num_tokens: int) -> None:
        """`reason`: stop, length, abort or error."""
        self._ended[reason] += 1
        self._generation_lengths.observe(num_tokens)

    def request_ended(self, seconds: float) -> None:
        """A request was answered in full, `seconds` after it arrived."""
        self._latency.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        engines = self._stats.values()
        num_running = sum(each.num_running for each in engines)
        num_waiting = sum(each.num_waiting for each in engines)
        usage = max((each.kv_cache_usage for each in engines), default=0.0)
        for name, text, value in (
            ("num_requests_running", "Requests in execution batches.", num_running),
            ("num_requests_waiting", "Requests waiting to run.", num_waiting),
            ("kv_cache_usage_perc", "KV blocks in use, 0 to 1.", usage),
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
            ("max_num_queued_reqs", "Most choices not begun; 0: any.", num_requests),
            ("max_num_queued_tokens", "Most prompt tokens of those; 0: any.", num_tokens),
        ):
            yield GaugeMetricFamily(f"tokend:{name}", text, value)
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
        for name, text, value in (
            ("num_preemptions", "Preemptions by the scheduler.", self._num_preemptions),
            ("prompt_tokens", "Prompt tokens accepted.", self._prompt_tokens),
            ("generation_tokens", "Tokens generated.", self._generation_tokens),
            (
                "prefix_cache_queries",
                "Tokens looked up in the prefix cache.",
                self._prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", self._prefix_cache_hits),
            ("corrupted_requests", "Requests with scores not finite.", self._corrupted_requests),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        ended = CounterMetricFamily(
            "vllm:request_success", "Choices that ended.", labels=(*LABELS, "finished_reason")
        )
        for reason, count in self._ended.items():
            ended.add_metric((*self._labels, reason), count)
        yield ended
        for name, text, by_role in (
            ("restarts", "Processes that were started again.", self._restarts),
            ("watchdog_kills", "Those of them that were killed for a hang.", self._watchdog_kills),
        ):
            family = CounterMetricFamily(f"tokend:{name}", text, labels=("role",))
            for role, count in by_role.items():
                family.add_metric((role,), count)
            yield family
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused by limit.", labels=(*LABELS, "reason")
        )
        for reason, count in self._rejections.items():
            rejections.add_metric((*self._labels, reason), count)
        yield rejections
        cut_short = CounterMetricFamily(
            "tokend:requests_cut_short", "Requests ended by cause.", labels=("cause",)
        )
        for cause, count in self._cut_short.items():
            cut_short.add_metric((cause,), count)
        yield cut_short

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
            yield histogram.family(f"vllm:{name}", text, self._labels)


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    values: list[int] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > limit:
                return values
            values.append(digit * scale)
        scale *= 10
