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

from deploy.loadtest.datasets.options import dataset_of, is_chat, material_of
from deploy.loadtest.datasets.recorded import Trace
from deploy.loadtest.datasets.sessions import Dataset, Draws
from deploy.loadtest.openai.client import Target, base_url
from deploy.loadtest.openai.questions import first_model
from deploy.loadtest.options import writable, write
from deploy.loadtest.serving.answers import Answers
from deploy.loadtest.serving.arrivals import gamma_arrivals, ramped
from deploy.loadtest.serving.figures import Figures, Goodput, figures_of, note_answers
from deploy.loadtest.serving.measure import Run, measure, warm_up
from deploy.loadtest.serving.options import parse
from deploy.loadtest.serving.play import Pace
from deploy.loadtest.serving.progress import screen_for
from deploy.loadtest.serving.report import html_page, show
from proto.errors import TokendError

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
