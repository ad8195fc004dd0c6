"""`tokend bench scheduler`: what a step of the scheduler costs, beside a peer's.

Ours and the peer's play each workload in turn, round after round, so that whatever
else the machine does disturbs both.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table

from deploy.loadtest.line_program import LineProgram
from deploy.loadtest.options import Parser
from deploy.loadtest.players import our_command, peer_command
from deploy.loadtest.workloads import select
from proto.benchmark import SchedulerFigures, SchedulerRow, SchedulerTimings, SchedulerWorkload
from proto.codec import to_json_line
from proto.errors import ConfigError

_TIMES: Final = ("schedule", "update", "encode", "decode", "hash", "view")
_BEST_ROUNDS: Final = ("schedule", "update", "hash")


def main(words: Sequence[str]) -> None:
    """Measure, print the tables, and write the rows where --json says so."""
    options = _parse(words)
    console = Console(width=120)
    with ExitStack() as stack:
        # Opened first: a name that is no good must not cost the measurement.
        files = [stack.enter_context(_create(name)) for name in options.json]
        rows = measure(select(options.workload), options.rounds, options.peer_python)
        for file in files:
            file.write(_document(rows))
    console.print(_table(rows))
    if options.peer_python:
        console.print(_comparison(rows))


def measure(
    workloads: Sequence[SchedulerWorkload], rounds: int, peer_python: str | None
) -> list[SchedulerRow]:
    """A row for each workload."""
    commands = [our_command()] + ([peer_command(peer_python)] if peer_python else [])
    with ExitStack() as stack:
        players = [stack.enter_context(LineProgram(command)) for command in commands]
        played: dict[str, list[list[SchedulerTimings]]] = {each.name: [] for each in workloads}
        for number in range(1, rounds + 1):
            for workload in workloads:
                print(f"round {number}: {workload.name}", file=sys.stderr, flush=True)
                played[workload.name].append(
                    [each.play(workload, SchedulerTimings, workload.name) for each in players]
                )
    return [_row(name, each) for name, each in played.items()]


def _row(name: str, played: list[list[SchedulerTimings]]) -> SchedulerRow:
    ours, *peers = [_figures(list(rounds)) for rounds in zip(*played, strict=True)]
    row = {"workload": name, "rounds": len(played), **ours}
    if not peers:
        return SchedulerRow(**row)
    (theirs,) = peers
    return SchedulerRow(
        **row,
        peer=SchedulerFigures(**theirs),
        ratio=_ratio(ours, theirs, "median"),
        ratio_min=_ratio(ours, theirs, "min"),
    )


def _ratio(ours: dict[str, float], theirs: dict[str, float], which: str) -> float | None:
    """None where one of them had no step that counts."""
    cost, peer_cost = _cost(ours, which), _cost(theirs, which)
    return cost / peer_cost if cost and peer_cost else None


def _figures(rounds: list[SchedulerTimings]) -> dict[str, float]:
    """The fields of SchedulerFigures that this workload has."""
    figures = {
        "num_scheduled": statistics.median(each.num_scheduled for each in rounds),
        "num_preempted": statistics.median(each.num_preempted for each in rounds),
    }
    for name in (*_TIMES, "wire_bytes"):
        timings = [getattr(each, name) for each in rounds]
        if None in timings:
            continue
        label = name if name == "wire_bytes" else f"{name}_us"
        medians = [each.median for each in timings]
        figures[f"{label}_median"] = statistics.median(medians)
        if name in _TIMES:
            figures[f"{label}_p99"] = statistics.median(each.p99 for each in timings)
        if name in _BEST_ROUNDS:
            figures[f"{label}_min"] = min(medians)
    return figures


def _cost(figures: dict[str, float], which: str) -> float:
    """What the target is about: a whole step, or the hashing."""
    return sum(figures.get(f"{name}_us_{which}", 0.0) for name in _BEST_ROUNDS)


def _table(rows: Sequence[SchedulerRow]) -> Table:
    table = Table(title="microseconds a step: median (99th percentile); bytes of its messages")
    times = ("schedule", "update", "encode", "decode")
    _columns(table, "workload", "requests", *times, "bytes", "hash", "view")
    for row in rows:
        table.add_row(
            row.workload,
            _number(row.num_scheduled, 1),
            *[_pair(row, name) for name in times],
            _number(row.wire_bytes_median),
            _pair(row, "hash"),
            _pair(row, "view"),
        )
    return table


def _comparison(rows: Sequence[SchedulerRow]) -> Table:
    table = Table(title="beside vLLM's own scheduler, median (best round)")
    _columns(table, "workload", "requests", "theirs", "schedule+update", "theirs", "ratio")
    for row in rows:
        if row.peer is None or row.ratio is None or row.ratio_min is None:
            continue
        table.add_row(
            row.workload,
            _number(row.num_scheduled, 1),
            _number(row.peer.num_scheduled, 1),
            _sum(row),
            _sum(row.peer),
            f"{row.ratio:.3f} ({row.ratio_min:.3f})",
        )
    return table


def _columns(table: Table, first: str, *others: str) -> None:
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")


def _sum(figures: SchedulerFigures) -> str:
    fields = {
        name: getattr(figures, name) or 0.0 for name in figures.__struct_fields__ if "_us_" in name
    }
    return f"{_cost(fields, 'median'):.0f} ({_cost(fields, 'min'):.0f})"


def _pair(row: SchedulerFigures, name: str) -> str:
    median, p99 = getattr(row, f"{name}_us_median"), getattr(row, f"{name}_us_p99")
    return "" if median is None else f"{median:.0f} ({p99:.0f})"


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _document(rows: Sequence[SchedulerRow]) -> str:
    """A list, an object a row."""
    return json.dumps([json.loads(to_json_line(row)) for row in rows], indent=2) + "\n"


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokend bench scheduler",
        description="Measure the scheduler without a model: every step is answered at once.",
        epilog="Pin it to one core: taskset -c 1 tokend bench scheduler",
    )
    parser.add_argument("workload", nargs="*", help="rows to measure; all by default")
    parser.add_argument(
        "--json", metavar="FILE", action="append", default=[], help="write the rows there, too"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each is played (3)")
    parser.add_argument(
        "--peer-python",
        metavar="PATH",
        help="interpreter of an environment that has vLLM; its scheduler is measured in turn",
    )
    options = parser.parse_args(words)
    if options.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {options.rounds}", "rounds")
    return options


def _create(name: str) -> TextIO:
    try:
        return open(name, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {name}: {error.strerror}", "json") from None
