"""What one engine and its requests feed of /metrics; `Metrics` shows it.

`EngineMetrics` lists every counter and histogram of an engine once, with its name and help text.

    arrival ── queue ──▶ first step ── prefill ──▶ first token ── decode ──▶ last token
                         └──────────────────── inference ───────────────────┘
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from api_server.metrics.metric_sheet import Counter, Histogram, MetricSheet
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
MEDIA: Final = ("CPU", "disk", "remote", "other")
_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")


class Family(NamedTuple):
    """Metrics of a name, by the value of a label. label: "" for none."""

    name: str
    text: str
    label: str
    members: Mapping[str, Counter | Histogram]


class EngineMetrics:
    """The counters and histograms of an engine; those of all engines are in the same order.

    A request that several engines computed counts for the last of them.
    """

    def __init__(self, sheet: MetricSheet) -> None:
        self._sheet = sheet
        self.families: list[Family] = []
        self._define_engine_metrics()
        self._define_request_metrics()

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
            "tokend:encoder_cache_hits",
            "Images whose encoder output was there already, from another request.",
        )
        self._encoder_rows = self._counter(
            "tokend:encoder_rows", "Rows of encoder output of images that were computed."
        )
        self._encoder_seconds = self._counter(
            "tokend:encoder_seconds", "Seconds of steps in which images were encoded."
        )
        self._medium_counters = {
            field: self._counters(name, text, "medium", MEDIA)
            for field, (name, text) in _MEDIUM_COUNTERS.items()
        }
        self._copies = {
            field: _CopyMetrics(
                num_bytes=self._counters(
                    f"vllm:kv_offload_{part}_bytes", f"Bytes of {what}.", "medium", MEDIA
                ),
                seconds=self._counters(
                    f"vllm:kv_offload_{part}_time", f"Seconds of {what}.", "medium", MEDIA
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
            "Requests refused by a queue limit, or while too many wait for an engine.",
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

    # What happened. Each method belongs to one event.

    def record_stats(self, stats: SchedulerStats) -> None:
        """Record the deltas of a step."""
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
        medium = known_medium(stats.medium)
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

    def was_used(self, medium: str) -> bool:
        """Return whether KV was looked up, stored or loaded on a medium."""
        return any(counters[medium].value for counters in self._medium_counters.values()) or any(
            histograms[medium].count
            for histograms in (
                *self._lookups.values(),
                *(copies.sizes for copies in self._copies.values()),
            )
        )

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters(name, text, "", ("",))[""]

    def _counters(
        self, name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[str, Counter]:
        """Define a counter for each value of a label."""
        counters = {value: Counter(self._sheet) for value in values}
        self.families.append(Family(name, text, label, counters))
        return counters

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(self._sheet, bounds)
        self.families.append(Family(name, text, "", {"": histogram}))
        return histogram

    def _histograms(self, name: str, text: str, bounds: Sequence[float]) -> dict[str, Histogram]:
        """Define a histogram for each medium."""
        histograms = {medium: Histogram(self._sheet, bounds) for medium in MEDIA}
        self.families.append(Family(name, text, "medium", histograms))
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


def known_medium(medium: str, known: Sequence[str] = MEDIA) -> str:
    """Return the label `medium` of a medium: a known one, or that of all others."""
    return medium if medium in known else MEDIA[-1]
