"""What a run came to, in the terms of `vllm bench serve`: see `openai/exchange.py`."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from deploy.loadtest.openai.exchange import Exchange
from deploy.loadtest.serving.answers import Answers
from deploy.loadtest.serving.play import Played
from deploy.loadtest.summary import percentile

METRICS: Final = ("ttft", "tpot", "itl", "e2el")
PERCENTILES: Final = (50, 90, 95, 99)


@dataclass(frozen=True)
class Goodput:
    """Limits in milliseconds that a good request keeps, by metric (ttft, tpot, e2el)."""

    limits_ms: Mapping[str, float]

    def count(self, exchanges: Sequence[Exchange]) -> int | None:
        """The good ones; None where there is no limit."""
        return sum(map(self._good, exchanges)) if self.limits_ms else None

    def _good(self, exchange: Exchange) -> bool:
        return all(
            1e3 * getattr(exchange, metric) <= limit for metric, limit in self.limits_ms.items()
        )


@dataclass(frozen=True)
class Figures:
    """One run. num_good: requests within the limits, None without limits.

    times: all values in milliseconds, by metric; the ITLs of all requests together.

    cpu_share: part of one core that the client itself took. short: answers of fewer or more
    tokens than were asked for. waited_ms: of each request, for a place in the client.
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
    num_short: int = 0
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
        """A percentile of a metric; not a number where there is no value."""
        values = self.times[metric]
        return percentile(values, percent) if values else math.nan

    def plain(self) -> dict[str, Any]:
        """For JSON: everything that the tables show, with units in the names."""
        found: dict[str, Any] = {
            "name": self.name,
            "duration_s": self.seconds,
            "num_completed": self.num_completed,
            "num_failed": self.num_failed,
            "errors": dict(self.errors),
            "num_other_length": self.num_short,
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


def figures_of(name: str, played: Played, goodput: Goodput) -> Figures:
    """Of one run."""
    done = [each for each in played.exchanges if not each.error]
    return Figures(
        name=name,
        seconds=played.seconds,
        cpu_share=played.cpu_seconds / played.seconds,
        num_good=goodput.count(done),
        times={
            "ttft": [1e3 * each.ttft for each in done],
            "tpot": [1e3 * each.tpot for each in done if each.output_tokens > 1],
            "itl": [1e3 * gap for each in done for gap in each.gaps],
            "e2el": [1e3 * each.e2el for each in done],
        },
        waited_ms=[1e3 * each.waited for each in done],
        num_completed=len(done),
        input_tokens=sum(each.input_tokens for each in done),
        cached_tokens=sum(each.cached_tokens for each in done),
        output_tokens=sum(each.output_tokens for each in done),
        num_short=sum(each.output_tokens != each.asked_tokens for each in done),
        peak_output_tokens_per_s=_peak_rate(done),
        peak_concurrency=_peak_concurrency(done),
        errors=Counter(each.error for each in played.exchanges if each.error),
    )


def note_answers(played: Played, answers: Answers) -> None:
    """Compare what was checked with what is known of earlier runs."""
    for ask, exchange in played.checked:
        answers.note(ask, exchange.text)


def _peak_rate(done: Sequence[Exchange]) -> float:
    """Most chunks in one of the seconds after the first request was sent."""
    begin = min((each.started for each in done), default=0.0)
    buckets: Counter[int] = Counter()
    for each in done:
        now = each.first
        buckets[int(now - begin)] += 1
        for gap in each.gaps:
            now += gap
            buckets[int(now - begin)] += 1
    return float(max(buckets.values(), default=0))


def _peak_concurrency(done: Sequence[Exchange]) -> int:
    """Most requests under way at a moment; one that ends makes room for one that begins then."""
    events = sorted([(each.started, 1) for each in done] + [(each.last, -1) for each in done])
    now = peak = 0
    for _, change in events:
        now += change
        peak = max(peak, now)
    return peak
