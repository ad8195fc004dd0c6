"""What /metrics shows, under the names that vLLM's dashboards query.

`Metrics.__init__` lists every counter and histogram once, with its name and help text; gauges are
listed where they are collected. The numbers lie in the `MetricSheet`, so each front end shows the
values of all. An observation costs a bisection and takes no lock; the text is made on request.

    arrival ── queue ──▶ first step ── prefill ──▶ first token ── decode ──▶ last token
                         └──────────────────── inference ───────────────────┘
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

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

from api_server.metrics.http_metrics import HttpMetrics
from api_server.metrics.metric_sheet import (
    BroadcastCounter,
    Counter,
    EngineGauges,
    Gauge,
    Histogram,
    MetricSheet,
)
from proto.messages.kv_events import DEVICE_MEDIUM
from proto.messages.lifecycle import EngineReady, Role, process_title
from proto.messages.lora import AdapterUsage
from proto.messages.stats import KVMediumStats, SchedulerStats
from proto.settings.speculative_config import METHODS

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
TOOL_SECONDS: Final = (
    *(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0),
)
LORA_LOAD_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
AGENT_SESSION_SECONDS: Final = (
    *(0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 3840.0, 7680.0, 15360.0),
)
REQUEST_TOKENS: Final = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_CHOICES: Final = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS: Final = (1, 2, 5, 10, 20, 50, 100)

# of vLLM's offloading connector
COPY_BYTES: Final = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
LOOKUP_SECONDS: Final = (1e-5, 5e-5, 1e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
LOOKUP_WAIT_SECONDS: Final = (1e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
COPY_SECONDS: Final = (
    *(1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0),
)

SHARES: Final = (0.01, 0.02, 0.05, *(tenth / 10 for tenth in range(1, 11)))
_ENGINE_GAUGES: Final[Mapping[str, tuple[str, str, Callable[[list[float]], float]]]] = {
    "num_running": ("vllm:num_requests_running", "Requests in execution batches.", sum),
    "num_waiting": ("vllm:num_requests_waiting", "Requests waiting to run.", sum),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1.", max),
    "cpu_offload_usage": (
        "vllm:kv_offload_cpu_cache_usage_perc",
        "Used share of the host memory for KV, 0 to 1.",
        max,
    ),
    "encoder_cache_usage": (
        "tokend:encoder_cache_usage",
        "Used share of the rows of encoder output of images, 0 to 1.",
        max,
    ),
    "num_queued_reqs": ("tokend:queued_reqs", "Choices that wait for their first step.", sum),
    "num_queued_tokens": ("tokend:queued_tokens", "Prompt tokens of these choices.", sum),
    "num_pinned_blocks": (
        "tokend:pinned_blocks",
        "KV blocks retained for agent sessions between turns.",
        sum,
    ),
    "num_pinned_agent_sessions": (
        "tokend:pinned_jobs",
        "Agent sessions whose KV blocks are retained.",
        sum,
    ),
}
"""Field of SchedulerStats → name and help text of the gauge, and what joins those of two engines.

num_deferred is collected, too: `vllm:num_requests_waiting_by_reason` shows it."""
_STEP_COUNTERS: Final = {
    "num_preemptions": ("vllm:num_preemptions", "Preemptions by the scheduler."),
    "prefix_cache_queries": ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    "external_prefix_cache_queries": (
        "vllm:external_prefix_cache_queries",
        "Tokens looked up by the KV connector.",
    ),
    "external_prefix_cache_hits": (
        "vllm:external_prefix_cache_hits",
        "Tokens found by the KV connector.",
    ),
    "estimated_flops": (
        "vllm:estimated_flops_per_gpu",
        "Floating-point operations of one worker, by the model's shape.",
    ),
    "estimated_read_bytes": (
        "vllm:estimated_read_bytes_per_gpu",
        "Bytes of weights and KV that one worker read, by the model's shape.",
    ),
    "estimated_write_bytes": (
        "vllm:estimated_write_bytes_per_gpu",
        "Bytes of KV that one worker wrote, by the model's shape.",
    ),
    "num_corrupted": ("vllm:corrupted_requests", "Requests whose logits were not finite."),
    "num_drafts": ("vllm:spec_decode_num_drafts", "Drafts that steps verified."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Tokens of these drafts."),
    "num_accepted_tokens": (
        "vllm:spec_decode_num_accepted_tokens",
        "Those of them that were accepted.",
    ),
    "num_invalid_draft_tokens": (
        "tokend:spec_decode_num_invalid_tokens",
        "Tokens of drafts that a grammar refused before they were computed.",
    ),
    "num_pins_taken": ("tokend:pins_taken", "Turns whose KV was retained for the next turn."),
    "num_pins_hit": ("tokend:pins_hit", "Retained KV that a later turn of its agent session used."),
    "num_pins_expired": (
        "tokend:pins_expired",
        "Retained KV whose time ran out, or was not worth it.",
    ),
    "num_pins_given_up": (
        "tokend:pins_given_up",
        "Retained KV of which all or a part was evicted for other requests.",
    ),
}
"""Field of SchedulerStats → name and help text of the counter."""
REPORTED_DRAFT_POSITIONS: Final = 16
"""Positions of drafts with a counter of their own."""
_MEDIUM_COUNTERS: Final = {
    "num_skipped": (
        "vllm:kv_offload_stores_skipped",
        "Blocks not stored: stored before, or unlikely to be reused.",
    ),
    "num_unstored": (
        "vllm:kv_offload_allocation_failure",
        "Blocks not stored because the medium was full.",
    ),
    "num_failed": ("tokend:kv_offload_failures", "Loads and stores that failed."),
}
"""Field of KVMediumStats → name and help text of the counter."""
_COPY_METRICS: Final = {
    "loads": ("load", "loads from a medium"),
    "stores": ("store", "stores on a medium"),
}
"""Field of KVMediumStats → part of the names of its metrics, and what they count."""
_LOOKUP_HISTOGRAMS: Final = {
    "lookup_seconds": (
        "vllm:kv_offload_lookup_sync_delay_seconds",
        "Time of a lookup of a request on a medium.",
        LOOKUP_SECONDS,
    ),
    "lookup_wait_seconds": (
        "vllm:kv_offload_lookup_async_delay_seconds",
        "From the first lookup of a request without an answer to the answer.",
        LOOKUP_WAIT_SECONDS,
    ),
}
"""Field of KVMediumStats → name, help text and bounds of the histogram."""
_OUTSIDE: Final = "outside"
"""Source of drafts by proposers of other packages."""
_MEDIA: Final = ("CPU", "disk", "remote", "other")
_TIER_MEDIA: Final = (DEVICE_MEDIUM, "CPU states", "disk states", *_MEDIA)
"""Media whose size may be known, of which the first is the KV pool."""
_TIER_GAUGES: Final = {
    "num_blocks": ("tokend:kv_blocks", "Blocks for KV on a medium."),
    "num_free": ("tokend:kv_free_blocks", "Those of them that are not in use."),
}
_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")


class Metrics(Collector):
    """The metrics of the daemon.

    incarnation: restarts of this front end. num_hung: its restarts after a hang.
    model_name: value of the label, which a reload may change. in_flight: HTTP requests in flight.
    connections: open connections of clients.
    max_loras: most adapters in a step; None if none are served. adapter_usage: of the engine now.
    """

    def __init__(
        self, model_name: str, sheet: MetricSheet, incarnation: int = 0, num_hung: int = 0
    ) -> None:
        self._sheet = sheet
        self.model_name = model_name
        self._families: list[_Family] = []
        self.max_loras: int | None = None
        self.adapter_usage: AdapterUsage | None = None
        self._engine: EngineReady | None = None
        self._ready = True
        self._engine_gauges = EngineGauges(
            sheet,
            (
                *_ENGINE_GAUGES,
                "num_deferred",
                *(f"{field} {medium}" for field in _TIER_GAUGES for medium in _TIER_MEDIA),
            ),
        )
        self.in_flight = Gauge(sheet)
        self.connections = Gauge(sheet)
        self._define_engine_metrics()
        self._define_request_metrics()
        self._define_process_metrics(incarnation, num_hung)
        self._registry = CollectorRegistry()
        if sheet.num_rows == 1:  # with several front ends, they would differ between them
            for collector in (ProcessCollector, PlatformCollector, GCCollector):
                collector(registry=self._registry)
        self._registry.register(self)

    @property
    def _vllm_labels(self) -> dict[str, str]:
        return {"model_name": self.model_name, "engine": "0"}

    def _define_engine_metrics(self) -> None:
        """Metrics that the engine's statistics feed."""
        self._step_counters = {
            field: self._counter(name, text) for field, (name, text) in _STEP_COUNTERS.items()
        }
        self._accepted_per_pos = self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens of drafts, by position in the draft.",
            "position",
            tuple(map(str, range(REPORTED_DRAFT_POSITIONS))),
        )
        self._drafted_by_source = self._counters(
            "tokend:spec_decode_num_draft_tokens_by_source",
            "Verified tokens of drafts, by the method that drafted them.",
            "source",
            (*METHODS, _OUTSIDE),
        )
        self._accepted_by_source = self._counters(
            "tokend:spec_decode_num_accepted_tokens_by_source",
            "Those of them that were accepted.",
            "source",
            (*METHODS, _OUTSIDE),
        )
        self._lora_evictions = self._counter(
            "tokend:lora_evictions", "Adapters evicted from the workers' memory for others."
        )
        self._lora_load_seconds = self._histogram(
            "tokend:lora_load_seconds", "Load of an adapter in all workers.", LORA_LOAD_SECONDS
        )
        self._encoder_queries = self._counter(
            "tokend:encoder_cache_queries", "Images whose encoder output requests needed."
        )
        self._encoder_hits = self._counter(
            "tokend:encoder_cache_hits", "Those of them that were encoded for another request."
        )
        self._encoder_rows = self._counter(
            "tokend:encoder_rows", "Rows of encoder output of images that were computed."
        )
        self._encoder_seconds = self._counter(
            "tokend:encoder_seconds", "Seconds of steps in which images were encoded."
        )
        self._medium_counters = {
            field: self._counters(name, text, "medium", _MEDIA)
            for field, (name, text) in _MEDIUM_COUNTERS.items()
        }
        self._copies = {
            field: _CopyMetrics(
                num_bytes=self._counters(
                    f"vllm:kv_offload_{part}_bytes", f"Bytes of {what}.", "medium", _MEDIA
                ),
                seconds=self._counters(
                    f"vllm:kv_offload_{part}_time", f"Seconds of {what}.", "medium", _MEDIA
                ),
                sizes=self._histograms(
                    f"vllm:kv_offload_{part}_size", f"Bytes of each of the {what}.", COPY_BYTES
                ),
                durations=self._histograms(
                    f"tokend:kv_offload_{part}_seconds",
                    f"Seconds of each of the {what}.",
                    COPY_SECONDS,
                ),
            )
            for field, (part, what) in _COPY_METRICS.items()
        }
        self._lookups = {
            field: self._histograms(name, text, bounds)
            for field, (name, text, bounds) in _LOOKUP_HISTOGRAMS.items()
        }
        self._step_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS
        )
        self._flops_share = self._histogram(
            "tokend:step_flops_utilization",
            "Share of --peak-tflops that a step reached.",
            SHARES,
        )
        self._bandwidth_share = self._histogram(
            "tokend:step_bandwidth_utilization",
            "Share of --peak-memory-gbps that a step reached.",
            SHARES,
        )
        self._block_lifetime = self._histogram(
            "vllm:kv_block_lifetime_seconds",
            "From the write of a KV block to its overwrite.",
            BLOCK_SECONDS,
        )
        self._block_idle = self._histogram(
            "vllm:kv_block_idle_before_evict_seconds",
            "From the last use of a KV block to its overwrite.",
            BLOCK_SECONDS,
        )
        self._block_reuse_gap = self._histogram(
            "vllm:kv_block_reuse_gap_seconds", "Between two uses of a KV block.", BLOCK_SECONDS
        )
        self._preemptions = self._histogram(
            "vllm:request_num_preemptions", "Preemptions of a choice.", NUM_PREEMPTIONS
        )
        self._preempted_seconds = self._histogram(
            "tokend:preempted_seconds",
            "From a preemption of a choice until it was scheduled again.",
            REQUEST_SECONDS,
        )
        self._agent_session_seconds = self._histogram(
            "tokend:job_completion_seconds",
            "From the first arrival of an agent session to the end of its last step.",
            AGENT_SESSION_SECONDS,
        )
        self._tool_seconds = self._histogram(
            "tokend:tool_duration_seconds",
            "From the end of a turn to the next arrival of its agent session.",
            TOOL_SECONDS,
        )

    def _define_request_metrics(self) -> None:
        """Metrics that the streams of requests feed."""
        self._rejections = self._counters(
            "vllm:admission_rejections",
            "Requests refused because of a limit.",
            "reason",
            ("max_num_queued_reqs", "max_num_queued_tokens", "restart"),
        )
        self._cut_short = self._counters(
            "tokend:requests_cut_short",
            "Requests ended before they finished.",
            "cause",
            ("disconnect", "slow_reader", "queue_timeout", "timeout", "operator", "cancel"),
        )
        self._finished_choices = self._counters(
            "vllm:request_success",
            "Choices finished.",
            "finished_reason",
            ("stop", "length", "repetition", "abort", "error"),
        )
        self._tool_parses = self._counters(
            "vllm:tool_call_parser_invocations",
            "Finished choices of requests with tools.",
            "outcome",
            ("tool_call", "no_tool_call"),
        )
        self._discarded = self._counters(
            "tokend:discarded_tokens",
            "Sampled tokens that no client received.",
            "cause",
            ("late", "after_stop", "repeated"),
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens accepted.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens whose KV was cached."
        )
        self._cached_by_source = self._counters(
            "vllm:prompt_tokens_cached_by_source",
            "Prompt tokens whose KV was cached: in the pool, or by a connector.",
            "source",
            ("device", "external"),
        )
        self._tokens_by_source = self._counters(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            "source",
            _SOURCES,
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "From arrival to the first token.",
            FIRST_TOKEN_SECONDS,
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two outputs.", INTER_TOKEN_SECONDS
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_SECONDS
        )
        self._queue_seconds = self._histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first step.", REQUEST_SECONDS
        )
        self._prefill_seconds = self._histogram(
            "vllm:request_prefill_time_seconds",
            "From the first step to the first token.",
            REQUEST_SECONDS,
        )
        self._decode_seconds = self._histogram(
            "vllm:request_decode_time_seconds",
            "From the first token to the last token.",
            REQUEST_SECONDS,
        )
        self._inference_seconds = self._histogram(
            "vllm:request_inference_time_seconds",
            "From the first step to the last token.",
            REQUEST_SECONDS,
        )
        self._seconds_per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a request.",
            INTER_TOKEN_SECONDS,
        )
        self._prompt_lengths = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", REQUEST_TOKENS
        )
        self._generation_lengths = self._histogram(
            "vllm:request_generation_tokens", "Tokens of a choice.", REQUEST_TOKENS
        )
        self._longest_choices = self._histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens of a request's longest choice.",
            REQUEST_TOKENS,
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request.", REQUEST_TOKENS
        )
        self._n = self._histogram("vllm:request_params_n", "Choices of a request.", NUM_CHOICES)
        self._computed_tokens = self._histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were computed.",
            REQUEST_TOKENS,
        )

    def _define_process_metrics(self, incarnation: int, num_hung: int) -> None:
        """Metrics that the supervisor's notifications feed."""
        roles = [process_title(role) for role in get_args(Role)]
        own_role = process_title("api_server")
        self._restarts = {role: BroadcastCounter(self._sheet) for role in roles}
        self._watchdog_kills = {role: BroadcastCounter(self._sheet) for role in roles}
        self._restarts[own_role].raise_to(incarnation)
        self._watchdog_kills[own_role].raise_to(num_hung)
        self._families += [
            ("tokend:restarts", "Processes that died and were restarted.", "role", self._restarts),
            (
                "tokend:watchdog_kills",
                "Processes killed because they hung.",
                "role",
                self._watchdog_kills,
            ),
        ]

    def register_http_metrics(self, routes: Iterable[BaseRoute]) -> HttpMetrics:
        """Return metrics of these routes, which are shown with the rest. Call once."""
        http_metrics = HttpMetrics(self._sheet, routes)
        self._registry.register(http_metrics)
        return http_metrics

    def render(self, *, ready: bool = True) -> bytes:
        """Return all metrics in Prometheus' text format 0.0.4. ready: see `/health/ready`."""
        self._ready = ready
        return generate_latest(self._registry)

    # What happened. Each method belongs to one event.

    def count_restart(self, role: Role, hung: bool) -> None:
        """Count the restart of a process. hung: the watchdog had killed it."""
        self._restarts[process_title(role)].increment()
        if hung:
            self._watchdog_kills[process_title(role)].increment()

    def add_engine(self, epoch: int) -> None:
        self._engine_gauges.add_engine(epoch)

    def remove_engine(self, epoch: int) -> None:
        self._engine_gauges.remove_engine(epoch)

    def set_engine_info(self, engine: EngineReady) -> None:
        """Show queue limits, weights and KV pool of the current engine."""
        self._engine = engine

    def record_scheduler_stats(self, stats: SchedulerStats, epoch: int, timestamp: float) -> None:
        """Record gauges and deltas of a step. timestamp: monotonic seconds of the engine."""
        self._engine_gauges.write(epoch, timestamp, _gauges(stats))
        for field, counter in self._step_counters.items():
            counter.increment(getattr(stats, field))
        for position, number in enumerate(stats.accepted_per_pos[:REPORTED_DRAFT_POSITIONS]):
            self._accepted_per_pos[str(position)].increment(number)
        for source, number in stats.draft_tokens_by_source.items():
            self._drafted_by_source[_known_source(source)].increment(number)
        for source, number in stats.accepted_by_source.items():
            self._accepted_by_source[_known_source(source)].increment(number)
        for medium_stats in stats.kv_media:
            self._record_medium_stats(medium_stats)
        self._discarded["late"].increment(stats.num_discarded_tokens)
        if stats.num_scheduled_tokens:
            self._step_tokens.observe(stats.num_scheduled_tokens)
        for share in stats.flops_shares:
            self._flops_share.observe(share)
        for share in stats.bandwidth_shares:
            self._bandwidth_share.observe(share)
        for eviction in stats.kv_evictions:
            self._block_lifetime.observe(eviction.lifetime)
            self._block_idle.observe(eviction.idle)
            for gap in eviction.reuse_gaps:
                self._block_reuse_gap.observe(gap)
        for seconds in stats.agent_session_seconds:
            self._agent_session_seconds.observe(seconds)
        for seconds in stats.tool_seconds:
            self._tool_seconds.observe(seconds)
        if stats.lora is not None:
            self._lora_evictions.increment(stats.lora.num_evicted)
            for seconds in stats.lora.load_seconds:
                self._lora_load_seconds.observe(seconds)
        if stats.encoder is not None:
            self._encoder_queries.increment(stats.encoder.num_queries)
            self._encoder_hits.increment(stats.encoder.num_hits)
            self._encoder_rows.increment(stats.encoder.num_rows)
            self._encoder_seconds.increment(stats.encoder.seconds)

    def count_discarded_tokens(self, cause: str, num_tokens: int) -> None:
        """Count tokens that are not sent: "after_stop" (a stop string) or "repeated"."""
        self._discarded[cause].increment(num_tokens)

    def count_rejection(self, limit: str) -> None:
        self._rejections[limit].increment()

    def count_cut_short(self, cause: str) -> None:
        """Count a request that its client, an operator or a time limit ended."""
        self._cut_short[cause].increment()

    def record_prompt(self, num_tokens: int) -> None:
        """Record a request that the engine has accepted."""
        self._prompt_tokens.increment(num_tokens)
        self._prompt_lengths.observe(num_tokens)

    def record_first_step(
        self, queue_seconds: float, num_tokens: int, num_cached: int, num_external: int
    ) -> None:
        """Record that the engine has begun with a prompt, `queue_seconds` after it was queued.

        num_tokens: of the prompt; num_cached: of these, found in the prefix cache; num_external: of
        these, found by a KV connector.
        """
        num_external = min(num_external, num_cached)
        num_local = num_cached - num_external
        num_computed = num_tokens - num_cached
        self._queue_seconds.observe(queue_seconds)
        self._cached_tokens.increment(num_cached)
        self._cached_by_source["device"].increment(num_local)
        self._cached_by_source["external"].increment(num_external)
        counts = (num_computed, num_local, num_external)
        for source, number in zip(_SOURCES, counts, strict=True):
            self._tokens_by_source[source].increment(number)
        self._computed_tokens.observe(num_computed)

    def record_first_tokens(self, seconds: float, num_tokens: int) -> None:
        """Record a choice's first output, `seconds` after the arrival of its request."""
        self._first_token.observe(seconds)
        self._generation_tokens.increment(num_tokens)

    def record_next_tokens(self, seconds: float, num_tokens: int) -> None:
        """Record a choice's output, `seconds` after the one before."""
        self._inter_token.observe(seconds)
        self._generation_tokens.increment(num_tokens)

    def count_finished_choice(self, reason: str, num_tokens: int) -> None:
        """Count a choice by finish reason: stop, length, repetition, abort or error."""
        self._finished_choices[reason].increment()
        self._generation_lengths.observe(num_tokens)

    def record_preemptions(self, seconds: Sequence[float]) -> None:
        """Record the preemptions of a choice that has ended, each by its duration."""
        self._preemptions.observe(len(seconds))
        for each in seconds:
            self._preempted_seconds.observe(each)

    def count_tool_parse(self, has_calls: bool) -> None:
        self._tool_parses["tool_call" if has_calls else "no_tool_call"].increment()

    def record_finished_request(self, seconds: float, n: int, max_tokens: int) -> None:
        """Record a request whose choices all finished, `seconds` after its arrival."""
        self._latency.observe(seconds)
        self._n.observe(n)
        self._max_tokens.observe(max_tokens)

    def record_phases(
        self, scheduled: float, first_token: float, last_token: float, lengths: Sequence[int]
    ) -> None:
        """Record the phases of a finished request, given as monotonic seconds.

        lengths: tokens of each choice.
        """
        self._prefill_seconds.observe(first_token - scheduled)
        self._decode_seconds.observe(last_token - first_token)
        self._inference_seconds.observe(last_token - scheduled)
        longest = max(lengths)
        self._longest_choices.observe(longest)
        if longest > 1:
            self._seconds_per_token.observe((last_token - first_token) / (longest - 1))

    def _record_medium_stats(self, stats: KVMediumStats) -> None:
        medium = _known_medium(stats.medium)
        for field, counters in self._medium_counters.items():
            counters[medium].increment(getattr(stats, field))
        for field, copies in self._copies.items():
            for copy in getattr(stats, field):
                copies.num_bytes[medium].increment(copy.num_bytes)
                copies.seconds[medium].increment(copy.seconds)
                copies.sizes[medium].observe(copy.num_bytes)
                copies.durations[medium].observe(copy.seconds)
        for field, histograms in self._lookups.items():
            for seconds in getattr(stats, field):
                histograms[medium].observe(seconds)

    # What is shown.

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_engine_gauges()
        yield from self._collect_engine_info()
        if self.max_loras is not None:
            yield from self._collect_adapters(self.max_loras)
        media = [medium for medium in _MEDIA if self._was_used(medium)]
        for name, text, label, members in self._families:
            common = self._common_labels(name)
            is_histogram = any(isinstance(member, Histogram) for member in members.values())
            kind: Any = HistogramMetricFamily if is_histogram else CounterMetricFamily
            family = kind(name, text, labels=(*common, label) if label else (*common,))
            for value, member in members.items():
                if label == "medium" and value not in media:
                    continue
                labels = (*common.values(), value) if label else (*common.values(),)
                if isinstance(member, Histogram):
                    family.add_metric(labels, *member.buckets())
                else:
                    family.add_metric(labels, member.value)
            yield family

    def _was_used(self, medium: str) -> bool:
        """Return whether KV was looked up, stored or loaded on a medium."""
        return any(counters[medium].value for counters in self._medium_counters.values()) or any(
            histograms[medium].count
            for histograms in (
                *self._lookups.values(),
                *(copies.sizes for copies in self._copies.values()),
            )
        )

    def _collect_engine_gauges(self) -> Iterator[Metric]:
        engines = self._engine_gauges.latest_values()
        for field, (name, text, joined) in _ENGINE_GAUGES.items():
            yield self._gauge(name, text, joined([engine[field] for engine in engines] or [0.0]))
        num_deferred = sum(engine["num_deferred"] for engine in engines)
        num_waiting = sum(engine["num_waiting"] for engine in engines)
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting to run: for KV blocks, or for something else.",
            labels=(*self._vllm_labels, "reason"),
        )
        waiting.add_metric((*self._vllm_labels.values(), "capacity"), num_waiting - num_deferred)
        waiting.add_metric((*self._vllm_labels.values(), "deferred"), num_deferred)
        yield waiting
        for field, (name, text) in _TIER_GAUGES.items():
            tiers = GaugeMetricFamily(name, text, labels=("medium",))
            for medium in _TIER_MEDIA:
                if any(engine[f"num_blocks {medium}"] for engine in engines):
                    number = sum(engine[f"{field} {medium}"] for engine in engines)
                    tiers.add_metric((medium,), number)
            yield tiers

    def _collect_engine_info(self) -> Iterator[Metric]:
        """Readiness; queue limits, weights and KV pool of the current engine."""
        engine = self._engine
        yield self._gauge("tokend:ready", "Whether /health/ready is true: 1 or 0.", self._ready)
        yield self._gauge(
            "tokend:max_num_queued_reqs",
            "Limit of queued_reqs; 0: none.",
            0 if engine is None else engine.max_num_queued_reqs,
        )
        yield self._gauge(
            "tokend:max_num_queued_tokens",
            "Limit of queued_tokens; 0: none.",
            0 if engine is None else engine.max_num_queued_tokens,
        )
        weights = GaugeMetricFamily(
            "tokend:weights_bytes", "Memory of the weight matrices.", labels=("form",)
        )
        for memory in () if engine is None else engine.weights:
            weights.add_metric((memory.form,), memory.num_bytes)
        yield weights
        if engine is not None:
            info = GaugeMetricFamily(
                "vllm:cache_config_info",
                "The KV pool.",
                labels=(*self._vllm_labels, "block_size", "num_gpu_blocks"),
            )
            sizes = (str(engine.block_size), str(engine.num_blocks))
            info.add_metric((*self._vllm_labels.values(), *sizes), 1)
            yield info

    def _collect_adapters(self, max_loras: int) -> Iterator[Metric]:
        """Which adapters have requests; the value is the time, as in vLLM."""
        usage = self.adapter_usage
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters with running requests, and with waiting ones only.",
            labels=(
                *self._vllm_labels,
                *("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            ),
        )
        waiting = "" if usage is None else ",".join(usage.waiting)
        running = "" if usage is None else ",".join(usage.running)
        labels = (*self._vllm_labels.values(), str(max_loras), waiting, running)
        info.add_metric(labels, time.time())
        yield info
        yield self._gauge(
            "tokend:lora_resident",
            "Adapters in the workers' memory.",
            0 if usage is None else usage.num_resident,
        )
        corrupted = GaugeMetricFamily(
            "tokend:lora_corrupted_requests",
            "Requests of an adapter whose logits were not finite, since it was loaded.",
            labels=("adapter",),
        )
        for name, number in () if usage is None else usage.num_corrupted.items():
            corrupted.add_metric((name,), number)
        yield corrupted

    def _common_labels(self, name: str) -> dict[str, str]:
        return self._vllm_labels if name.startswith("vllm:") else {}

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        common = self._common_labels(name)
        family = GaugeMetricFamily(name, text, labels=(*common,))
        family.add_metric((*common.values(),), value)
        return family

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters(name, text, "", ("",))[""]

    def _counters(
        self, name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[str, Counter]:
        """Define a counter for each value of a label."""
        counters = {value: Counter(self._sheet) for value in values}
        self._families.append((name, text, label, counters))
        return counters

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(self._sheet, bounds)
        self._families.append((name, text, "", {"": histogram}))
        return histogram

    def _histograms(self, name: str, text: str, bounds: Sequence[float]) -> dict[str, Histogram]:
        """Define a histogram for each medium."""
        histograms = {medium: Histogram(self._sheet, bounds) for medium in _MEDIA}
        self._families.append((name, text, "medium", histograms))
        return histograms


class _CopyMetrics(NamedTuple):
    """Metrics of the copies of one direction, by medium."""

    num_bytes: dict[str, Counter]
    seconds: dict[str, Counter]
    sizes: dict[str, Histogram]
    durations: dict[str, Histogram]


def _known_source(source: str) -> str:
    """Return the label `source` of a drafter: a known one, or that of all others."""
    return source if source in METHODS else _OUTSIDE


def _known_medium(medium: str, known: Sequence[str] = _MEDIA) -> str:
    """Return the label `medium` of a medium: a known one, or that of all others."""
    return medium if medium in known else _MEDIA[-1]


def _gauges(stats: SchedulerStats) -> dict[str, float]:
    """Return the gauges of an engine by name; those of a tier by their name and medium."""
    gauges = {name: float(getattr(stats, name)) for name in (*_ENGINE_GAUGES, "num_deferred")}
    gauges |= {f"{field} {medium}": 0.0 for field in _TIER_GAUGES for medium in _TIER_MEDIA}
    for tier in stats.kv_tiers:
        medium = _known_medium(tier.medium, _TIER_MEDIA)
        gauges[f"num_blocks {medium}"] += tier.num_blocks
        gauges[f"num_free {medium}"] += max(0, tier.num_blocks - tier.num_used)
    return gauges


_Family = tuple[str, str, str, Mapping[str, Counter | BroadcastCounter | Histogram]]
"""Name, help text, label ("" for none), and the metric of each value of the label."""
