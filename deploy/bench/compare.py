"""`tokend bench compare`: servers, or settings of the daemon, against each other in turns.

All of them run all the time (--restart: only while it is their turn) and one of them works: a
round gives each the same loads, and who goes first changes. A machine that is slower for a
minute is slower for all, so the ratio of each round says more than the figures do.

  tokend bench compare --server tokend=http://127.0.0.1:8000 \
      --server llama='llama-server -m x.gguf -np 16 --port {port}'
  tokend bench compare --other=--async-scheduling -- --dtype bfloat16
"""

import argparse
import json
import math
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.bench.client import Target, first_model
from deploy.bench.dataset_options import add_sizes, material_of, sizes_of
from deploy.bench.datasets import Draws, RandomPrompts, Sizes
from deploy.bench.figures import Answers, Goodput, figures_of
from deploy.bench.load import Pace, Played, Run, Screen, measure, screen_for, warm_up
from deploy.bench.options import (
    Parser,
    at_least_one,
    from_zero,
    positive,
    several_counts,
    writable,
    write,
)
from deploy.bench.servers import ServerSpec, running, tokend
from proto.errors import ConfigError

# What servers did in the rounds of a comparison, and what is made of it.
#
# Knows nothing of how it was measured. The first server is the one that is compared with each
# other one, round by round.


Turn = dict[str, Any]
"""Figures of one server in one round, by name."""
_SHOWN: Final = 5


@dataclass(frozen=True)
class Figure:
    """A row. key: its name in a turn, with the unit. title: for people. digits: after the point."""

    key: str
    title: str
    digits: int = 2

    def show(self, value: float) -> str:
        """A value for people; a dash where there is none."""
        return "-" if math.isnan(value) else f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Ratios:
    """Of the first server to another one, one a round."""

    values: Sequence[float]

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Ratios":
        """Rounds in which one of them has no figure are left out."""
        pairs = zip(ours, theirs, strict=True)
        return cls([a / b for a, b in pairs if not (math.isnan(a) or math.isnan(b)) and b])

    def describe(self) -> str:
        """Median (lowest to highest)."""
        if not self.values:
            return "-"
        low, high = min(self.values), max(self.values)
        return f"{statistics.median(self.values):.3f} ({low:.3f} to {high:.3f})"

    def plain(self) -> dict[str, float]:
        if not self.values:
            return {}
        return {
            "median": statistics.median(self.values),
            "min": min(self.values),
            "max": max(self.values),
        }


@dataclass
class Share:
    """What one server had over all rounds: time, the client's CPU, failures, answers."""

    name: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    num_requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    answers: Answers = field(default_factory=Answers)

    def note(self, played: Played) -> None:
        self.seconds += played.seconds
        self.cpu_seconds += played.cpu_seconds
        self.num_requests += len(played.exchanges)
        self.errors.update(each.error for each in played.exchanges if each.error)
        for ask, exchange in played.checked:
            self.answers.note(ask, exchange.text)

    @property
    def cpu_share(self) -> float:
        return self.cpu_seconds / self.seconds if self.seconds else 0.0


class Comparison:
    """names: of the servers. figures: the rows."""

    def __init__(self, names: Sequence[str], figures: Sequence[Figure]) -> None:
        self._names = list(names)
        self._figures = list(figures)
        self._shares = {name: Share(name) for name in names}
        self._rounds: list[dict[str, Turn]] = []

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    def share(self, name: str) -> Share:
        return self._shares[name]

    def note(self, number: int, name: str, turn: Turn) -> None:
        """A server's turn in a round, counted from 0."""
        if number == len(self._rounds):
            self._rounds.append({})
        self._rounds[number][name] = turn

    def values(self, name: str, figure: Figure) -> list[float]:
        """One a round; not a number where every request failed."""
        return [float(each[name].get(figure.key, math.nan)) for each in self._rounds]

    def median(self, name: str, figure: Figure) -> float:
        values = [each for each in self.values(name, figure) if not math.isnan(each)]
        return statistics.median(values) if values else math.nan

    def ratios(self, figure: Figure, other: str) -> Ratios:
        """Of the first server to another one."""
        return Ratios.of(self.values(self._names[0], figure), self.values(other, figure))

    def show(self, console: Console, title: str) -> None:
        """Print everything."""
        first, *others = self._names
        table = Table(title=title)
        table.add_column("figure")
        for column in (*self._names, *(f"{first} / {other}" for other in others)):
            table.add_column(column, justify="right")
        for figure in self._figures:
            medians = [figure.show(self.median(name, figure)) for name in self._names]
            ratios = [self.ratios(figure, other).describe() for other in others]
            table.add_row(figure.title, *medians, *ratios)
        console.print(table)
        for name in self._names:
            for line in self._notes(self._shares[name]):
                console.print(line, markup=False, highlight=False, soft_wrap=True)

    def plain(self) -> Mapping[str, object]:
        """For JSON."""
        first, *others = self._names
        return {
            "servers": {name: self._plain_share(self._shares[name]) for name in self._names},
            "figures": {
                figure.key: {
                    "medians": {name: self._plain_median(name, figure) for name in self._names},
                    "ratios": {
                        f"{first} / {other}": self.ratios(figure, other).plain() for other in others
                    },
                }
                for figure in self._figures
            },
            "rounds": self._rounds,
        }

    def _plain_median(self, name: str, figure: Figure) -> float | None:
        median = self.median(name, figure)
        return None if math.isnan(median) else median

    def _plain_share(self, share: Share) -> dict[str, object]:
        return {
            "client_cpu_share": share.cpu_share,
            "num_requests": share.num_requests,
            "num_failed": share.errors.total(),
            "errors": dict(share.errors),
            "answers_compared": share.answers.num_compared,
            "answers_different": len(share.answers.different),
        }

    def _notes(self, share: Share) -> list[str]:
        answers = share.answers
        found = [
            f"{share.name}: {share.num_requests} requests, {share.errors.total()} failed; answers "
            f"to the same request: {answers.num_compared} compared, {len(answers.different)} "
            f"different; the client took {share.cpu_share:.1%} of one core"
        ]
        found += [f"  failed: {error}" for error, _ in share.errors.most_common(_SHOWN)]
        return found + [f"  different: {each}" for each in answers.different[:_SHOWN]]


_SEEDS: Final = 1_000
_NO_LIMITS: Final = Goodput({})
ALONE: Final = "alone"
"""The load of one request after the other."""


@dataclass(frozen=True)
class ClosedLoad:
    """`num_requests` in all, `concurrency` at once, all of the same lengths."""

    concurrency: int
    num_requests: int
    input_tokens: int
    output_tokens: int


def main(words: Sequence[str]) -> None:
    """Measure, print the tables, write the figures."""
    CompareBench(parse(words)).run()


class CompareBench:
    """The rounds of a comparison. A subclass may add figures to each turn."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.specs = _specs(options)

    def extra_figures(self, load: str, title: str) -> Sequence[Figure]:
        """Return further rows of the table for one load."""
        return ()

    def before_turn(self, spec: ServerSpec) -> None:
        """Measure what a turn is compared with; all servers are idle."""

    def after_turn(self, spec: ServerSpec, turn: Turn) -> Turn:
        """Return the figures of the turn with those of `extra_figures`."""
        return turn

    def notes(self) -> Sequence[str]:
        """Return lines to print below the table."""
        return ()

    def run(self) -> None:
        """Play all rounds, print the tables, write the figures."""
        options = self.options
        with writable("--json", options.json) as rows:
            comparison = Comparison([spec.name for spec in self.specs], self.figures())
            self._play(comparison)
            console = Console(width=max(120, 40 + 32 * len(self.specs)))
            comparison.show(console, _title(options, comparison))
            for line in self.notes():
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            write(rows, json.dumps(_document(options, comparison), indent=2) + "\n")

    def figures(self) -> list[Figure]:
        """Return the rows of the table, with the names that they have in a turn."""
        found = [
            Figure("alone_ttft_ms_p50", "first token alone, ms"),
            Figure("alone_tpot_ms_p50", "time per token alone, ms"),
            *self._figures_of_load(ALONE, ALONE),
        ]
        for number in self.options.concurrency:
            load, title = f"at_{number}", f"{number} at once"
            found += [
                Figure(f"{load}_output_tokens_per_s", f"output tokens/s, {title}"),
                Figure(f"{load}_ttft_ms_p50", f"first token, {title}, ms"),
                Figure(f"{load}_tpot_ms_p50", f"time per token, {title}, ms"),
                Figure(f"{load}_itl_ms_p50", f"between tokens, median, {title}, ms"),
                Figure(f"{load}_itl_ms_p99", f"between tokens, p99, {title}, ms"),
                Figure(f"{load}_itl_p99_of_p50", f"between tokens, p99 / median, {title} (<= 2)"),
                *self._figures_of_load(load, title),
            ]
        return found

    def loads(self) -> dict[str, ClosedLoad]:
        """Return the loads of each turn by name."""
        options = self.options
        alone = ClosedLoad(1, options.alone, options.alone_input_tokens, options.output_tokens)
        sizes = options.input_tokens, options.output_tokens
        return {ALONE: alone} | {
            f"at_{number}": ClosedLoad(number, options.requests or 2 * number, *sizes)
            for number in options.concurrency
        }

    def _figures_of_load(self, load: str, title: str) -> list[Figure]:
        client = Figure(f"{load}_client_cpu_share", f"client's part of a core, {title}", 3)
        return [client, *self.extra_figures(load, title)]

    def _play(self, comparison: Comparison) -> None:
        options, specs = self.options, self.specs
        screen = screen_for(sys.stderr)
        with ExitStack() as stack:
            targets = {}
            if not options.restart:
                targets = {spec.name: _prepared(options, stack, spec) for spec in specs}
            for number in range(options.rounds):
                first = number % len(specs)
                for spec in (*specs[first:], *specs[:first]):
                    with ExitStack() as turn:
                        self.before_turn(spec)
                        target = targets.get(spec.name) or _prepared(options, turn, spec)
                        share = comparison.share(spec.name)
                        played = self._turn(target, number, share, screen)
                        comparison.note(number, spec.name, self.after_turn(spec, played))

    def _turn(self, target: Target, number: int, share: Share, screen: Screen) -> Turn:
        """Play the loads of one round on one server, with new prompts in each round; then a few
        requests that are the same in all rounds, whose answers are compared and whose times are
        not: a server may have them in its cache."""
        options = self.options
        found: Turn = {}
        for index, (name, load) in enumerate(self.loads().items()):
            draws = Draws(options.seed + _SEEDS * number + index)
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


def _prepared(options: argparse.Namespace, stack: ExitStack, spec: ServerSpec) -> Target:
    """A server that runs until the stack is left, and has been warmed up."""
    url = stack.enter_context(running(spec))
    fields = {"temperature": 0, "ignore_eos": True}
    target = Target(url, first_model(url), fields=fields)
    warm_up(target, material_of(options), options.warm_ups)
    return target


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


def parse(words: Sequence[str]) -> argparse.Namespace:
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
