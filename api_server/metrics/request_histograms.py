"""What each request was and how long its parts took, under vLLM's names.

    arrival ── queue ──▶ first step ── prefill ──▶ first token ── decode ──▶ last token
                         └──────────────────── inference ───────────────────┘

Owns its cells of the sheet and the names. A request counts when all of its choices have ended by
themselves; what its prompt came from counts with its first token.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from api_server.metrics.metric_sheet import Counter, Histogram, MetricSheet

NUM_CHOICES: Final = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS: Final = (1, 2, 5, 10, 20, 50, 100)
_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")


class RequestHistograms:
    """token_seconds, seconds, tokens: bounds of the buckets."""

    def __init__(
        self,
        sheet: MetricSheet,
        *,
        token_seconds: Sequence[float],
        seconds: Sequence[float],
        tokens: Sequence[float],
    ) -> None:
        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            self._shown.append((name, text, found := Histogram(sheet, bounds)))
            return found

        self._shown: list[tuple[str, str, Histogram]] = []
        self._token_time = histogram(
            "request_time_per_output_token_seconds", "Mean of a request.", token_seconds
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "First step to first token.", seconds
        )
        self._decode = histogram(
            "request_decode_time_seconds", "First token to last token.", seconds
        )
        self._inference = histogram(
            "request_inference_time_seconds", "First step to last token.", seconds
        )
        self._longest = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest choice.", tokens
        )
        self._max_tokens = histogram(
            "request_params_max_tokens", "Tokens that were asked for at most.", tokens
        )
        self._n = histogram("request_params_n", "Choices that were asked for.", NUM_CHOICES)
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not found.", tokens
        )
        self._preemptions = histogram(
            "request_num_preemptions", "Preemptions of a choice.", NUM_PREEMPTIONS
        )
        self._cached = Counter(sheet)
        self._sources = {source: Counter(sheet) for source in _SOURCES}

    def begun(self, num_prompt: int, num_cached: int, num_external: int) -> None:
        """The first token is there. num_cached: of the prompt; num_external: of those, by a
        connector."""
        external = min(num_external, num_cached)
        self._cached.add(num_cached)
        for source, number in zip(
            _SOURCES, (num_prompt - num_cached, num_cached - external, external), strict=True
        ):
            self._sources[source].add(number)
        self._computed.observe(num_prompt - num_cached)

    def ended(
        self, scheduled: float, first_token: float, last_token: float, lengths: Sequence[int]
    ) -> None:
        """Monotonic seconds. lengths: tokens of each choice."""
        self._prefill.observe(first_token - scheduled)
        self._decode.observe(last_token - first_token)
        self._inference.observe(last_token - scheduled)
        longest = max(lengths)
        self._longest.observe(longest)
        if longest > 1:
            self._token_time.observe((last_token - first_token) / (longest - 1))

    def requested(self, n: int, max_tokens: int) -> None:
        """Observe the parameters of a finished request."""
        self._n.observe(n)
        self._max_tokens.observe(max_tokens)

    def preempted(self, times: int) -> None:
        """Observe a finished choice, however it ended."""
        self._preemptions.observe(times)

    def collect(self, names: Sequence[str], values: Sequence[str]) -> Iterator[Metric]:
        """names, values: labels that all have."""
        for name, text, histogram in self._shown:
            counts, total = histogram.totals()
            bounds = [*(repr(float(each)) for each in histogram.bounds), "+Inf"]
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=names)
            family.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), total)
            yield family
        cached = CounterMetricFamily(
            "vllm:prompt_tokens_cached", "Prompt tokens that were found.", labels=names
        )
        cached.add_metric(values, self._cached.value)
        yield cached
        external = self._sources["external_kv_transfer"].value
        cached = CounterMetricFamily(
            "vllm:prompt_tokens_cached_by_source",
            "Those: in the pool, or by a connector.",
            labels=(*names, "source"),
        )
        cached.add_metric((*values, "device"), self._sources["local_cache_hit"].value)
        cached.add_metric((*values, "external"), external)
        yield cached
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens.", labels=(*names, "source")
        )
        for source, counter in self._sources.items():
            by_source.add_metric((*values, source), counter.value)
        yield by_source
