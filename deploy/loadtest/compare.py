"""`tokend bench compare`: servers, or settings of the daemon, against each other in turns.

All of them run all the time (--restart: only while it is their turn) and one of them works: a
round gives each the same loads, and who goes first changes. A machine that is slower for a
minute is slower for all, so the ratio of each round says more than the figures do.

Beside a server that is started as `tokend serve` stands its ceiling: what the load's matrix
products, its K and V and its prompts' attention take by themselves, measured before each turn of
its own while all servers are idle, with the weights in the forms that its settings give.

  tokend bench compare --server tokend=http://127.0.0.1:8000 \\
      --server llama='llama-server -m x.gguf -np 16 --port {port}'
  tokend bench compare --other=--async-scheduling -- --dtype bfloat16
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from rich.console import Console

from deploy.loadtest.ceiling import ClosedLoad, row_counts
from deploy.loadtest.ceilings import ALONE, Bounds, DaemonBounds, NoBounds
from deploy.loadtest.comparison import Comparison, Figure, Share, Turn
from deploy.loadtest.datasets.options import add_sizes, material_of, sizes_of
from deploy.loadtest.datasets.random_prompts import RandomPrompts
from deploy.loadtest.datasets.sessions import Draws, Sizes
from deploy.loadtest.hardware import budget_of, limits_program, settings_of
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
from deploy.surroundings import Surroundings
from proto.errors import ConfigError

_SEEDS: Final = 1_000
_NO_LIMITS: Final = Goodput({})


def main(words: Sequence[str]) -> None:
    """Measure, print the tables, write the figures."""
    options = _parse(words)
    specs = _specs(options)
    with writable("--json", options.json) as rows, ExitStack() as stack:
        bounds = {spec.name: _bounds(options, stack, spec) for spec in specs}
        comparison = Comparison(
            [spec.name for spec in specs], figures(options, list(bounds.values()))
        )
        _play(options, specs, bounds, comparison)
        console = Console(width=max(120, 40 + 32 * len(specs)))
        comparison.show(console, _title(options, comparison))
        for each in bounds.values():
            for line in each.describe():
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        write(rows, json.dumps(_document(options, comparison), indent=2) + "\n")


def figures(options: argparse.Namespace, bounds: Sequence[Bounds]) -> list[Figure]:
    """The rows of the table, with the names that they have in a turn."""
    found = [
        Figure("alone_ttft_ms_p50", "first token alone, ms"),
        Figure("alone_tpot_ms_p50", "time per token alone, ms"),
        *_of_every_load(ALONE, ALONE, bounds),
    ]
    for number in options.concurrency:
        load, title = f"at_{number}", f"{number} at once"
        found += [
            Figure(f"{load}_output_tokens_per_s", f"output tokens/s, {title}"),
            Figure(f"{load}_ttft_ms_p50", f"first token, {title}, ms"),
            Figure(f"{load}_tpot_ms_p50", f"time per token, {title}, ms"),
            Figure(f"{load}_itl_ms_p50", f"between tokens, median, {title}, ms"),
            Figure(f"{load}_itl_ms_p99", f"between tokens, p99, {title}, ms"),
            Figure(f"{load}_itl_p99_of_p50", f"between tokens, p99 / median, {title} (<= 2)"),
            *_of_every_load(load, title, bounds),
        ]
    return found


def _of_every_load(load: str, title: str, bounds: Sequence[Bounds]) -> list[Figure]:
    """What the client took, and ceilings where any server has them."""
    client = Figure(f"{load}_client_cpu_share", f"client's part of a core, {title}", 3)
    return [client, *max((each.figures(load, title) for each in bounds), key=len)]


def _play(
    options: argparse.Namespace,
    specs: Sequence[ServerSpec],
    bounds: Mapping[str, Bounds],
    comparison: Comparison,
) -> None:
    screen = screen_for(sys.stderr)
    with ExitStack() as stack:
        targets = {}
        if not options.restart:
            targets = {spec.name: _prepared(options, stack, spec) for spec in specs}
        for number in range(options.rounds):
            first = number % len(specs)
            for spec in (*specs[first:], *specs[:first]):
                with ExitStack() as turn:
                    bound = bounds[spec.name].measure()
                    target = targets.get(spec.name) or _prepared(options, turn, spec)
                    played = _turn(options, target, number, comparison.share(spec.name), screen)
                    comparison.note(number, spec.name, bound.beside(played))


def _loads(options: argparse.Namespace) -> dict[str, ClosedLoad]:
    """What each turn has, by name."""
    alone = ClosedLoad(1, options.alone, options.alone_input_tokens, options.output_tokens)
    sizes = options.input_tokens, options.output_tokens
    return {ALONE: alone} | {
        f"at_{each}": ClosedLoad(each, options.requests or 2 * each, *sizes)
        for each in options.concurrency
    }


def _bounds(options: argparse.Namespace, stack: ExitStack, spec: ServerSpec) -> Bounds:
    """Of a server; what measures them runs until the stack is left."""
    config = settings_of(spec, Surroundings.of(os.environ).settings) if options.ceilings else None
    if config is None:
        return NoBounds()
    rows = row_counts([each.concurrency for each in _loads(options).values()], budget_of(config))
    limits = limits_program(spec.name, config, rows, prompt_tokens=options.input_tokens)
    stack.enter_context(limits.program)
    return DaemonBounds(limits, _loads(options))


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
    found: Turn = {}
    for place, (name, load) in enumerate(_loads(options).items()):
        draws = Draws(options.seed + _SEEDS * number + place)
        ratio = 0.0 if name == ALONE else options.range_ratio
        sizes = Sizes(load.input_tokens, load.output_tokens, ratio)
        dataset = RandomPrompts(sizes, material_of(options))
        pace = Pace(load.concurrency, max_requests=load.num_requests)
        label = f"round {number + 1}, {share.name}, {name.replace('_', ' ')}"
        played = measure(target, Run(label, dataset, draws, pace), screen)
        share.note(played)
        plain = with_gap_ratio(figures_of(name, played, _NO_LIMITS).plain())
        found |= {f"{name}_{key}": value for key, value in plain.items()}
    if options.checks:
        dataset = RandomPrompts(sizes_of(options), material_of(options))
        pace = Pace(options.checks, max_requests=options.checks)
        draws = Draws(options.seed, check_share=1.0)
        share.note(measure(target, Run(f"{share.name}, checks", dataset, draws, pace), screen))
    return found


def with_gap_ratio(plain: Turn) -> Turn:
    """Figures, and how long the longest gaps are by the usual one where there are such gaps."""
    median = plain.get("itl_ms_p50", 0.0)
    return {**plain, "itl_p99_of_p50": plain["itl_ms_p99"] / median} if median else plain


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
    parser.add_argument(
        "--ceilings",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure what the hardware allows beside each server started as tokend serve; needs "
        "compiled kernels (yes)",
    )
    add_sizes(parser, 256, 128)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of both daemons (--other)")
    return parser.parse_args(words)
