"""`tokend bench serve`: load test of any OpenAI-compatible server.

Closed loop (--concurrency), open loop (--request-rate) or the time stamps of a trace (--trace).
Several values are measured one after the other. TTFT, TPOT, ITL and E2EL are defined as by
`vllm bench serve`; token counts are those of the server if it reports them.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Console

from deploy.bench.client import Target, base_url, first_model
from deploy.bench.datasets import (
    Dataset,
    SessionSeeds,
    add_dataset,
    add_sizes,
    dataset_of,
    is_chat,
    prompts_of,
    unused_options,
)
from deploy.bench.figures import AnswerComparison, RunFigures, figures_of, html_page, show
from deploy.bench.load import LoadPattern, gamma_arrivals, measure, ramped, warm_up
from deploy.bench.options import (
    BenchParser,
    add_values,
    at_least_one,
    from_zero,
    positive,
    several_counts,
    several_rates,
    share,
    writable,
    write,
)
from proto.errors import ConfigError, TokendError

_GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")


def parse(words: Sequence[str], description: str) -> argparse.Namespace:
    """Parse the command line; raises ConfigError for invalid or conflicting flags."""
    parser = BenchParser(prog="tokend bench serve", description=description)
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="URL of the server (http://127.0.0.1:8000)",
    )
    parser.add_argument("--model", help="model name; by default the first in /v1/models")
    parser.add_argument(
        "--api-key", default="", help="API key of the server (TOKEND_API_KEY, without the flag)"
    )
    add_sizes(parser, 256, 128)
    add_dataset(parser)
    _add_pace(parser.add_argument_group("load"))
    _add_rest(parser.add_argument_group("answers and output"))
    options = parser.parse_args(words)
    if len(options.concurrency or ()) > 1 and (options.request_rate or options.trace):
        raise ConfigError("an open loop takes at most one --concurrency")
    if options.request_rate and options.trace:
        raise ConfigError("--trace has its own time stamps: omit --request-rate")
    return options


def _goodput(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in _GOODPUT_METRICS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: one of {', '.join(_GOODPUT_METRICS)}, as in ttft:500"
        )
    return name, positive(limit)


def _burstiness(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise ValueError
    return number


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError
    return found


def _add_pace(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--concurrency",
        type=several_counts,
        metavar="N[,N...]",
        help="closed loop: concurrent requests; several values are measured in turn, 1..32 means "
        "1,2,4,8,16,32 (16); with --request-rate or --trace: maximum of concurrent requests",
    )
    group.add_argument(
        "--request-rate",
        type=several_rates,
        metavar="R[,R...]",
        help="open loop: sessions per second; several values are measured in turn",
    )
    add_values(
        group,
        (
            *("--burstiness", _burstiness, 1.0),
            "shape of the gamma distributed gaps; 1: Poisson, inf: constant gaps",
        ),
        ("--duration", positive, None, "seconds during which a run sends requests"),
        ("--rounds", at_least_one, 1, "repetitions of all runs"),
        ("--warm-ups", from_zero, 4, "short requests before the first run"),
        ("--timeout", positive, 600.0, "seconds per request"),
    )
    group.add_argument(
        "--ramp-seconds",
        type=positive,
        default=0.0,
        help="the clients of a run start one by one within this time, or its rate grows linearly",
    )
    group.add_argument(
        "--max-requests", "--num-prompts", type=at_least_one, help="maximum requests per run"
    )


def _add_rest(group: "argparse._ArgumentGroup") -> None:
    add_values(
        group,
        ("--temperature", float, 0.0, ""),
        (
            *("--check-share", share, 0.05),
            "share of the sessions that are the same in every run and sampled greedily, so that "
            "their answers can be compared",
        ),
    )
    group.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="let answers end at the end-of-sequence token",
    )
    group.add_argument(
        "--extra-body",
        type=_object,
        default={},
        metavar="JSON",
        help="further fields of every request",
    )
    group.add_argument(
        "--goodput",
        type=_goodput,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits for goodput: ttft:500 tpot:50 e2el:10000",
    )
    group.add_argument("--json", metavar="FILE", help="write the figures to a file")
    group.add_argument("--html", metavar="FILE", help="write a page with plots to a file")


_CONCURRENCY: Final = [16]
_SEED_STEP: Final = 1_000
"""Difference between the seeds of two rounds, so that --seed + 1 repeats no round."""


def main(words: Sequence[str]) -> None:
    """Run all loads, print and write the figures; raises TokendError if no request succeeded."""
    options = parse(words, __doc__ or "")
    dataset = dataset_of(options)
    url = base_url(options.url)
    with writable("--json", options.json) as rows, writable("--html", options.html) as pages:
        model = options.model or first_model(url, options.api_key)
        target = Target(url, model, options.api_key, options.timeout, _fields(options))
        started = datetime.now(UTC)
        runs, answers = _measure(target, options, dataset)
        head = _head(options, started, runs)
        title = f"{model} at {url}"
        console = Console() if sys.stdout.isatty() else Console(width=150)
        show(console, [title, *head], runs, answers)
        write(rows, _document(options, target, started, runs, answers))
        write(pages, html_page(title, head, runs, answers))
    if not any(run.num_completed for run in runs):
        raise TokendError("bench serve: all requests failed")


def _measure(
    target: Target, options: argparse.Namespace, dataset: Dataset
) -> tuple[list[RunFigures], AnswerComparison]:
    """Run every load of every round, each with different prompts."""
    chat = is_chat(options)
    warm_up(target, prompts_of(options, chat=chat), options.warm_ups, chat=chat)
    runs: list[RunFigures] = []
    answers = AnswerComparison()
    for round_number in range(options.rounds):
        suffix = f", round {round_number + 1}" if options.rounds > 1 else ""
        for name, pattern in _patterns(options, dataset, options.seed + _SEED_STEP * round_number):
            seeds = SessionSeeds(options.seed + _SEED_STEP * len(runs), options.check_share)
            result = measure(target, dataset.sessions(seeds), pattern, name + suffix, sys.stderr)
            runs.append(figures_of(name + suffix, result, dict(options.goodput)))
            answers.note_all(result.checked)
    return runs, answers


def _patterns(
    options: argparse.Namespace, dataset: Dataset, seed: int
) -> Iterator[tuple[str, LoadPattern]]:
    duration = options.duration or math.inf
    if dataset.offsets is not None:
        (limit,) = options.concurrency or [None]
        max_requests = min(len(dataset.offsets), options.max_requests or math.inf)
        yield "trace", LoadPattern(limit, dataset.offsets, 0.0, max_requests, duration)
        return
    if options.request_rate:
        (limit,) = options.concurrency or [None]
        for rate in options.request_rate:
            number = _num_requests(options, 100)
            arrivals = gamma_arrivals(rate, options.burstiness, seed, number)
            if options.ramp_seconds:
                arrivals = ramped(arrivals, options.ramp_seconds)
            max_requests = number or math.inf
            yield f"{rate:g} per second", LoadPattern(limit, arrivals, 0.0, max_requests, duration)
        return
    for concurrency in options.concurrency or _CONCURRENCY:
        max_requests = _num_requests(options, max(32, 4 * concurrency)) or math.inf
        pattern = LoadPattern(concurrency, None, options.ramp_seconds, max_requests, duration)
        yield f"concurrency {concurrency}", pattern


def _num_requests(options: argparse.Namespace, default: int) -> int | None:
    """Return the number of requests of a run; None if only --duration ends it."""
    if options.max_requests or options.duration:
        number: int | None = options.max_requests
        return number
    return default


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of every request."""
    fields: dict[str, Any] = {"temperature": options.temperature}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    fields.update(options.extra_body)
    return fields


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a reader needs to repeat the measurement."""
    return {
        name: value
        for name, value in vars(options).items()
        if name not in ("api_key", "json", "html", "url", "model")
    }


def _head(options: argparse.Namespace, started: datetime, runs: Sequence[RunFigures]) -> list[str]:
    """Return date, lengths and settings of the measurement, for people.

    Settings without effect are left out.
    """
    num_answers = sum(run.num_completed for run in runs) or 1
    num_in, num_out = (
        sum(getattr(run, name) for run in runs) / num_answers
        for name in ("input_tokens", "output_tokens")
    )
    unused = unused_options(options) | ({"ramp_seconds"} if options.trace else set())
    unused |= set() if options.request_rate else {"burstiness"}
    settings = " ".join(
        f"--{name.replace('_', '-')}={_text(value)}"
        for name, value in _settings(options).items()
        if name not in unused and value not in (None, False, [], {})
    )
    return [
        f"started {started:%Y-%m-%d %H:%M:%S} UTC; per request on average {num_in:,.0f} tokens in, "
        f"{num_out:,.0f} out",
        f"settings: {settings}",
    ]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _document(
    options: argparse.Namespace,
    target: Target,
    started: datetime,
    runs: Sequence[RunFigures],
    answers: AnswerComparison,
) -> str:
    document = {
        "command": "tokend bench serve",
        "url": target.url,
        "model": target.model,
        "started": started.isoformat(timespec="seconds"),
        "options": _settings(options),
        "runs": [run.to_dict() for run in runs],
        "answers_compared": answers.num_compared,
        "answers_different": len(answers.different),
    }
    return json.dumps(document, indent=2, default=str) + "\n"
