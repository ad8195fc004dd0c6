"""What each request took, by phase and by where its prompt's KV came from.

Owns its cells of the sheet and the names, which are vLLM's. Is told once of a prompt when its
first token is there, and once of a request whose choices all ended well.

    arrival ── queue ──▶ scheduled ── prefill ──▶ first token ── decode ──▶ last token
                             └────────────── inference ──────────────────────┘
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from api_server.metric_sheet import Counter, Histogram, MetricSheet
from proto.stats import SchedulerStats

# Bounds as vLLM has them, so that its dashboards show the same quantiles.
INTER_TOKEN_SECONDS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
REQUEST_TOKENS: Final = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
NUM_CHOICES: Final = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS: Final = (1, 2, 5, 10, 20, 50, 100)

_HISTOGRAMS: Final[dict[str, tuple[str, Sequence[float]]]] = {
    "request_time_per_output_token_seconds": (
        "Time of a choice's tokens after the first.",
        INTER_TOKEN_SECONDS,
    ),
    "request_prefill_time_seconds": ("First step to first token.", REQUEST_SECONDS),
    "request_decode_time_seconds": ("First token to last token.", REQUEST_SECONDS),
    "request_inference_time_seconds": ("First step to last token.", REQUEST_SECONDS),
    "request_max_num_generation_tokens": ("Tokens of the longest choice.", REQUEST_TOKENS),
    "request_params_n": ("Choices that were asked for.", NUM_CHOICES),
    "request_params_max_tokens": ("Most tokens that were asked for.", REQUEST_TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens not found.", REQUEST_TOKENS),
    "request_num_preemptions": ("Preemptions of a choice.", NUM_PREEMPTIONS),
}
"""Name: text and bounds."""
_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")


class RequestFigures:
    """Of all front ends."""

    def __init__(self, sheet: MetricSheet) -> None:
        self._histograms = {
            name: Histogram(sheet, bounds) for name, (_, bounds) in _HISTOGRAMS.items()
        }
        self._sources = {source: Counter(sheet) for source in _SOURCES}

    def prompt_found(self, num_tokens: int, num_cached: int, num_external: int) -> None:
        """The first token of a prompt of `num_tokens` is there.

        num_cached: of them, found; num_external: of those, by a KV connector.
        """
        self._sources["local_compute"].add(num_tokens - num_cached)
        self._sources["local_cache_hit"].add(num_cached - num_external)
        self._sources["external_kv_transfer"].add(num_external)
        self._histograms["request_prefill_kv_computed_tokens"].observe(num_tokens - num_cached)

    def preempted(self, stats: SchedulerStats) -> None:
        """What an engine has told of choices that are over."""
        for number in stats.request_preemptions:
            self._histograms["request_num_preemptions"].observe(number)

    def answered(self, lengths: Sequence[int], max_tokens: int) -> None:
        """A request is answered in full. lengths: tokens of each choice."""
        self._histograms["request_max_num_generation_tokens"].observe(max(lengths))
        self._histograms["request_params_n"].observe(len(lengths))
        self._histograms["request_params_max_tokens"].observe(max_tokens)

    def phases(
        self, scheduled: float, first_token: float, last_token: float, lengths: Sequence[int]
    ) -> None:
        """When those of such a request were, in monotonic seconds."""
        decode = last_token - first_token
        self._histograms["request_prefill_time_seconds"].observe(first_token - scheduled)
        self._histograms["request_decode_time_seconds"].observe(decode)
        self._histograms["request_inference_time_seconds"].observe(last_token - scheduled)
        for length in lengths:
            if length > 1:
                name = "request_time_per_output_token_seconds"
                self._histograms[name].observe(decode / (length - 1))

    def collect(self, names: Sequence[str], values: Sequence[str]) -> Iterator[Metric]:
        """names, values: labels that all have."""
        by_source = {source: counter.value for source, counter in self._sources.items()}
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            labels=(*names, "source"),
        )
        for source, number in by_source.items():
            family.add_metric((*values, source), number)
        yield family
        cached = {"device": by_source["local_cache_hit"], "external": by_source[_SOURCES[2]]}
        family = CounterMetricFamily(
            "vllm:prompt_tokens_cached", "Prompt tokens whose KV was found.", labels=names
        )
        family.add_metric(values, sum(cached.values()))
        yield family
        family = CounterMetricFamily(
            "vllm:prompt_tokens_cached_by_source",
            "Those, by where it was.",
            labels=(*names, "source"),
        )
        for source, number in cached.items():
            family.add_metric((*values, source), number)
        yield family
        for name, (text, _) in _HISTOGRAMS.items():
            yield histogram_family(self._histograms[name], f"vllm:{name}", text, names, values)


def histogram_family(
    histogram: Histogram, name: str, text: str, labels: Sequence[str], values: Sequence[str]
) -> HistogramMetricFamily:
    """Prometheus' form: cumulative counts."""
    counts, total = histogram.totals()
    bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    family = HistogramMetricFamily(name, text, labels=labels)
    family.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), total)
    return family
