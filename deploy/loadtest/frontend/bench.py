"""`tokend bench frontend`: what streaming costs front end and engine when the model costs nothing.

All processes and sockets of a daemon are real but for the worker, which makes tokens up and
sleeps over each step for --step-ms. That is to be long enough for every token to have an event
of its own (tokens an event: 1): a front end that lags behind sends several as one, which is
cheaper. --step-ms 0 finds out how fast it goes instead.

With --peer-python and --peer-model vLLM's API server and engine get the same load, likewise
without a model, in turns with ours: the one that does not have its turn idles.

  tokend bench frontend --streams 1000
  tokend bench frontend --peer-python ~/vllm/bin/python --peer-model ~/SmolLM2-135M-Instruct
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from rich.console import Console

from deploy.loadtest.daemon import metrics_of
from deploy.loadtest.frontend.figures import Figures, Reading, figures_of, limits, medians, table
from deploy.loadtest.frontend.streams import Streams
from deploy.loadtest.frontend.subjects import VLLM, Limits, Ours, Subject
from deploy.loadtest.limits import judge, limits_json, limits_table
from deploy.loadtest.openai.questions import first_model
from deploy.loadtest.options import (
    Parser,
    at_least_one,
    from_zero_number,
    positive,
    writable,
    write,
)
from proto.errors import ConfigError

_OPEN_SECONDS: Final = 120.0
_SETTLE_SECONDS: Final = 2.0
_LEAVE_SECONDS: Final = 2.0
"""In which a server notices that all clients are gone."""
_FIRST_TOKEN: Final = 1_000
_TOKENS: Final = "vllm:generation_tokens_total"
_STEPS: Final = "vllm:iteration_tokens_total_count"


def main(words: Sequence[str]) -> None:
    """Measure, print the table, write the figures; raises TokendError for a limit missed."""
    options = _parse(words)
    with writable("--json", options.json) as files:
        rounds = _rounds(options)
        ours, *peers = rounds.values()
        judged = limits(ours, peers[0] if peers else ())
        columns = {name: medians(each) for name, each in rounds.items()}
        document = {
            "command": "tokend bench frontend",
            "options": {name: value for name, value in vars(options).items() if name != "json"},
            "medians": {name: each.plain() for name, each in columns.items()},
            "rounds": {name: [one.plain() for one in each] for name, each in rounds.items()},
        }
        write(files, limits_json(judged, document))
    console = Console(width=100)
    console.print(table(_title(options), columns))
    console.print(limits_table(judged))
    judge("bench frontend", judged)


def prompts_of(number: int, length: int) -> list[list[int]]:
    """Token ids, no two prompts alike from the first on."""
    return [[_FIRST_TOKEN + each] + [_FIRST_TOKEN] * (length - 1) for each in range(number)]


def _rounds(options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Of each server, in turns."""
    with ExitStack() as stack:
        subjects = _subjects(options, stack)
        rounds: dict[str, list[Figures]] = {each.name: [] for each in subjects}
        for number in range(options.rounds):
            for subject in subjects:
                print(f"round {number + 1}: {subject.name}", file=sys.stderr, flush=True)
                rounds[subject.name].append(asyncio.run(_measure(subject, options)))
    return rounds


async def _measure(subject: Subject, options: argparse.Namespace) -> Figures:
    prompts = prompts_of(options.streams, options.input_tokens)
    model = await asyncio.to_thread(first_model, subject.url)
    streams = Streams(subject.url, model, prompts, options.output_tokens)
    try:
        await streams.open(_OPEN_SECONDS)
        await asyncio.sleep(_SETTLE_SECONDS)
        before, client = await _reading(subject, streams), time.process_time()
        window = await streams.watch(options.seconds)
        client = time.process_time() - client
        after = await _reading(subject, streams)
    finally:
        streams.close()
    await asyncio.sleep(_LEAVE_SECONDS)
    return figures_of(before, after, window, client)


async def _reading(subject: Subject, streams: Streams) -> Reading:
    """The counts are asked for after the CPU time is taken: each window pays for one of them."""
    seconds, used = time.monotonic(), subject.cpu_seconds()
    tokens, steps = await asyncio.to_thread(metrics_of, subject.url, _TOKENS, _STEPS)
    return Reading(seconds, used, tokens, steps, streams.num_events)


def _subjects(options: argparse.Namespace, stack: ExitStack) -> list[Subject]:
    limited = Limits(
        options.streams, options.input_tokens + options.output_tokens, options.step_ms / 1e3
    )
    subjects: list[Subject] = [Ours(stack, limited, options.serve_flags)]
    if options.peer_python:
        subjects.append(VLLM(stack, limited, options.peer_python, options.peer_model))
    return subjects


def _title(options: argparse.Namespace) -> str:
    return (
        f"{options.streams} streams, a step of {options.step_ms:g} ms, {options.seconds:g} s; "
        f"medians of {options.rounds}"
    )


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokend bench frontend",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=at_least_one, default=1000, help="at once (1000)")
    parser.add_argument("--step-ms", type=from_zero_number, default=250.0, help="(250)")
    parser.add_argument("--seconds", type=positive, default=20.0, help="of each window (20)")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="(3)")
    parser.add_argument("--input-tokens", type=at_least_one, default=32, help="(32)")
    parser.add_argument(
        "--output-tokens",
        type=at_least_one,
        default=4_000,
        help="of each stream, which ends earlier: when the window does (4000)",
    )
    parser.add_argument("--peer-python", metavar="PATH", help="of an environment with vLLM")
    parser.add_argument(
        "--peer-model", metavar="FOLDER", help="the same model's config and tokenizer, for vLLM"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: more flags of tokend serve")
    options = parser.parse_args(words)
    if bool(options.peer_python) != bool(options.peer_model):
        raise ConfigError("bench frontend: --peer-python and --peer-model go together")
    return options
