"""`tokend bench agents`: how long agents' sessions take, under fcfs and under continuum with pins.

A session is a chain of turns with tool calls between them. Its prompt grows with each turn, and its
KV is either still cached when the next turn arrives or computed again. Each cell of the grid (KV
pool, arrival rate, policy) starts a daemon of its own and sends it the same sessions. Capacity and
working set are measured first, for each seed.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from deploy.bench.agents.grid import Cell, Daemons, Measured, RealGrid
from deploy.bench.agents.load import VARIANTS
from deploy.bench.options import Parser, at_least_one, from_zero, positive, writable, write
from proto.errors import ConfigError

# The grid's figures as tables and as JSON, and whether it shows what pins promise.


PRESSED: Final = (50, 90)
CALM_POOL: Final = 100
FASTER: Final = 1.5
SLOWER: Final = 1.02
"""Targets: the rule's mean job so many times as fast as fcfs's with half the pool at 90 % of the
capacity; and without pressure at most 2 % longer."""


def document(
    command: str,
    settings: Mapping[str, object],
    measured: Sequence[Mapping[str, object]],
    cells: Sequence[Cell],
) -> str:
    """Return the settings, what the cells are relative to, and the cells, as JSON."""
    found = {
        "command": command,
        "grid": settings,
        "measured": measured,
        "cells": [asdict(each) for each in cells],
    }
    return json.dumps(found, indent=1) + "\n"


def measured_table(num_jobs: int, measured: Sequence[Measured]) -> Table:
    table = Table(title=f"what the cells are relative to; {num_jobs} jobs a seed")
    titles = ("seed", "capacity, jobs/s", "working set, blocks", "mean", "requests", "mean job, s")
    for title in titles:
        table.add_column(title, justify="right")
    for each in measured:
        table.add_row(
            str(each.seed),
            f"{each.capacity_jobs_per_s:.3f}",
            str(each.working_set_blocks),
            f"{each.working_set_mean_blocks:.0f}",
            str(each.num_requests),
            f"{each.unpressed_job_s_mean:.1f}",
        )
    table.caption = "mean job: with a pool that holds everything, at 90 % of the capacity"
    return table


def measured_line(measured: Measured) -> str:
    """Before its cells."""
    return (
        f"seed {measured.seed}: capacity {measured.capacity_jobs_per_s:.3f} jobs/s, working set "
        f"{measured.working_set_blocks:,} blocks, mean job {measured.unpressed_job_s_mean:.1f} s"
    )


def cell_line(cell: Cell) -> str:
    """One that has just ended, before others are there to compare it with."""
    failed = f", {cell.num_failed} jobs failed" if cell.num_failed else ""
    return (
        f"seed {cell.seed}, pool {cell.pool_percent} %, arrivals {cell.rate_percent} %, "
        f"{cell.variant}: mean {cell.job_s_mean:.1f} s, p99 {cell.job_s_p99:.0f} s, "
        f"found {cell.found_percent:.1f} %{failed}"
    )


def table(cells: Sequence[Cell]) -> Table:
    """A row a cell and policy: means over seeds, and the range of what is compared."""
    made = Table(title="job completion, s; ratios: fcfs by this one (range over seeds)")
    for number, title in enumerate(_titles(cells)):
        made.add_column(title, justify="left" if number < _NUM_NAMES else "right")
    before: list[str] = []
    for row in _rows(cells):
        if before and before[:2] != row[:2]:
            made.add_section()
        before = row
        made.add_row(*row)
    return made


def markdown(cells: Sequence[Cell]) -> Iterator[str]:
    """The lines of the same table in a document."""
    titles = _titles(cells)
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in _rows(cells):
        yield f"| {' | '.join(row)} |"


_NUM_NAMES: Final = 3
"""Columns that say which cell it is; the others are figures."""


def _titles(cells: Sequence[Cell]) -> list[str]:
    titles = ["pool", "arrivals", "policy", "mean", "p99", "ratio of means", "of p99", "found"]
    titles += ["preempted", "pins taken / hit / expired / unpinned"]
    if _has_others(cells):
        titles.append("others: mean, p99")
    if _has_failed(cells):
        titles.append("failed jobs")
    return titles


def _rows(cells: Sequence[Cell]) -> Iterator[list[str]]:
    for (pool, rate, name), group in grouped(cells):
        pins = ("pins_taken", "pins_hit", "pins_expired", "pins_unpinned")
        row = [
            f"{pool} %",
            f"{rate} %",
            name,
            f"{_mean(group, 'job_s_mean'):.1f}",
            f"{_mean(group, 'job_s_p99'):.0f}",
            _range(group, "ratio_mean"),
            _range(group, "ratio_p99"),
            f"{_mean(group, 'found_percent'):.1f} %",
            f"{_mean(group, 'preemptions'):.0f}",
            " / ".join(f"{_mean(group, each):.0f}" for each in pins),
        ]
        if _has_others(cells):
            row.append(f"{_mean(group, 'other_s_mean'):.1f}, {_mean(group, 'other_s_p99'):.0f}")
        if _has_failed(cells):
            row.append(str(sum(each.num_failed for each in group)))
        yield row


def _has_failed(cells: Sequence[Cell]) -> bool:
    return any(each.num_failed for each in cells)


def _has_others(cells: Sequence[Cell]) -> bool:
    return any(each.other_s_mean for each in cells)


def verdicts(cells: Sequence[Cell]) -> Iterator[str]:
    """The targets, where the grid has their cells."""
    for (pool, rate, name), group in grouped(cells):
        ratios = [each.ratio_mean for each in group if each.ratio_mean is not None]
        if name != "rule" or not ratios:
            continue
        worst = min(ratios)
        where = f"{pool} % pool, {rate} % arrivals"
        compared = [each for each in cells if each.pool_and_rate == (pool, rate)]
        if _has_failed(compared):
            num_failed = sum(each.num_failed for each in compared)
            yield f"{where}: {num_failed} jobs failed, so nothing is compared"
            continue
        if (pool, rate) == PRESSED:
            kept = "kept" if worst >= FASTER else "MISSED"
            yield f"{where}: {worst:.2f} x fcfs or better; 1.5 x: {kept}"
        if pool == CALM_POOL:
            kept = "kept" if 1 / worst <= SLOWER else "MISSED"
            percent = 100 / worst - 100
            yield f"{where}: {percent:+.1f} % at worst beside fcfs; at most +2 %: {kept}"


def grouped(cells: Sequence[Cell]) -> Iterator[tuple[tuple[int, int, str], list[Cell]]]:
    """Over the seeds, in the order of the grid."""
    groups: dict[tuple[int, int, str], list[Cell]] = {}
    for each in cells:
        groups.setdefault((each.pool_percent, each.rate_percent, each.variant), []).append(each)
    yield from groups.items()


def _mean(group: Sequence[Cell], name: str) -> float:
    return statistics.fmean(getattr(each, name) for each in group)


def _range(group: Sequence[Cell], name: str) -> str:
    values = [getattr(each, name) for each in group if getattr(each, name) is not None]
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main(words: Sequence[str]) -> None:
    """Measure, print the tables, write the figures."""
    options = _parse(words)
    grid = _grid(options)
    with writable("--json", options.json) as files:
        measured, found = _run(grid)
        rows = [asdict(each) for each in measured]
        write(files, document("tokend bench agents", asdict(grid), rows, found))
    show(options, measured_table(grid.num_jobs, measured), found)


def show(options: argparse.Namespace, measured: Table, cells: Sequence[Cell]) -> None:
    """Print the cells: as a Markdown table, or as tables with the verdicts."""
    if options.markdown:
        print("\n".join(markdown(cells)))
        return
    console = Console(width=120)
    console.print(measured)
    console.print(table(cells))
    for line in verdicts(cells):
        console.print(line, highlight=False)


def _run(grid: RealGrid) -> tuple[list[Measured], list[Cell]]:
    """Seed by seed. It takes hours, so each figure is said when it is known."""
    measured: list[Measured] = []
    found: list[Cell] = []
    with ExitStack() as stack:
        progress, task = show_progress(stack, _num_cells(grid))

        def say(line: str) -> None:
            progress.console.print(line, highlight=False, soft_wrap=True)

        def done(cell: Cell) -> None:
            say(cell_line(cell))
            progress.advance(task)

        for seed in grid.seeds:
            daemons = Daemons(grid, seed)
            measured.append(daemons.measure())
            say(measured_line(measured[-1]))
            found += daemons.cells(measured[-1], done)
    return measured, found


def show_progress(stack: ExitStack, num_cells: int) -> tuple[Progress, TaskID]:
    """Show a bar on standard error until the stack is left."""
    progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
    return progress, progress.add_task("cells", total=num_cells)


def _num_cells(grid: RealGrid) -> int:
    return len(grid.seeds) * len(grid.pools) * len(grid.rates) * len(grid.variants)


def _grid(options: argparse.Namespace) -> RealGrid:
    return RealGrid(
        num_jobs=options.jobs or _NUM_JOBS,
        seeds=options.seeds or [0],
        variants=options.policies,
        pools=options.pools or [50],
        rates=options.rates or [90],
        turns=options.turns,
        tool_scale=options.tool_scale,
        serve_flags=options.serve_flags,
    )


_NUM_JOBS = 120


def _whole(text: str) -> list[int]:
    return [at_least_one(each) for each in text.split(",")]


def _seeds(text: str) -> list[int]:
    return [from_zero(each) for each in text.split(",")]


def _variants(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(
                f"--policies: there is no {name!r}; there are: {', '.join(VARIANTS)}", "policies"
            )
    return names


def add_grid(parser: Parser, defaults: Mapping[str, str]) -> None:
    """Add the flags of any grid. defaults: what the help says for jobs, seeds, pools and rates."""
    add = parser.add_argument
    add("--jobs", type=at_least_one, metavar="N", help=f"a seed ({defaults['jobs']})")
    add("--seeds", type=_seeds, metavar="N,…", help=f"of the load ({defaults['seeds']})")
    add("--pools", type=_whole, metavar="P,…", help=f"%% of the working set ({defaults['pools']})")
    add("--rates", type=_whole, metavar="P,…", help=f"%% of the capacity ({defaults['rates']})")
    add(
        "--policies",
        type=_variants,
        default=list(VARIANTS),
        metavar="NAME,…",
        help=f"side by side: {', '.join(VARIANTS)} (all)",
    )
    add("--json", metavar="FILE", help="write the figures there, too")
    add("--markdown", action="store_true", help="print the cells as the table of a document")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokend bench agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_grid(parser, {"jobs": "120", "seeds": "0", "pools": "50", "rates": "90"})
    parser.add_argument(
        "--tool-scale",
        type=positive,
        default=0.05,
        metavar="X",
        help="factor of the tools' durations (0.05)",
    )
    parser.add_argument(
        "--turns", type=positive, default=10.0, metavar="N", help="of a session, mean (10)"
    )
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    return parser.parse_args(words)
