"""The figures of runs as tables and as a page of curves."""

import math
import statistics
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from deploy.loadtest.plot import Panel, Points, Rows, page
from deploy.loadtest.serving.answers import Answers
from deploy.loadtest.serving.figures import METRICS, PERCENTILES, Figures
from deploy.loadtest.summary import percentile

TITLES: Final = {
    "ttft": "time to first token (TTFT), ms",
    "tpot": "time per output token (TPOT), ms",
    "itl": "between tokens (ITL), ms",
    "e2el": "to the last token (E2EL), ms",
}
_NAMES: Final = {metric: title.removesuffix(", ms") for metric, title in TITLES.items()}
_SHOWN: Final = 10
_CURVE_STEPS: Final = 200


def show(console: Console, runs: Sequence[Figures], answers: Answers) -> None:
    """Print everything; of a single run with more percentiles."""
    console.print(_overview(runs))
    if len(runs) == 1:
        console.print(_percentiles(runs[0]))
    else:
        console.print(_latencies(runs))
    for line in notes(runs, answers):
        console.print(line, markup=False, highlight=False)


def notes(runs: Sequence[Figures], answers: Answers) -> list[str]:
    """Whatever is to be said beside the figures."""
    found = [
        f"{each.name}: {number} failed: {error}"
        for each in runs
        for error, number in each.errors.most_common(_SHOWN)
    ]
    found += [
        f"{each.name}: {each.num_short} answers of another length than was asked for"
        for each in runs
        if each.num_short
    ]
    if answers.num_compared:
        found.append(
            f"answers to the same request: {answers.num_compared} compared, "
            f"{len(answers.different)} different"
        )
    found += [f"different: {each}" for each in answers.different[:_SHOWN]]
    if answers.different:
        found.append(
            "a different one is no failure by itself: two tokens that score alike change places "
            "with the sequences beside them, unless the arithmetic is float32"
        )
    shares = ", ".join(f"{each.cpu_share:.1%}" for each in runs)
    found.append(f"the client itself took {shares} of one core")
    return found


def html_page(title: str, runs: Sequence[Figures], answers: Answers) -> str:
    """One file: how latencies are distributed, and what throughput costs in latency."""
    panels = [
        Panel(
            f"{_NAMES[metric]}, cumulative share",
            {each.name: _distribution(each.times[metric]) for each in runs},
            "milliseconds",
            log_x=True,
            parts=True,
        )
        for metric in METRICS
    ]
    for metric in ("ttft", "tpot"):
        known = sorted(
            (each for each in runs if each.times[metric]), key=lambda run: run.output_tokens_per_s
        )
        curves = {
            f"p{percent}": [
                (each.output_tokens_per_s, each.time_ms(metric, percent)) for each in known
            ]
            for percent in (99, 50)
        }
        panels.append(
            Panel(
                f"{_NAMES[metric]} in milliseconds, by throughput",
                curves,
                "output tokens/s",
                names=[each.name for each in known],
            )
        )
    return page(title, notes(runs, answers), panels, "milliseconds", _rows(runs))


def _rows(runs: Sequence[Figures]) -> Rows:
    """What the tables of the terminal have, of each load in one row."""
    head = ["load", "done", "failed", "output tokens/s", "requests/s"]
    head += [f"{metric.upper()} p50 / p99, ms" for metric in METRICS]
    return Rows(
        [*head, "client CPU"],
        [
            [
                each.name,
                f"{each.num_completed:,}",
                f"{each.num_failed:,}",
                f"{each.output_tokens_per_s:,.1f}",
                f"{each.requests_per_s:.2f}",
                *(_pair(each, metric) for metric in METRICS),
                f"{each.cpu_share:.1%}",
            ]
            for each in runs
        ],
    )


def _overview(runs: Sequence[Figures]) -> Table:
    table = _table(
        "load", "done", "failed", "s", "requests/s", "good/s", "tokens in", "out",
        "output tokens/s", "all tokens/s", "at once", "client CPU",
    )  # fmt: skip
    for each in runs:
        table.add_row(
            each.name,
            f"{each.num_completed:,}",
            f"{each.num_failed:,}",
            f"{each.seconds:.2f}",
            f"{each.requests_per_s:.2f}",
            "-" if each.goodput_per_s is None else f"{each.goodput_per_s:.2f}",
            f"{each.input_tokens:,}",
            f"{each.output_tokens:,}",
            f"{each.output_tokens_per_s:.1f}",
            f"{each.total_tokens_per_s:.1f}",
            f"{each.peak_concurrency}",
            f"{each.cpu_share:.1%}",
        )
    return table


def _percentiles(run: Figures) -> Table:
    table = _table("", "mean", "std", *(f"p{each}" for each in PERCENTILES))
    for metric in METRICS:
        values = run.times[metric]
        if values:
            cells = [statistics.fmean(values), statistics.pstdev(values)]
            cells += [percentile(values, each) for each in PERCENTILES]
            table.add_row(TITLES[metric], *(f"{cell:.2f}" for cell in cells))
    return table


def _latencies(runs: Sequence[Figures]) -> Table:
    table = _table("load", *(f"{metric.upper()} p50 / p99, ms" for metric in METRICS))
    for each in runs:
        table.add_row(each.name, *(_pair(each, metric) for metric in METRICS))
    return table


def _pair(run: Figures, metric: str) -> str:
    median = run.time_ms(metric, 50)
    return "-" if math.isnan(median) else f"{median:.1f} / {run.time_ms(metric, 99):.1f}"


def _table(first: str, *others: str) -> Table:
    table = Table()
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _distribution(values: Sequence[float]) -> Points:
    """(value, part that is not above it) in steps, at most so many of them."""
    ordered = sorted(values)
    number = min(len(ordered), _CURVE_STEPS)
    found = []
    for step in range(1, number + 1):
        value = ordered[math.ceil(step * len(ordered) / number) - 1]
        found += [(value, (step - 1) / number), (value, step / number)]
    return found
