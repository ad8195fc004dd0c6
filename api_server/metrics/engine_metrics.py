"""What one engine and its requests feed of /metrics; `Metrics` shows it.

engine_metrics.toml lists the metrics of an engine with their help texts.

    arrival ── queue ──▶ first step ── prefill ──▶ first token ── decode ──▶ last token
                         └──────────────────── inference ───────────────────┘
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from api_server.metrics.metric_sheet import Counter, Histogram, MetricSheet
from proto.messages.stats import KVMediumStats, SchedulerStats
from proto.settings.speculative_config import METHODS

TABLES: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The metrics of an engine; engine_metrics.toml describes each table."""
REPORTED_DRAFT_POSITIONS: Final = 16
"""Positions of drafts with a counter of their own."""
_OUTSIDE: Final = "outside"
"""Source of drafts by proposers of other packages."""
MEDIA: Final = ("CPU", "disk", "remote", "other")


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
        self._counters = {
            name: self._counter(name, text) for name, text in TABLES["counters"].items()
        }
        self._by_label = {
            name: self._labelled_counters(name, **entry)
            for name, entry in TABLES["counters_of_label"].items()
        }
        self._histograms = {
            name: self._histogram(name, text, group["bounds"])
            for group in TABLES["histograms"].values()
            for name, text in group["texts"].items()
        }
        # fed by the engine's statistics
        self._step_counters = {
            field: self._counter(*entry) for field, entry in TABLES["step_counters"].items()
        }
        self._accepted_per_pos = self._labelled_counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens of drafts, by position in the draft.",
            "position",
            tuple(map(str, range(REPORTED_DRAFT_POSITIONS))),
        )
        self._drafted_by_source = self._labelled_counters(
            "tokend:spec_decode_num_draft_tokens_by_source",
            "Verified tokens of drafts, by the method that drafted them.",
            "source",
            (*METHODS, _OUTSIDE),
        )
        self._accepted_by_source = self._labelled_counters(
            "tokend:spec_decode_num_accepted_tokens_by_source",
            "Those of them that were accepted.",
            "source",
            (*METHODS, _OUTSIDE),
        )
        self._medium_counters = {
            field: self._labelled_counters(name, text, "medium", MEDIA)
            for field, (name, text) in TABLES["medium_counters"].items()
        }
        self._lookups = {
            field: self._medium_histograms(**entry)
            for field, entry in TABLES["lookup_histograms"].items()
        }
        self._copies = {
            field: self._copy_metrics(part, what)
            for field, (part, what) in TABLES["copies"].items()
        }

    def _copy_metrics(self, part: str, what: str) -> "_CopyMetrics":
        """Define the metrics of one direction. part: of their names. what: they count."""
        name, bounds = f"vllm:kv_offload_{part}", TABLES["copy_bounds"]
        return _CopyMetrics(
            num_bytes=self._labelled_counters(
                f"{name}_bytes", f"Bytes of {what}.", "medium", MEDIA
            ),
            seconds=self._labelled_counters(f"{name}_time", f"Seconds of {what}.", "medium", MEDIA),
            sizes=self._medium_histograms(
                f"{name}_size", f"Bytes of each of the {what}.", bounds["sizes"]
            ),
            durations=self._medium_histograms(
                f"tokend:kv_offload_{part}_seconds",
                f"Seconds of each of the {what}.",
                bounds["seconds"],
            ),
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
        self._by_label["tokend:discarded_tokens"]["late"].increment(stats.num_discarded_tokens)
        if stats.num_scheduled_tokens:
            self._histograms["vllm:iteration_tokens_total"].observe(stats.num_scheduled_tokens)
        for field, name in TABLES["step_histograms"].items():
            for value in getattr(stats, field):
                self._histograms[name].observe(value)
        for eviction in stats.kv_evictions:
            self._histograms["vllm:kv_block_lifetime_seconds"].observe(eviction.lifetime)
            self._histograms["vllm:kv_block_idle_before_evict_seconds"].observe(eviction.idle)
            for gap in eviction.reuse_gaps:
                self._histograms["vllm:kv_block_reuse_gap_seconds"].observe(gap)
        if stats.lora is not None:
            self._counters["tokend:lora_evictions"].increment(stats.lora.num_evicted)
            for seconds in stats.lora.load_seconds:
                self._histograms["tokend:lora_load_seconds"].observe(seconds)
        if stats.encoder is not None:
            self._counters["tokend:encoder_cache_queries"].increment(stats.encoder.num_queries)
            self._counters["tokend:encoder_cache_hits"].increment(stats.encoder.num_hits)
            self._counters["tokend:encoder_rows"].increment(stats.encoder.num_rows)
            self._counters["tokend:encoder_seconds"].increment(stats.encoder.seconds)

    def count_discarded_tokens(self, cause: str, num_tokens: int) -> None:
        """Count tokens that are not sent: "after_stop" (a stop string) or "repeated"."""
        self._by_label["tokend:discarded_tokens"][cause].increment(num_tokens)

    def count_rejection(self, limit: str) -> None:
        self._by_label["vllm:admission_rejections"][limit].increment()

    def count_cut_short(self, cause: str) -> None:
        """Count a request that its client, an operator or a time limit ended."""
        self._by_label["tokend:requests_cut_short"][cause].increment()

    def record_prompt(self, num_tokens: int) -> None:
        """Record a request that the engine has accepted."""
        self._counters["vllm:prompt_tokens"].increment(num_tokens)
        self._histograms["vllm:request_prompt_tokens"].observe(num_tokens)

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
        self._histograms["vllm:request_queue_time_seconds"].observe(queue_seconds)
        self._counters["vllm:prompt_tokens_cached"].increment(num_cached)
        cached = self._by_label["vllm:prompt_tokens_cached_by_source"]
        cached["device"].increment(num_local)
        cached["external"].increment(num_external)
        counts = (num_computed, num_local, num_external)
        by_source = self._by_label["vllm:prompt_tokens_by_source"].values()
        for counter, number in zip(by_source, counts, strict=True):
            counter.increment(number)
        self._histograms["vllm:request_prefill_kv_computed_tokens"].observe(num_computed)

    def record_first_tokens(self, seconds: float, num_tokens: int) -> None:
        """Record a choice's first output, `seconds` after the arrival of its request."""
        self._histograms["vllm:time_to_first_token_seconds"].observe(seconds)
        self._counters["vllm:generation_tokens"].increment(num_tokens)

    def record_next_tokens(self, seconds: float, num_tokens: int) -> None:
        """Record a choice's output, `seconds` after the one before."""
        self._histograms["vllm:inter_token_latency_seconds"].observe(seconds)
        self._counters["vllm:generation_tokens"].increment(num_tokens)

    def count_finished_choice(self, reason: str, num_tokens: int) -> None:
        """Count a choice by finish reason: stop, length, repetition, abort or error."""
        self._by_label["vllm:request_success"][reason].increment()
        self._histograms["vllm:request_generation_tokens"].observe(num_tokens)

    def record_preemptions(self, seconds: Sequence[float]) -> None:
        """Record the preemptions of a choice that has ended, each by its duration."""
        self._histograms["vllm:request_num_preemptions"].observe(len(seconds))
        for each in seconds:
            self._histograms["tokend:preempted_seconds"].observe(each)

    def count_tool_parse(self, has_calls: bool) -> None:
        outcome = "tool_call" if has_calls else "no_tool_call"
        self._by_label["vllm:tool_call_parser_invocations"][outcome].increment()

    def record_finished_request(self, seconds: float, n: int, max_tokens: int) -> None:
        """Record a request whose choices all finished, `seconds` after its arrival."""
        self._histograms["vllm:e2e_request_latency_seconds"].observe(seconds)
        self._histograms["vllm:request_params_n"].observe(n)
        self._histograms["vllm:request_params_max_tokens"].observe(max_tokens)

    def record_phases(
        self, scheduled: float, first_token: float, last_token: float, lengths: Sequence[int]
    ) -> None:
        """Record the phases of a finished request, given as monotonic seconds.

        lengths: tokens of each choice.
        """
        self._histograms["vllm:request_prefill_time_seconds"].observe(first_token - scheduled)
        self._histograms["vllm:request_decode_time_seconds"].observe(last_token - first_token)
        self._histograms["vllm:request_inference_time_seconds"].observe(last_token - scheduled)
        longest = max(lengths)
        self._histograms["vllm:request_max_num_generation_tokens"].observe(longest)
        if longest > 1:
            seconds = (last_token - first_token) / (longest - 1)
            self._histograms["vllm:request_time_per_output_token_seconds"].observe(seconds)

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
        return self._labelled_counters(name, text, "", ("",))[""]

    def _labelled_counters(
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

    def _medium_histograms(
        self, name: str, text: str, bounds: Sequence[float]
    ) -> dict[str, Histogram]:
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
