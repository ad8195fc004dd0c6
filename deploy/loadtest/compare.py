"""`tokend bench compare`: servers, or settings of the daemon, against each other in turns.

All of them run all the time (--restart: only while it is their turn) and one of them works: a
round gives each the same loads, and who goes first changes. A machine that is slower for a
minute is slower for all, so the ratio of each round says more than the figures do.

  tokend bench compare --server tokend=http://127.0.0.1:8000 \\
      --server llama='llama-server -m x.gguf -np 16 --port {port}'
  tokend bench compare --other=--async-scheduling -- --dtype bfloat16
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from rich.console import Console

from deploy.loadtest.comparison import Comparison, Figure, Share, Turn
from deploy.loadtest.datasets.options import add_sizes, material_of, sizes_of
from deploy.loadtest.datasets.random_prompts import RandomPrompts
from deploy.loadtest.datasets.sessions import Draws, Sizes
from deploy.loadtest.openai.client import Target
from deploy.loadtest.openai.questions import first_model
from deploy.loadtest.options import (
    Parser,
    at_least_one,
    from_zero,
    positive,
    several_counts,
    writable,
    write,
)
from deploy.loadtest.servers import ServerSpec, running, tokend
from deploy.loadtest.serving.figures import Goodput, figures_of
from deploy.loadtest.serving.measure import Run, measure, warm_up
from deploy.loadtest.serving.play import Pace
from deploy.loadtest.serving.progress import Screen, screen_for
from proto.errors import ConfigError

_SEEDS: Final = 1_000
_NO_LIMITS: Final = Goodput({})


def main(words: Sequence[str]) -> None:
    """Measure, print the tables, write the figures."""
    options = _parse(words)
    specs = _specs(options)
    comparison = Comparison([spec.name for spec in specs], figures(options))
    with writable("--json", options.json) as rows:
        _play(options, specs, comparison)
        console = Console(width=max(120, 40 + 32 * len(specs)))
        comparison.show(console, _title(options, comparison))
        write(rows, json.dumps(_document(options, comparison), indent=2) + "\n")


def figures(options: argparse.Namespace) -> list[Figure]:
    """The rows of the table, with the names that they have in a turn."""
    found = [
        Figure("alone_ttft_ms_p50", "first token alone, ms"),
        Figure("alone_tpot_ms_p50", "time per token alone, ms"),
    ]
    for number in options.concurrency:
        found += [
            Figure(f"at_{number}_output_tokens_per_s", f"output tokens/s, {number} at once"),
            Figure(f"at_{number}_ttft_ms_p50", f"first token, {number} at once, ms"),
            Figure(f"at_{number}_tpot_ms_p50", f"time per token, {number} at once, ms"),
            Figure(f"at_{number}_itl_ms_p99", f"between tokens, p99, {number} at once, ms"),
        ]
    return found


def _play(options: argparse.Namespace, specs: Sequence[ServerSpec], comparison: Comparison) -> None:
    screen = screen_for(sys.stderr)
    with ExitStack() as stack:
        targets = {}
        if not options.restart:
            targets = {spec.name: _prepared(options, stack, spec) for spec in specs}
        for number in range(options.rounds):
            first = number % len(specs)
            for spec in (*specs[first:], *specs[:first]):
                with ExitStack() as turn:
                    target = targets.get(spec.name) or _prepared(options, turn, spec)
                    played = _turn(options, target, number, comparison.share(spec.name), screen)
                    comparison.note(number, spec.name, played)


def _prepared(options: argparse.Namespace, stack: ExitStack, spec: ServerSpec) -> Target:
    """A server that runs until the stack is left, and has been warmed up."""
    url = stack.enter_context(running(spec))
    fields = {"temperature": 0, "ignore_eos": True}
    target = Target(url, first_model(url), fields=fields)
    warm_up(target, material_of(options), options.warm_ups)
    return target


def _turn(
    options: argparse.Namespace, target: Target, number: int, share: Share, screen: Screen
) -> Turn:
    """The loads of one round on one server, whose prompts are new in each round; then a few
    requests that are the same in all rounds, whose answers are compared and whose times are not:
    a server may have them in its cache."""
    alone = Sizes(options.alone_input_tokens, options.output_tokens)
    loads = [("alone", 1, options.alone, alone)]
    loads += [
        (f"at_{each}", each, options.requests or 2 * each, sizes_of(options))
        for each in options.concurrency
    ]
    found: Turn = {}
    for place, (name, concurrency, requests, sizes) in enumerate(loads):
        draws = Draws(options.seed + _SEEDS * number + place)
        dataset = RandomPrompts(sizes, material_of(options))
        pace = Pace(concurrency, max_requests=requests)
        label = f"round {number + 1}, {share.name}, {name.replace('_', ' ')}"
        played = measure(target, Run(label, dataset, draws, pace), screen)
        share.note(played)
        plain = figures_of(name, played, _NO_LIMITS).plain()
        found |= {f"{name}_{key}": value for key, value in plain.items()}
    if options.checks:
        dataset = RandomPrompts(sizes_of(options), material_of(options))
        pace = Pace(options.checks, max_requests=options.checks)
        draws = Draws(options.seed, check_share=1.0)
        share.note(measure(target, Run(f"{share.name}, checks", dataset, draws, pace), screen))
    return found


def _specs(options: argparse.Namespace) -> list[ServerSpec]:
    """The servers in the order of the table."""
    if options.other is not None:
        if options.server:
            raise ConfigError("bench compare: --other or --server, not both")
        flags = options.serve_flags
        return [
            tokend("with", [*flags, *shlex.split(options.other)], options.start_seconds),
            tokend("without", flags, options.start_seconds),
        ]
    if options.serve_flags:
        raise ConfigError("bench compare: flags after -- go with --other")
    specs = [
        ServerSpec.parse(each, options.ready_path, options.start_seconds) for each in options.server
    ]
    if len({spec.name for spec in specs}) < max(2, len(specs)):
        raise ConfigError(
            "bench compare wants two --server NAME=... of different names, or --other"
        )
    return specs


def _title(options: argparse.Namespace, comparison: Comparison) -> str:
    what = f"{options.input_tokens} tokens in, {options.output_tokens} out"
    if options.other is not None:
        flags = shlex.join(options.serve_flags) or "default settings"
        what = f"{flags}, with and without {options.other}: {what}"
    return f"{what}; medians of {comparison.num_rounds} rounds"


def _document(options: argparse.Namespace, comparison: Comparison) -> dict[str, object]:
    flags = {name: value for name, value in vars(options).items() if name != "json"}
    return {"command": "tokend bench compare", "options": flags, **comparison.plain()}


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokend bench compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=...",
        help="a URL, or a command with {port} in it; the first is compared with each other one",
    )
    parser.add_argument("--other", help='flags of tokend serve: "--async-scheduling"')
    parser.add_argument("--restart", action="store_true", help="start servers for each turn")
    parser.add_argument("--ready-path", default="/health", help="200 when it is up (/health)")
    parser.add_argument("--start-seconds", type=positive, default=600.0, help="at most (600)")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="(3)")
    parser.add_argument(
        "--concurrency", type=several_counts, default=[16], metavar="N[,N...]", help="(16)"
    )
    parser.add_argument("--requests", type=at_least_one, help="of each load; twice as many as run")
    parser.add_argument("--alone", type=at_least_one, default=3, help="one after the other (3)")
    parser.add_argument("--alone-input-tokens", type=at_least_one, default=128, help="(128)")
    parser.add_argument("--warm-ups", type=from_zero, default=4, help="(4)")
    parser.add_argument(
        "--checks",
        type=from_zero,
        default=4,
        help="requests of each round that are always the same; their answers are compared, and "
        "their times are in no figure (4)",
    )
    add_sizes(parser, 256, 128)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of both daemons (--other)")
    return parser.parse_args(words)
