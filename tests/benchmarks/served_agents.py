"""Completion times of agents' jobs under fcfs and continuum, with a daemon and a model.

A job is a sequence of turns with tool calls between them. Its prompt grows with each turn, and its
KV is either still cached when the next turn arrives or computed again. Each cell of the grid (size
of the KV pool, arrival rate, policy) starts a daemon and sends it the same jobs. Capacity and
working set are measured first, for each seed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from deploy.bench.options import BenchParser, at_least_one, from_zero, positive, writable, write
from proto.errors import ConfigError
from tests.benchmarks.agent_jobs.grid import AgentGrid, GridCell, SeedBaseline, SeedGrid, compared
from tests.benchmarks.agent_jobs.load import VARIANTS
from tests.benchmarks.command import run

PRESSED: Final = (50, 90)
CALM_POOL: Final = 100
FASTER: Final = 1.5
SLOWER: Final = 1.02
"""Targets of the policy "rule": jobs 1.5 times as fast as with fcfs, with half of the pool and 90 %
of the capacity; at most 2 % slower without memory pressure."""


def document(
    command: str,
    settings: Mapping[str, object],
    measured: Sequence[Mapping[str, object]],
    cells: Sequence[GridCell],
) -> str:
    """Return settings, baselines and cells as JSON."""
    found = {
        "command": command,
        "grid": settings,
        "measured": measured,
        "cells": [asdict(cell) for cell in cells],
    }
    return json.dumps(found, indent=1) + "\n"


def measured_table(num_jobs: int, measured: Sequence[SeedBaseline]) -> Table:
    table = Table(title=f"capacity and working set; {num_jobs} jobs per seed")
    titles = ("seed", "capacity, jobs/s", "working set, blocks", "mean", "requests", "mean job, s")
    for title in titles:
        table.add_column(title, justify="right")
    for baseline in measured:
        table.add_row(
            str(baseline.seed),
            f"{baseline.capacity_jobs_per_s:.3f}",
            str(baseline.working_set_blocks),
            f"{baseline.working_set_mean_blocks:.0f}",
            str(baseline.num_requests),
            f"{baseline.unpressed_job_s_mean:.1f}",
        )
    table.caption = "mean job: with a sufficient pool, at 90 % of the capacity"
    return table


def measured_line(measured: SeedBaseline) -> str:
    return (
        f"seed {measured.seed}: capacity {measured.capacity_jobs_per_s:.3f} jobs/s, working set "
        f"{measured.working_set_blocks:,} blocks, mean job {measured.unpressed_job_s_mean:.1f} s"
    )


def cell_line(cell: GridCell) -> str:
    failed = f", {cell.num_failed} jobs failed" if cell.num_failed else ""
    return (
        f"seed {cell.seed}, pool {cell.pool_percent} %, arrivals {cell.rate_percent} %, "
        f"{cell.variant}: mean {cell.job_s_mean:.1f} s, p99 {cell.job_s_p99:.0f} s, "
        f"found {cell.found_percent:.1f} %{failed}"
    )


def table(cells: Sequence[GridCell]) -> Table:
    """Return a table with a row per cell: means over seeds, and ranges of the ratios."""
    made = Table(title="job duration, s; ratios: fcfs / this policy (range over seeds)")
    for number, title in enumerate(_titles(cells)):
        made.add_column(title, justify="left" if number < _NUM_NAMES else "right")
    before: list[str] = []
    for row in _rows(cells):
        if before and before[:2] != row[:2]:
            made.add_section()
        before = row
        made.add_row(*row)
    return made


def markdown(cells: Sequence[GridCell]) -> Iterator[str]:
    """Yield the lines of the same table in Markdown."""
    titles = _titles(cells)
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in _rows(cells):
        yield f"| {' | '.join(row)} |"


_NUM_NAMES: Final = 3
"""Number of columns that identify the cell."""


def _titles(cells: Sequence[GridCell]) -> list[str]:
    titles = ["pool", "arrivals", "policy", "mean", "p99", "ratio of means", "of p99", "found"]
    titles += ["preempted", "pins taken / used / expired / released"]
    if _has_others(cells):
        titles.append("others: mean, p99")
    if _has_failed(cells):
        titles.append("failed jobs")
    return titles


def _rows(cells: Sequence[GridCell]) -> Iterator[list[str]]:
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
            " / ".join(f"{_mean(group, name):.0f}" for name in pins),
        ]
        if _has_others(cells):
            row.append(f"{_mean(group, 'other_s_mean'):.1f}, {_mean(group, 'other_s_p99'):.0f}")
        if _has_failed(cells):
            row.append(str(sum(cell.num_failed for cell in group)))
        yield row


def _has_failed(cells: Sequence[GridCell]) -> bool:
    return any(cell.num_failed for cell in cells)


def _has_others(cells: Sequence[GridCell]) -> bool:
    return any(cell.other_s_mean for cell in cells)


def verdicts(cells: Sequence[GridCell]) -> Iterator[str]:
    """Yield lines about the targets whose cells were measured."""
    for (pool, rate, name), group in grouped(cells):
        ratios = [cell.ratio_mean for cell in group if cell.ratio_mean is not None]
        if name != "rule" or not ratios:
            continue
        worst = min(ratios)
        where = f"{pool} % pool, {rate} % arrivals"
        same_cell = [cell for cell in cells if cell.pool_and_rate == (pool, rate)]
        if _has_failed(same_cell):
            num_failed = sum(cell.num_failed for cell in same_cell)
            yield f"{where}: {num_failed} jobs failed, not compared"
            continue
        if (pool, rate) == PRESSED:
            verdict = "met" if worst >= FASTER else "MISSED"
            yield f"{where}: {worst:.2f} times as fast as fcfs or better; 1.5 times: {verdict}"
        if pool == CALM_POOL:
            verdict = "met" if 1 / worst <= SLOWER else "MISSED"
            percent = 100 / worst - 100
            yield f"{where}: {percent:+.1f} % at worst relative to fcfs; at most +2 %: {verdict}"


def grouped(cells: Sequence[GridCell]) -> Iterator[tuple[tuple[int, int, str], list[GridCell]]]:
    """Yield the cells of all seeds, grouped by pool, rate and policy."""
    groups: dict[tuple[int, int, str], list[GridCell]] = {}
    for cell in cells:
        groups.setdefault((cell.pool_percent, cell.rate_percent, cell.variant), []).append(cell)
    yield from groups.items()


def _mean(group: Sequence[GridCell], name: str) -> float:
    return statistics.fmean(getattr(cell, name) for cell in group)


def _range(group: Sequence[GridCell], name: str) -> str:
    values = [getattr(cell, name) for cell in group if getattr(cell, name) is not None]
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main(words: Sequence[str]) -> None:
    options = _parse(words)
    grid = _grid(options)
    with writable("--json", options.json) as files:
        measured, found = _run(grid)
        rows = [asdict(baseline) for baseline in measured]
        write(files, document("served_agents", asdict(grid), rows, found))
    show(options, measured_table(grid.num_jobs, measured), found)


def show(options: argparse.Namespace, measured: Table, cells: Sequence[GridCell]) -> None:
    """Print the cells: as a Markdown table, or as tables with the targets."""
    if options.markdown:
        print("\n".join(markdown(cells)))
        return
    console = Console(width=120)
    console.print(measured)
    console.print(table(cells))
    for line in verdicts(cells):
        console.print(line, highlight=False)


def _run(grid: AgentGrid) -> tuple[list[SeedBaseline], list[GridCell]]:
    """Measure all seeds. It takes hours, so each result is printed at once."""
    measured: list[SeedBaseline] = []
    found: list[GridCell] = []
    with ExitStack() as stack:
        progress, task = show_progress(stack, _num_cells(grid))

        def print_line(line: str) -> None:
            progress.console.print(line, highlight=False, soft_wrap=True)

        for seed in grid.seeds:
            seed_grid = SeedGrid(grid, seed)
            measured.append(seed_grid.measure())
            print_line(measured_line(measured[-1]))
            cells = []
            for cell in seed_grid.measure_cells(measured[-1]):
                print_line(cell_line(cell))
                progress.advance(task)
                cells.append(cell)
            found += compared(cells)
    return measured, found


def show_progress(stack: ExitStack, num_cells: int) -> tuple[Progress, TaskID]:
    """Show a progress bar on standard error until the stack is closed."""
    progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
    return progress, progress.add_task("cells", total=num_cells)


def _num_cells(grid: AgentGrid) -> int:
    return len(grid.seeds) * len(grid.pools) * len(grid.rates) * len(grid.variants)


def _grid(options: argparse.Namespace) -> AgentGrid:
    return AgentGrid(
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
    return [at_least_one(number) for number in text.split(",")]


def _seeds(text: str) -> list[int]:
    return [from_zero(number) for number in text.split(",")]


def _variants(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(
                f"--policies: there is no {name!r}; there are: {', '.join(VARIANTS)}", "policies"
            )
    return names


def add_grid(parser: BenchParser, defaults: Mapping[str, str]) -> None:
    """Add flags of a grid. defaults: of jobs, seeds, pools and rates, for the help."""
    add = parser.add_argument
    add("--jobs", type=at_least_one, metavar="N", help=f"jobs per seed ({defaults['jobs']})")
    add("--seeds", type=_seeds, metavar="N,…", help=f"seeds of the load ({defaults['seeds']})")
    add("--pools", type=_whole, metavar="P,…", help=f"%% of the working set ({defaults['pools']})")
    add("--rates", type=_whole, metavar="P,…", help=f"%% of the capacity ({defaults['rates']})")
    add(
        "--policies",
        type=_variants,
        default=list(VARIANTS),
        metavar="NAME,…",
        help=f"policies to compare: {', '.join(VARIANTS)} (all)",
    )
    add("--json", metavar="FILE", help="write the figures to a file")
    add("--markdown", action="store_true", help="print the cells as a Markdown table")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.served_agents", description=__doc__)
    add_grid(parser, {"jobs": "120", "seeds": "0", "pools": "50", "rates": "90"})
    parser.add_argument(
        "--tool-scale",
        type=positive,
        default=0.05,
        metavar="X",
        help="factor of the durations of tools (0.05)",
    )
    parser.add_argument(
        "--turns", type=positive, default=10.0, metavar="N", help="mean turns per job (10)"
    )
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
