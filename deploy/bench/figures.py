"""Figures of a load test, defined as by `vllm bench serve`: calculation and tables."""

import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.bench.client import BenchRequest
from deploy.bench.limits import percentile
from deploy.bench.load import LoadResult
from deploy.bench.stream import RequestResult


@dataclass
class AnswerComparison:
    """Compares the answers of one server to equal requests with the first answer to each.

    num_compared: answers that could be compared. different: descriptions of the differences.
    """

    num_compared: int = 0
    different: list[str] = field(default_factory=list)
    _known: dict[bytes, str] = field(default_factory=dict)

    def note_all(self, checked: Sequence[tuple[BenchRequest, RequestResult]]) -> None:
        """Compare the answers to the checked requests of a run with those of earlier runs."""
        for request, result in checked:
            self.note(request, result.text)

    def note(self, request: BenchRequest, text: str) -> None:
        """Compare a complete answer to a checked request."""
        body = json.dumps(
            [request.path, request.content, request.output_tokens], sort_keys=True
        ).encode()
        key = hashlib.sha256(body).digest()
        if key not in self._known:
            self._known[key] = text
            return
        known = self._known[key]
        self.num_compared += 1
        if known != text:
            position = next(
                (i for i, (a, b) in enumerate(zip(known, text, strict=False)) if a != b),
                min(len(known), len(text)),
            )
            self.different.append(
                f"after {position} characters: "
                f"{known[position:][:40]!r}, then {text[position:][:40]!r}"
            )


METRICS: Final = ("ttft", "tpot", "itl", "e2el")
PERCENTILES: Final = (50, 90, 95, 99)


@dataclass(frozen=True)
class RunFigures:
    """Figures of one run.

    cpu_share: share of one core that the client used.
    num_good: requests within the goodput limits; None without limits.
    times: all values in milliseconds, by metric; the ITLs of all requests together.
    waited_ms: per request, delay by the concurrency limit of the client.
    num_other_length: answers with another number of tokens than requested.
    """

    name: str
    seconds: float
    cpu_share: float
    num_good: int | None
    times: Mapping[str, Sequence[float]]
    waited_ms: Sequence[float]
    num_completed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_other_length: int = 0
    peak_output_tokens_per_s: float = 0.0
    peak_concurrency: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def num_failed(self) -> int:
        return self.errors.total()

    @property
    def requests_per_s(self) -> float:
        return self.num_completed / self.seconds

    @property
    def goodput_per_s(self) -> float | None:
        return None if self.num_good is None else self.num_good / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.seconds

    def time_ms(self, metric: str, percent: float) -> float:
        """Return a percentile of a metric; NaN without values."""
        values = self.times[metric]
        return percentile(values, percent) if values else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return all figures for JSON, with units in the names."""
        found: dict[str, Any] = {
            "name": self.name,
            "duration_s": self.seconds,
            "num_completed": self.num_completed,
            "num_failed": self.num_failed,
            "errors": dict(self.errors),
            "num_other_length": self.num_other_length,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_s": self.requests_per_s,
            "goodput_requests_per_s": self.goodput_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
            "peak_output_tokens_per_s": self.peak_output_tokens_per_s,
            "peak_concurrency": self.peak_concurrency,
            "client_cpu_share": self.cpu_share,
            "client_wait_ms_mean": statistics.fmean(self.waited_ms or [0.0]),
        }
        for metric in METRICS:
            values = self.times[metric]
            if not values:
                continue
            found[f"{metric}_ms_mean"] = statistics.fmean(values)
            found[f"{metric}_ms_std"] = statistics.pstdev(values)
            for percent in PERCENTILES:
                found[f"{metric}_ms_p{percent}"] = percentile(values, percent)
        return found


def figures_of(
    name: str, load_result: LoadResult, limits_ms: Mapping[str, float] = MappingProxyType({})
) -> RunFigures:
    """Return the figures of a run. limits_ms: of a good request, by metric (ttft, tpot, e2el)."""
    done = [result for result in load_result.results if not result.error]
    return RunFigures(
        name=name,
        seconds=load_result.seconds,
        cpu_share=load_result.cpu_seconds / load_result.seconds,
        num_good=_num_good(done, limits_ms) if limits_ms else None,
        times={
            "ttft": [1e3 * result.ttft for result in done],
            "tpot": [1e3 * result.tpot for result in done if result.output_tokens > 1],
            "itl": [1e3 * gap for result in done for gap in result.gaps],
            "e2el": [1e3 * result.e2el for result in done],
        },
        waited_ms=[1e3 * result.waited for result in done],
        num_completed=len(done),
        input_tokens=sum(result.input_tokens for result in done),
        cached_tokens=sum(result.cached_tokens for result in done),
        output_tokens=sum(result.output_tokens for result in done),
        num_other_length=sum(result.output_tokens != result.requested_tokens for result in done),
        peak_output_tokens_per_s=_peak_rate(done),
        peak_concurrency=_peak_concurrency(done),
        errors=Counter(result.error for result in load_result.results if result.error),
    )


def _num_good(done: Sequence[RequestResult], limits_ms: Mapping[str, float]) -> int:
    """Return the number of requests within all limits."""
    return sum(
        all(1e3 * getattr(result, metric) <= limit for metric, limit in limits_ms.items())
        for result in done
    )


def _peak_rate(done: Sequence[RequestResult]) -> float:
    """Return the maximum of chunks in one second, counted from the first request."""
    begin = min((result.started for result in done), default=0.0)
    buckets: Counter[int] = Counter()
    for result in done:
        now = result.first
        buckets[int(now - begin)] += 1
        for gap in result.gaps:
            now += gap
            buckets[int(now - begin)] += 1
    return float(max(buckets.values(), default=0))


def _peak_concurrency(done: Sequence[RequestResult]) -> int:
    """Return the maximum of concurrent requests; an end counts before a begin at the same time."""
    events = sorted(
        [(result.started, 1) for result in done] + [(result.last, -1) for result in done]
    )
    now = peak = 0
    for _, change in events:
        now += change
        peak = max(peak, now)
    return peak


# ---- Tables ----


TITLES: Final = {
    "ttft": "time to first token (TTFT), ms",
    "tpot": "time per output token (TPOT), ms",
    "itl": "between tokens (ITL), ms",
    "e2el": "to the last token (E2EL), ms",
}
_SHOWN: Final = 10
_WIDEST: Final = 1000
"""Width in characters at which the width of a table is measured; no table needs so much."""


def show(
    console: Console, head: Sequence[str], runs: Sequence[RunFigures], answers: AnswerComparison
) -> None:
    """Print what was measured, tables and notes; a single run is shown with more percentiles.

    A table that is wider than the console is printed with one line per value.
    """
    for line in head:
        console.print(line, markup=False, highlight=False)
    overview = _table_of([_overview(run) for run in runs])
    latencies = _table_of([{"load": run.name} | _latencies(run) for run in runs])
    for table in (overview, _percentiles(runs[0]) if len(runs) == 1 else latencies):
        options = console.options.update(max_width=_WIDEST)
        fits = console.measure(table, options=options).maximum <= console.width
        console.print(table if fits else _upright(table))
    for line in notes(runs, answers):
        console.print(line, markup=False, highlight=False)


def _upright(table: Table) -> Table:
    """Return a table with one row per value: those of the first row, of the second, …"""
    upright = Table("", "", show_header=False)
    head, *others = table.columns
    for row, name in enumerate(head.cells):
        if row:
            upright.add_section()
        upright.add_row(name, "")
        for column in others:
            upright.add_row(f"  {column.header}", list(column.cells)[row])
    return upright


def notes(runs: Sequence[RunFigures], answers: AnswerComparison) -> list[str]:
    """Return remarks: failures, wrong lengths, different answers, CPU time of the client."""
    found = [
        f"{run.name}: {number} failed: {error}"
        for run in runs
        for error, number in run.errors.most_common(_SHOWN)
    ]
    found += [
        f"{run.name}: {run.num_other_length} answers of another length than requested"
        for run in runs
        if run.num_other_length
    ]
    if answers.num_compared:
        found.append(
            f"same answers: requests that every run repeats (--check-share) were answered again "
            f"{answers.num_compared} times, {len(answers.different)} of them with another text"
        )
    found += [f"different: {difference}" for difference in answers.different[:_SHOWN]]
    if answers.different:
        found.append(
            "a difference need not be an error: with low precision, the batch decides between two "
            "tokens of nearly equal logits"
        )
    shares = ", ".join(f"{run.cpu_share:.1%}" for run in runs)
    found.append(f"the client used {shares} of one core")
    return found


def _overview(run: RunFigures) -> dict[str, str]:
    """Return what was done and how fast, by column."""
    return {
        "load": run.name,
        "done": f"{run.num_completed:,}",
        "failed": f"{run.num_failed:,}",
        "s": f"{run.seconds:.2f}",
        "requests/s": f"{run.requests_per_s:.2f}",
        "good/s": "-" if run.goodput_per_s is None else f"{run.goodput_per_s:.2f}",
        "tokens in": f"{run.input_tokens:,}",
        "out": f"{run.output_tokens:,}",
        "output tokens/s": f"{run.output_tokens_per_s:.1f}",
        "all tokens/s": f"{run.total_tokens_per_s:.1f}",
        "concurrency": f"{run.peak_concurrency}",
        "client CPU": f"{run.cpu_share:.1%}",
    }


def _latencies(run: RunFigures) -> dict[str, str]:
    """Return median and 99th percentile of the times, by column."""
    found = {}
    for metric in METRICS:
        median, high = run.time_ms(metric, 50), run.time_ms(metric, 99)
        pair = "-" if math.isnan(median) else f"{median:.1f} / {high:.1f}"
        found[f"{metric.upper()} p50 / p99, ms"] = pair
    return found


def _percentiles(run: RunFigures) -> Table:
    table = _table("", "mean", "std", *(f"p{percent}" for percent in PERCENTILES))
    for metric in METRICS:
        values = run.times[metric]
        if values:
            cells = [statistics.fmean(values), statistics.pstdev(values)]
            cells += [percentile(values, percent) for percent in PERCENTILES]
            table.add_row(TITLES[metric], *(f"{cell:.2f}" for cell in cells))
    return table


def _table_of(rows: Sequence[Mapping[str, str]]) -> Table:
    table = _table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    return table


def _table(first: str, *others: str) -> Table:
    table = Table()
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
