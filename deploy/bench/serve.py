"""`tokend bench serve`: load on any OpenAI-compatible server, and what it does under it.

Closed loop (--concurrency), open loop (--request-rate) or the time stamps of a trace (--trace).
Several values are measured one after the other. TTFT, TPOT, ITL and E2EL are defined as by
`vllm bench serve`; token counts are the server's own where it gives them.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rich.console import Console

from deploy.bench.client import Target, base_url, first_model
from deploy.bench.dataset_options import (
    Trace,
    add_dataset,
    add_sizes,
    dataset_of,
    is_chat,
    material_of,
)
from deploy.bench.datasets import Dataset, Draws
from deploy.bench.figures import (
    Answers,
    Figures,
    Goodput,
    figures_of,
    html_page,
    note_answers,
    show,
)
from deploy.bench.load import Pace, Run, gamma_arrivals, measure, ramped, screen_for, warm_up
from deploy.bench.options import (
    Parser,
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

# The command line of `tokend bench serve`.


_LIMITS: Final = ("ttft", "tpot", "e2el")


def parse(words: Sequence[str], description: str) -> argparse.Namespace:
    """Raises ConfigError for words that do not go together."""
    parser = Parser(
        prog="tokend bench serve",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", required=True, help="of the server: http://127.0.0.1:8000")
    parser.add_argument("--model", help="by default the first that the server names")
    parser.add_argument("--api-key", default="")
    add_sizes(parser, 256, 128)
    add_dataset(parser)
    _add_pace(parser.add_argument_group("how fast, and how much"))
    _add_rest(parser.add_argument_group("what is made of it"))
    options = parser.parse_args(words)
    if len(options.concurrency or ()) > 1 and (options.request_rate or options.trace):
        raise ConfigError("one --concurrency at most limits an open loop")
    if options.request_rate and options.trace:
        raise ConfigError("--trace has time stamps of its own: no --request-rate")
    return options


def _goodput(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in _LIMITS:
        raise argparse.ArgumentTypeError(f"{text!r}: one of {', '.join(_LIMITS)}, as in ttft:500")
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
        help="closed loop: so many at once, one value after the other; 1..32 doubles (16); "
        "with --request-rate or --trace: at most so many under way",
    )
    group.add_argument(
        "--request-rate",
        type=several_rates,
        metavar="R[,R...]",
        help="open loop: sessions that begin in a second, one value after the other",
    )
    group.add_argument(
        "--burstiness",
        type=_burstiness,
        default=1.0,
        help="shape of the gamma distributed gaps; 1: Poisson, inf: a fixed beat (1)",
    )
    group.add_argument(
        "--ramp-seconds",
        type=positive,
        default=0.0,
        help="clients of a run join one by one within this time, or its rate grows to what it is",
    )
    group.add_argument("--max-requests", type=at_least_one, help="of each run")
    group.add_argument("--duration", type=positive, help="seconds in which a run sends requests")
    group.add_argument("--rounds", type=at_least_one, default=1, help="of all runs (1)")
    group.add_argument(
        "--warm-ups", type=from_zero, default=4, help="short requests before all that (4)"
    )
    group.add_argument(
        "--timeout", type=positive, default=600.0, help="seconds for an answer (600)"
    )


def _add_rest(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--temperature", type=float, default=0.0, help="(0)")
    group.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="let answers end before they have all their tokens",
    )
    group.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="fields of every request"
    )
    group.add_argument(
        "--check-share",
        type=share,
        default=0.05,
        help="part of the sessions that is the same in every run, greedy, and whose answers "
        "are compared (0.05)",
    )
    group.add_argument(
        "--goodput",
        type=_goodput,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits of a good request: ttft:500 tpot:50 e2el:10000",
    )
    group.add_argument("--json", metavar="FILE", help="write the figures there, too")
    group.add_argument("--html", metavar="FILE", help="write curves there")


_CONCURRENCY: Final = [16]
_SEEDS: Final = 1_000
"""Between those of two rounds, so that whoever adds 1 to --seed gets no round once more."""


def main(words: Sequence[str]) -> None:
    """Measure, print, write; raises TokendError when no request was answered."""
    options = parse(words, __doc__ or "")
    dataset, goodput = dataset_of(options), Goodput(dict(options.goodput))
    url = base_url(options.url)
    with writable("--json", options.json) as rows, writable("--html", options.html) as pages:
        model = options.model or first_model(url, options.api_key)
        target = Target(url, model, options.api_key, options.timeout, _fields(options))
        runs, answers = _measure(target, options, dataset, goodput)
        show(Console(width=150), runs, answers)
        write(rows, _document(options, target, runs, answers))
        write(pages, html_page(f"{model} at {url}", runs, answers))
    if not any(each.num_completed for each in runs):
        raise TokendError("bench serve: no request was answered")


def _measure(
    target: Target, options: argparse.Namespace, dataset: Dataset, goodput: Goodput
) -> tuple[list[Figures], Answers]:
    chat = is_chat(options)
    warm_up(target, material_of(options, chat=chat), options.warm_ups, chat=chat)
    runs, answers, screen = [], Answers(), screen_for(sys.stderr)
    for run in _runs(options, dataset):
        played = measure(target, run, screen)
        runs.append(figures_of(run.name, played, goodput))
        note_answers(played, answers)
    return runs, answers


def _runs(options: argparse.Namespace, dataset: Dataset) -> Iterator[Run]:
    """Every load in every round, each with prompts of its own."""
    number = 0
    for turn in range(1, options.rounds + 1):
        for name, pace in _paces(options, dataset, options.seed + _SEEDS * (turn - 1)):
            draws = Draws(options.seed + _SEEDS * number, options.check_share)
            suffix = f", round {turn}" if options.rounds > 1 else ""
            yield Run(name + suffix, dataset, draws, pace)
            number += 1


def _paces(options: argparse.Namespace, dataset: Dataset, seed: int) -> Iterator[tuple[str, Pace]]:
    duration = options.duration or math.inf
    if isinstance(dataset, Trace):
        (limit,) = options.concurrency or [None]
        most = min(len(dataset.lines), options.max_requests or math.inf)
        yield "trace", Pace(limit, dataset.offsets, 0.0, most, duration)
        return
    if options.request_rate:
        (limit,) = options.concurrency or [None]
        for rate in options.request_rate:
            number = _number(options, 100)
            arrivals = gamma_arrivals(rate, options.burstiness, seed, number)
            if options.ramp_seconds:
                arrivals = ramped(arrivals, options.ramp_seconds)
            most = number or math.inf
            yield f"{rate:g} a second", Pace(limit, arrivals, 0.0, most, duration)
        return
    for concurrency in options.concurrency or _CONCURRENCY:
        most = _number(options, max(32, 4 * concurrency)) or math.inf
        pace = Pace(concurrency, None, options.ramp_seconds, most, duration)
        yield f"{concurrency} at once", pace


def _number(options: argparse.Namespace, otherwise: int) -> int | None:
    """Requests of a run; None where only the time ends it."""
    if options.max_requests or options.duration:
        number: int | None = options.max_requests
        return number
    return otherwise


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    """Of every request."""
    fields: dict[str, Any] = {"temperature": options.temperature}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    fields.update(options.extra_body)
    return fields


def _document(
    options: argparse.Namespace, target: Target, runs: Sequence[Figures], answers: Answers
) -> str:
    flags = {
        name: value
        for name, value in vars(options).items()
        if name not in ("api_key", "json", "html", "url", "model")
    }
    document = {
        "command": "tokend bench serve",
        "url": target.url,
        "model": target.model,
        "options": flags,
        "runs": [each.plain() for each in runs],
        "answers_compared": answers.num_compared,
        "answers_different": len(answers.different),
    }
    return json.dumps(document, indent=2, default=str) + "\n"
