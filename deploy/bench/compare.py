"""`tokend bench compare`: compares servers, or settings of the daemon, round by round.

All servers run all the time (--restart: only during their turn), and one is loaded at a time. Each
round sends the same loads to every server, in changing order. A machine that is slower for a minute
is slower for all servers, so the ratio within a round is more reliable than the absolute figures.

  tokend bench compare --server tokend=http://127.0.0.1:8000 \\
      --server llama='llama-server -m x.gguf -np 16 --port {port}'
  tokend bench compare --other=--async-scheduling -- --dtype bfloat16

--busy N repeats the loads of each turn beside N processes that compute all the time, as on a
laptop in use, and shows what is kept of the tokens/s.
"""

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.bench.client import Target, first_model
from deploy.bench.datasets import (
    RequestSizes,
    SessionSeeds,
    add_sizes,
    prompt_sessions,
    prompts_of,
    sizes_of,
)
from deploy.bench.figures import AnswerComparison, figures_of
from deploy.bench.load import LoadPattern, LoadResult, measure, warm_up
from deploy.bench.options import (
    BenchParser,
    add_values,
    at_least_one,
    from_zero,
    several_counts,
    writable,
    write,
)
from deploy.bench.processes import memory_bytes
from deploy.bench.servers import ServerSpec, add_servers, given_servers, running, tokend
from proto.errors import ConfigError

TurnFigures = dict[str, Any]
"""Figures of one server in one round, by name."""
_SHOWN: Final = 5


@dataclass(frozen=True)
class ComparedFigure:
    """A row of the table. key: name in TurnFigures. title: shown name. digits: decimals shown."""

    key: str
    title: str
    digits: int = 2

    def format(self, value: float) -> str:
        """Format a value; "-" for NaN."""
        return "-" if math.isnan(value) else f"{value:.{self.digits}f}"


def round_ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum of the ratios of two servers' values, one per round.

    Rounds in which one value is NaN are omitted; without others the result is empty.
    """
    pairs = zip(ours, theirs, strict=True)
    ratios = [a / b for a, b in pairs if not (math.isnan(a) or math.isnan(b)) and b]
    if not ratios:
        return {}
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


@dataclass
class ServerTotals:
    """Sums over all rounds of one server: time, the client's CPU time, failures, answers."""

    name: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    num_requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    answers: AnswerComparison = field(default_factory=AnswerComparison)

    def note_run(self, load_result: LoadResult) -> None:
        self.seconds += load_result.seconds
        self.cpu_seconds += load_result.cpu_seconds
        self.num_requests += len(load_result.results)
        self.errors.update(result.error for result in load_result.results if result.error)
        self.answers.note_all(load_result.checked)

    @property
    def cpu_share(self) -> float:
        return self.cpu_seconds / self.seconds if self.seconds else 0.0


class Comparison:
    """The figures of all servers and rounds. names: of the servers. figures: rows of the table."""

    def __init__(self, names: Sequence[str], figures: Sequence[ComparedFigure]) -> None:
        self._names = list(names)
        self._figures = list(figures)
        self.totals = {name: ServerTotals(name) for name in names}
        self._rounds: list[dict[str, TurnFigures]] = []

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    def note_turn(self, number: int, name: str, turn: TurnFigures) -> None:
        """Note the figures of a server in a round, counted from 0."""
        if number == len(self._rounds):
            self._rounds.append({})
        self._rounds[number][name] = turn

    def values(self, name: str, figure: ComparedFigure) -> list[float]:
        """Return the values per round; NaN if all requests failed."""
        return [float(turns[name].get(figure.key, math.nan)) for turns in self._rounds]

    def median(self, name: str, figure: ComparedFigure) -> float:
        values = [value for value in self.values(name, figure) if not math.isnan(value)]
        return statistics.median(values) if values else math.nan

    def ratios(self, figure: ComparedFigure, other: str) -> dict[str, float]:
        """Return `round_ratios` of the first server to another one."""
        return round_ratios(self.values(self._names[0], figure), self.values(other, figure))

    def show(self, console: Console, title: str) -> None:
        """Print the table and the notes about each server."""
        first, *others = self._names
        table = Table(title=title)
        table.add_column("figure")
        for column in (*self._names, *(f"{first} / {other}" for other in others)):
            table.add_column(column, justify="right")
        for figure in self._figures:
            medians = [figure.format(self.median(name, figure)) for name in self._names]
            ratios = [
                f"{found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f})"
                if found
                else "-"
                for found in (self.ratios(figure, other) for other in others)
            ]
            table.add_row(figure.title, *medians, *ratios)
        console.print(table)
        for name in self._names:
            for line in self._notes(self.totals[name]):
                console.print(line, markup=False, highlight=False, soft_wrap=True)

    def to_dict(self) -> Mapping[str, object]:
        first, *others = self._names
        return {
            "servers": {name: self._totals_dict(self.totals[name]) for name in self._names},
            "figures": {
                figure.key: {
                    "medians": {name: self._median_or_none(name, figure) for name in self._names},
                    "ratios": {
                        f"{first} / {other}": self.ratios(figure, other) for other in others
                    },
                }
                for figure in self._figures
            },
            "rounds": self._rounds,
        }

    def _median_or_none(self, name: str, figure: ComparedFigure) -> float | None:
        median = self.median(name, figure)
        return None if math.isnan(median) else median

    def _totals_dict(self, totals: ServerTotals) -> dict[str, object]:
        return {
            "client_cpu_share": totals.cpu_share,
            "num_requests": totals.num_requests,
            "num_failed": totals.errors.total(),
            "errors": dict(totals.errors),
            "answers_compared": totals.answers.num_compared,
            "answers_different": len(totals.answers.different),
        }

    def _notes(self, totals: ServerTotals) -> list[str]:
        answers = totals.answers
        found = [
            f"{totals.name}: {totals.num_requests} requests, {totals.errors.total()} failed; "
            f"answers to equal requests: {answers.num_compared} compared, "
            f"{len(answers.different)} different; the client used "
            f"{totals.cpu_share:.1%} of one core"
        ]
        found += [f"  failed: {error}" for error, _ in totals.errors.most_common(_SHOWN)]
        return found + [f"  different: {difference}" for difference in answers.different[:_SHOWN]]


_SEED_STEP: Final = 1_000
ALONE: Final = "alone"
"""Name of the load that sends one request after the other."""
BUSY: Final = "busy_"
"""Begin of the names of a load's figures beside busy processes."""
_OF_LOAD: Final = (
    ("output_tokens_per_s", "output tokens/s, {}"),
    ("ttft_ms_p50", "first token, {}, ms"),
    ("tpot_ms_p50", "time per token, {}, ms"),
    ("itl_ms_p50", "between tokens, median, {}, ms"),
    ("itl_ms_p99", "between tokens, p99, {}, ms"),
    ("itl_p99_of_p50", "between tokens, p99 / median, {} (<= 2)"),
)
_OF_BUSY_LOAD: Final = (*_OF_LOAD[:2], ("kept", "part of tokens/s kept, {}"))
"""Figures of a load by their names, and their titles."""


@dataclass(frozen=True)
class ClosedLoad:
    """A closed loop: `num_requests` in total, `concurrency` at the same time, equal lengths."""

    concurrency: int
    num_requests: int
    input_tokens: int
    output_tokens: int


def main(words: Sequence[str]) -> None:
    parser = BenchParser(prog="tokend bench compare", description=__doc__)
    add_flags(parser)
    options = parser.parse_args(words)
    CompareBench(options, specs_of(options)).run()


class CompareBench:
    """The rounds of a comparison. A subclass may add other figures to each turn."""

    def __init__(self, options: argparse.Namespace, specs: Sequence[ServerSpec]) -> None:
        self.options = options
        self.specs = specs

    def extra_figures(self, load: str, title: str) -> Sequence[ComparedFigure]:
        """Return further rows of the table for one load."""
        return ()

    def before_turn(self, spec: ServerSpec) -> None:
        """Measure what a turn is compared with; all servers are idle."""

    def after_turn(self, spec: ServerSpec, turn: TurnFigures) -> TurnFigures:
        """Return the figures of a turn with those of what it is compared with."""
        return turn

    def notes(self) -> Sequence[str]:
        """Return lines to print below the table."""
        return ()

    def run(self) -> None:
        options = self.options
        with writable("--json", options.json) as rows:
            comparison = Comparison([spec.name for spec in self.specs], self.figures())
            self._run_rounds(comparison)
            console = Console(width=max(120, 40 + 32 * len(self.specs)))
            comparison.show(console, self.title(comparison.num_rounds))
            for line in self.notes():
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            flags = {name: value for name, value in vars(options).items() if name != "json"}
            figures = comparison.to_dict()
            document = {"command": "tokend bench compare", "options": flags, **figures}
            write(rows, json.dumps(document, indent=2) + "\n")

    def title(self, num_rounds: int) -> str:
        """Return the title of the table."""
        options = self.options
        what = f"{options.input_tokens} tokens in, {options.output_tokens} out"
        if options.other is not None:
            flags = shlex.join(options.serve_flags) or "default settings"
            what = f"{flags}, with and without {options.other}: {what}"
        return f"{what}; medians of {num_rounds} rounds"

    def figures(self) -> list[ComparedFigure]:
        """Return the rows of the table, with the names that they have in a turn."""
        again = [ComparedFigure("ready_again_s", "ready, again, s")] if self.options.restart else []
        found = [
            ComparedFigure("ready_first_s", "ready, first start, s"),
            *again,
            ComparedFigure("memory_before_mb", "memory of all processes, ready, MB", 0),
            ComparedFigure("memory_after_mb", "memory of all processes, after the loads, MB", 0),
            ComparedFigure("alone_ttft_ms_p50", "first token alone, ms"),
            ComparedFigure("alone_tpot_ms_p50", "time per token alone, ms"),
            *self._figures_of_load(ALONE, ALONE),
        ]
        for number in self.options.concurrency:
            load, title = f"at_{number}", f"concurrency {number}"
            rows = [ComparedFigure(f"{load}_{key}", text.format(title)) for key, text in _OF_LOAD]
            found += [*rows, *self._figures_of_load(load, title)]
        if self.options.busy:
            for load in self.loads():
                title = f"{load.replace('at_', 'concurrency ')}, busy"
                found += [
                    ComparedFigure(f"{BUSY}{load}_{key}", text.format(title))
                    for key, text in _OF_BUSY_LOAD
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

    def _figures_of_load(self, load: str, title: str) -> list[ComparedFigure]:
        client = ComparedFigure(f"{load}_client_cpu_share", f"client's part of a core, {title}", 3)
        return [client, *self.extra_figures(load, title)]

    def _run_rounds(self, comparison: Comparison) -> None:
        options, specs = self.options, self.specs
        with ExitStack() as stack:
            servers = {}
            if not options.restart:
                servers = {spec.name: _warmed_up(options, stack, spec) for spec in specs}
            for number in range(options.rounds):
                first = number % len(specs)
                for spec in (*specs[first:], *specs[:first]):
                    with ExitStack() as turn:
                        self.before_turn(spec)
                        target, pid, start = servers.get(spec.name) or _warmed_up(
                            options, turn, spec, number
                        )
                        figures = self._run_turn(target, number, comparison.totals[spec.name])
                        if pid:
                            figures |= start if options.restart or not number else {}
                            figures["memory_after_mb"] = memory_bytes(pid) / 1e6
                    if options.restart and options.rounds == 1 and spec.command:
                        with running(spec) as again:  # no later round starts it
                            figures["ready_again_s"] = again.seconds_to_ready
                    comparison.note_turn(number, spec.name, self.after_turn(spec, figures))

    def _run_turn(self, target: Target, number: int, totals: ServerTotals) -> TurnFigures:
        """Send the loads of one round to one server and return the figures.

        Prompts differ between rounds. A few requests at the end are the same in all rounds: their
        answers are compared, but not their times, because a server may have them in its cache.
        """
        options = self.options
        first_seed = options.seed + _SEED_STEP * number
        found = self._run_loads(target, totals, f"round {number + 1}", first_seed)
        if options.busy:
            label = f"round {number + 1}, beside {options.busy} busy"
            with _busy_processes(options.busy):
                busy = self._run_loads(target, totals, label, first_seed + _SEED_STEP // 2)
            found |= {f"{BUSY}{key}": value for key, value in busy.items()}
            for name in self.loads():
                key = f"{name}_output_tokens_per_s"
                if key in busy and key in found:  # absent if every request failed
                    found[f"{BUSY}{name}_kept"] = busy[key] / found[key]
        if options.checks:
            seeds = SessionSeeds(options.seed, check_share=1.0)
            sessions = prompt_sessions(seeds, sizes_of(options), prompts_of(options))
            pattern = LoadPattern(options.checks, max_requests=options.checks)
            name = f"{totals.name}, checks"
            totals.note_run(measure(target, sessions, pattern, name, sys.stderr))
        return found

    def _run_loads(
        self, target: Target, totals: ServerTotals, label: str, first_seed: int
    ) -> TurnFigures:
        """Send all loads to a server, one after the other. label: of the progress lines."""
        found: TurnFigures = {}
        for index, (name, load) in enumerate(self.loads().items()):
            ratio = 0.0 if name == ALONE else self.options.range_ratio
            sizes = RequestSizes(load.input_tokens, load.output_tokens, ratio)
            seeds = SessionSeeds(first_seed + index)
            sessions = prompt_sessions(seeds, sizes, prompts_of(self.options))
            pattern = LoadPattern(load.concurrency, max_requests=load.num_requests)
            title = f"{label}, {totals.name}, {name.replace('_', ' ')}"
            load_result = measure(target, sessions, pattern, title, sys.stderr)
            totals.note_run(load_result)
            plain = with_gap_ratio(figures_of(name, load_result).to_dict())
            found |= {f"{name}_{key}": value for key, value in plain.items()}
        return found


def _warmed_up(
    options: argparse.Namespace, stack: ExitStack, spec: ServerSpec, number: int = 0
) -> tuple[Target, int, TurnFigures]:
    """Return a server that is warmed up, its process id, and the figures of its start.

    It runs until the stack is closed. The id of one that ran before is 0, and it has no figures.
    number: of earlier starts.
    """
    server = stack.enter_context(running(spec))
    start: TurnFigures = {}
    if server.pid:
        start[f"ready_{'again' if number else 'first'}_s"] = server.seconds_to_ready
        start["memory_before_mb"] = memory_bytes(server.pid) / 1e6
    fields = {"temperature": 0, "ignore_eos": True}
    target = Target(server.url, first_model(server.url), fields=fields)
    warm_up(target, prompts_of(options), options.warm_ups)
    return target, server.pid, start


@contextmanager
def _busy_processes(number: int) -> Iterator[None]:
    """Run processes that compute without a pause, as other programs of a laptop do."""
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
    processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def with_gap_ratio(plain: TurnFigures) -> TurnFigures:
    """Add the ratio of the 99th percentile to the median of the gaps between tokens."""
    median = plain.get("itl_ms_p50", 0.0)
    return {**plain, "itl_p99_of_p50": plain["itl_ms_p99"] / median} if median else plain


def specs_of(options: argparse.Namespace) -> list[ServerSpec]:
    """Return the servers in the order of the table; raises ConfigError."""
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
    specs = given_servers(options)
    if len({spec.name for spec in specs}) < max(2, len(specs)):
        raise ConfigError(
            "bench compare needs two --server NAME=... with different names, or --other"
        )
    return specs


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_servers(
        parser,
        "NAME=...",
        "a URL, or a command with {port} in it; the first is compared with all others",
    )
    parser.add_argument(
        "--other",
        help='flags of serve: compare tokend with and without them ("--async-scheduling")',
    )
    parser.add_argument("--restart", action="store_true", help="restart the server for each turn")
    parser.add_argument(
        "--concurrency", type=several_counts, default=[16], metavar="N[,N...]", help="(16)"
    )
    add_values(
        parser,
        ("--rounds", at_least_one, 3, "number of rounds"),
        ("--requests", at_least_one, None, "requests per load; by default twice the concurrency"),
        ("--alone", at_least_one, 3, "requests sent one after the other"),
        ("--alone-input-tokens", at_least_one, 128, ""),
        ("--warm-ups", from_zero, 4, ""),
        (
            *("--checks", from_zero, 4),
            "requests of each round that are always the same; their answers are compared, their "
            "times are not measured",
        ),
    )
    parser.add_argument(
        "--busy",
        type=from_zero,
        default=0,
        metavar="N",
        help="repeat the loads beside N processes that compute all the time (0)",
    )
    add_sizes(parser, 256, 128)
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of every daemon (--other)")
