"""`tokend bench compare`: compares servers, or settings of the daemon, round by round.

All servers run all the time (--restart: only during their turn), and one is loaded at a time. Each
round sends the same loads to every server, in changing order. A machine that is slower for a minute
is slower for all servers, so the ratio within a round is more reliable than the absolute figures.

  tokend bench compare --server tokend=http://127.0.0.1:8000 \\
      --server llama='llama-server -m x.gguf -np 16 --port {port}'
  tokend bench compare --other=--async-scheduling -- --dtype bfloat16
  tokend bench compare --synthetic 1b --form q4_k_m

--busy N repeats the loads of each turn beside N processes that compute all the time, as on a
laptop in use, and shows what is kept of the tokens/s.

--synthetic makes a model with random weights, and starts tokend and those of its peers that are on
PATH (llama-server; vllm for bf16) with it: prompts of 512 tokens, 64 out, alone and 8 at once, 2
rounds with a start each. Other flags override this; --server NAME=COMMAND adds a server or replaces
one, with {gguf} and {folder} for the model. The models stay in ~/.cache/tokend/synthetic.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.bench.client import Target, first_model
from deploy.bench.dataset_options import add_sizes, prompt_source_of, sizes_of
from deploy.bench.datasets import RandomDataset, RequestSizes, SessionSeeds
from deploy.bench.figures import AnswerComparison, Goodput, figures_of
from deploy.bench.load import LoadPattern, LoadResult, LoadRun, measure, warm_up
from deploy.bench.options import (
    BenchParser,
    at_least_one,
    from_zero,
    positive,
    several_counts,
    writable,
    write,
)
from deploy.bench.processes import memory_bytes
from deploy.bench.servers import ServerSpec, running, tokend
from deploy.bench.synthetic import FORMS, SHAPES, read_rate, synthetic_specs, threads_of
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


@dataclass(frozen=True)
class RoundRatios:
    """Ratios of the first server to another one, one per round."""

    values: Sequence[float]

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "RoundRatios":
        """Create from values per round; rounds in which one value is NaN are omitted."""
        pairs = zip(ours, theirs, strict=True)
        return cls([a / b for a, b in pairs if not (math.isnan(a) or math.isnan(b)) and b])

    def describe(self) -> str:
        """Return "median (minimum to maximum)"."""
        if not self.values:
            return "-"
        low, high = min(self.values), max(self.values)
        return f"{statistics.median(self.values):.3f} ({low:.3f} to {high:.3f})"

    def to_dict(self) -> dict[str, float]:
        if not self.values:
            return {}
        return {
            "median": statistics.median(self.values),
            "min": min(self.values),
            "max": max(self.values),
        }


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
        for request, result in load_result.checked:
            self.answers.note(request, result.text)

    @property
    def cpu_share(self) -> float:
        return self.cpu_seconds / self.seconds if self.seconds else 0.0


class Comparison:
    """The figures of all servers and rounds. names: of the servers. figures: rows of the table."""

    def __init__(self, names: Sequence[str], figures: Sequence[ComparedFigure]) -> None:
        self._names = list(names)
        self._figures = list(figures)
        self._totals = {name: ServerTotals(name) for name in names}
        self._rounds: list[dict[str, TurnFigures]] = []

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    def totals(self, name: str) -> ServerTotals:
        return self._totals[name]

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

    def ratios(self, figure: ComparedFigure, other: str) -> RoundRatios:
        return RoundRatios.of(self.values(self._names[0], figure), self.values(other, figure))

    def show(self, console: Console, title: str) -> None:
        """Print the table and the notes about each server."""
        first, *others = self._names
        table = Table(title=title)
        table.add_column("figure")
        for column in (*self._names, *(f"{first} / {other}" for other in others)):
            table.add_column(column, justify="right")
        for figure in self._figures:
            medians = [figure.format(self.median(name, figure)) for name in self._names]
            ratios = [self.ratios(figure, other).describe() for other in others]
            table.add_row(figure.title, *medians, *ratios)
        console.print(table)
        for name in self._names:
            for line in self._notes(self._totals[name]):
                console.print(line, markup=False, highlight=False, soft_wrap=True)

    def to_dict(self) -> Mapping[str, object]:
        first, *others = self._names
        return {
            "servers": {name: self._totals_dict(self._totals[name]) for name in self._names},
            "figures": {
                figure.key: {
                    "medians": {name: self._median_or_none(name, figure) for name in self._names},
                    "ratios": {
                        f"{first} / {other}": self.ratios(figure, other).to_dict()
                        for other in others
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
_NO_LIMITS: Final = Goodput({})
ALONE: Final = "alone"
"""Name of the load that sends one request after the other."""
BUSY: Final = "busy_"
"""Begin of the names of a load's figures beside busy processes."""


@dataclass(frozen=True)
class ClosedLoad:
    """A closed loop: `num_requests` in total, `concurrency` at the same time, equal lengths."""

    concurrency: int
    num_requests: int
    input_tokens: int
    output_tokens: int


def main(words: Sequence[str]) -> None:
    CompareBench(parse(words)).run()


WEIGHTS_READ: Final = (
    ComparedFigure(f"{ALONE}_weights_read_ms", "reading the weights once, ms"),
    ComparedFigure(f"{ALONE}_tpot_of_weights_read", "time per token alone / reading the weights"),
)
"""Rows for the limit of a single stream: every token reads all weights from memory."""


def weights_read_figures(turn: TurnFigures, weights_ms: float) -> TurnFigures:
    """Return the figures of WEIGHTS_READ. weights_ms: to read the weights of a token once."""
    time, share = WEIGHTS_READ
    tpot_ms = turn.get(f"{ALONE}_tpot_ms_p50")  # absent if every request failed
    return {time.key: weights_ms} | ({} if tpot_ms is None else {share.key: tpot_ms / weights_ms})


class CompareBench:
    """The rounds of a comparison. A subclass may add other figures to each turn.

    With --synthetic the time per token is compared with reading the file's weights at the rate that
    as many threads reach.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        # Removed by `run`, while further signals are ignored; at the exit one would end that
        self._caches = TemporaryDirectory(prefix="tokend-compare-", ignore_cleanup_errors=True)
        self.specs = _specs(options, self._caches.name)
        self._weights_ms = math.nan

    def extra_figures(self, load: str, title: str) -> Sequence[ComparedFigure]:
        """Return further rows of the table for one load."""
        return WEIGHTS_READ if self.options.synthetic and load == ALONE else ()

    def before_turn(self, spec: ServerSpec) -> None:
        """Measure what a turn is compared with; all servers are idle."""
        options = self.options
        if options.synthetic:
            num_threads = threads_of(options, self.specs.index(spec))
            num_bytes = SHAPES[options.synthetic].bytes_of_a_token(options.form)
            self._weights_ms = 1e3 * num_bytes / read_rate(num_threads)

    def after_turn(self, spec: ServerSpec, turn: TurnFigures) -> TurnFigures:
        """Return the figures of a turn with those of what it is compared with."""
        if not self.options.synthetic:
            return turn
        return turn | weights_read_figures(turn, self._weights_ms)

    def notes(self) -> Sequence[str]:
        """Return lines to print below the table."""
        return ()

    def run(self) -> None:
        options = self.options
        with self._caches, writable("--json", options.json) as rows:
            comparison = Comparison([spec.name for spec in self.specs], self.figures())
            self._run_rounds(comparison)
            console = Console(width=max(120, 40 + 32 * len(self.specs)))
            comparison.show(console, _title(options, comparison))
            for line in self.notes():
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            write(rows, json.dumps(_document(options, comparison), indent=2) + "\n")

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
            found += [
                ComparedFigure(f"{load}_output_tokens_per_s", f"output tokens/s, {title}"),
                ComparedFigure(f"{load}_ttft_ms_p50", f"first token, {title}, ms"),
                ComparedFigure(f"{load}_tpot_ms_p50", f"time per token, {title}, ms"),
                ComparedFigure(f"{load}_itl_ms_p50", f"between tokens, median, {title}, ms"),
                ComparedFigure(f"{load}_itl_ms_p99", f"between tokens, p99, {title}, ms"),
                ComparedFigure(
                    f"{load}_itl_p99_of_p50", f"between tokens, p99 / median, {title} (<= 2)"
                ),
                *self._figures_of_load(load, title),
            ]
        if self.options.busy:
            for load in self.loads():
                title = f"{load.replace('at_', 'concurrency ')}, busy"
                found += [
                    ComparedFigure(
                        f"{BUSY}{load}_output_tokens_per_s", f"output tokens/s, {title}"
                    ),
                    ComparedFigure(f"{BUSY}{load}_ttft_ms_p50", f"first token, {title}, ms"),
                    ComparedFigure(f"{BUSY}{load}_kept", f"part of tokens/s kept, {title}"),
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
                        server = servers.get(spec.name) or _warmed_up(options, turn, spec, number)
                        totals = comparison.totals(spec.name)
                        figures = self._run_turn(server.target, number, totals)
                        if server.pid:
                            figures |= server.start if options.restart or not number else {}
                            figures["memory_after_mb"] = memory_bytes(server.pid) / 1e6
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
            dataset = RandomDataset(sizes_of(options), prompt_source_of(options))
            pattern = LoadPattern(options.checks, max_requests=options.checks)
            seeds = SessionSeeds(options.seed, check_share=1.0)
            run = LoadRun(f"{totals.name}, checks", dataset, seeds, pattern)
            totals.note_run(measure(target, run, sys.stderr))
        return found

    def _run_loads(
        self, target: Target, totals: ServerTotals, label: str, first_seed: int
    ) -> TurnFigures:
        """Send all loads to a server, one after the other. label: of the progress lines."""
        found: TurnFigures = {}
        for index, (name, load) in enumerate(self.loads().items()):
            ratio = 0.0 if name == ALONE else self.options.range_ratio
            sizes = RequestSizes(load.input_tokens, load.output_tokens, ratio)
            run = LoadRun(
                f"{label}, {totals.name}, {name.replace('_', ' ')}",
                RandomDataset(sizes, prompt_source_of(self.options)),
                SessionSeeds(first_seed + index),
                LoadPattern(load.concurrency, max_requests=load.num_requests),
            )
            load_result = measure(target, run, sys.stderr)
            totals.note_run(load_result)
            plain = with_gap_ratio(figures_of(name, load_result, _NO_LIMITS).to_dict())
            found |= {f"{name}_{key}": value for key, value in plain.items()}
        return found


@dataclass(frozen=True)
class WarmServer:
    """A server after its warm-up. start: figures of its start. pid: 0 if it ran before."""

    target: Target
    pid: int
    start: TurnFigures


def _warmed_up(
    options: argparse.Namespace, stack: ExitStack, spec: ServerSpec, number: int = 0
) -> WarmServer:
    """Return a server that is warmed up, and runs until the stack is closed. number: of starts."""
    server = stack.enter_context(running(spec))
    start: TurnFigures = {}
    if server.pid:
        start[f"ready_{'again' if number else 'first'}_s"] = server.seconds_to_ready
        start["memory_before_mb"] = memory_bytes(server.pid) / 1e6
    fields = {"temperature": 0, "ignore_eos": True}
    target = Target(server.url, first_model(server.url), fields=fields)
    warm_up(target, prompt_source_of(options), options.warm_ups)
    return WarmServer(target, server.pid, start)


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


def _specs(options: argparse.Namespace, caches: str) -> list[ServerSpec]:
    """Return the servers in the order of the table; raises ConfigError.

    caches: an empty folder for the caches of those with a synthetic model.
    """
    if options.synthetic is not None:
        if options.other is not None:
            raise ConfigError("bench compare: --synthetic or --other, not both")
        return synthetic_specs(options, caches)
    if options.form or options.cpu_threads:
        raise ConfigError("bench compare: --form and --cpu-threads go with --synthetic")
    if options.other is not None:
        if options.server:
            raise ConfigError("bench compare: --other or --server, not both")
        flags = options.serve_flags
        return [
            tokend("with", [*flags, *shlex.split(options.other)], options.start_seconds),
            tokend("without", flags, options.start_seconds),
        ]
    if options.serve_flags:
        raise ConfigError("bench compare: flags after -- go with --other or --synthetic")
    specs = [
        ServerSpec.parse(text, options.ready_path, options.start_seconds) for text in options.server
    ]
    if len({spec.name for spec in specs}) < max(2, len(specs)):
        raise ConfigError(
            "bench compare needs two --server NAME=... with different names, or --other"
        )
    return specs


def _title(options: argparse.Namespace, comparison: Comparison) -> str:
    what = f"{options.input_tokens} tokens in, {options.output_tokens} out"
    if options.other is not None:
        flags = shlex.join(options.serve_flags) or "default settings"
        what = f"{flags}, with and without {options.other}: {what}"
    if options.synthetic is not None:
        what = f"{options.synthetic}, {options.form}: {what}"
    return f"{what}; medians of {comparison.num_rounds} rounds"


def _document(options: argparse.Namespace, comparison: Comparison) -> dict[str, object]:
    flags = {name: value for name, value in vars(options).items() if name != "json"}
    return {"command": "tokend bench compare", "options": flags, **comparison.to_dict()}


_SYNTHETIC_DEFAULTS: Final = {
    "input_tokens": 512,
    "output_tokens": 64,
    "alone_input_tokens": 512,
    "concurrency": [8],
    "rounds": 2,
    "restart": True,
    "checks": 0,
    "form": FORMS[0],
}


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="tokend bench compare", description=__doc__)
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=...",
        help="a URL, or a command with {port} in it; the first is compared with all others",
    )
    parser.add_argument(
        "--other",
        help='flags of serve: compare tokend with and without them ("--async-scheduling")',
    )
    parser.add_argument(
        "--synthetic", choices=tuple(SHAPES), help="serve a model with random weights of this size"
    )
    parser.add_argument(
        "--form", choices=FORMS, help=f"of the weights, with --synthetic ({FORMS[0]})"
    )
    parser.add_argument(
        "--cpu-threads",
        type=several_counts,
        metavar="N[,N...]",
        help="with --synthetic: threads of a server (one per core); with several values, one "
        "tokend each",
    )
    parser.add_argument("--restart", action="store_true", help="restart the server for each turn")
    parser.add_argument(
        "--ready-path",
        default="/health",
        help="path that answers 200 when the server is ready (/health)",
    )
    parser.add_argument(
        "--start-seconds", type=positive, default=600.0, help="limit of a start (600)"
    )
    parser.add_argument("--rounds", type=at_least_one, default=3, help="number of rounds (3)")
    parser.add_argument(
        "--concurrency", type=several_counts, default=[16], metavar="N[,N...]", help="(16)"
    )
    parser.add_argument(
        "--requests", type=at_least_one, help="requests per load; by default twice the concurrency"
    )
    parser.add_argument(
        "--alone", type=at_least_one, default=3, help="requests sent one after the other (3)"
    )
    parser.add_argument("--alone-input-tokens", type=at_least_one, default=128, help="(128)")
    parser.add_argument(
        "--busy",
        type=from_zero,
        default=0,
        metavar="N",
        help="repeat the loads beside N processes that compute all the time (0)",
    )
    parser.add_argument("--warm-ups", type=from_zero, default=4, help="(4)")
    parser.add_argument(
        "--checks",
        type=from_zero,
        default=4,
        help="requests of each round that are always the same; their answers are compared, "
        "their times are not measured (4)",
    )
    add_sizes(parser, 256, 128)
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    parser.add_argument(
        "serve_flags", nargs="*", help="after --: flags of every daemon (--other, --synthetic)"
    )
    options = parser.parse_args(words)
    if options.synthetic is not None:
        threads = [len(os.sched_getaffinity(0))]
        parser.set_defaults(**_SYNTHETIC_DEFAULTS, cpu_threads=threads)
        options = parser.parse_args(words)
    return options
