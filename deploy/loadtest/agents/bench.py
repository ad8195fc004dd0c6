"""`tokend bench agents`: how long agents' jobs take, under fcfs and under continuum with pins.

A job is a chain of turns with tools between them; its prompt grows with each turn, and its KV is
either there when it comes back or is computed again. By default the real scheduler and KV cache
run on a virtual clock; with --real a daemon for each cell is sent a smaller load of the same kind.
Capacity and working set are measured first, per seed.
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.progress import Progress, TaskID

from deploy.loadtest.agents.grid import Finished, Grid, Programs, cells, measure
from deploy.loadtest.agents.ledger import Ledger
from deploy.loadtest.agents.machines import MACHINES, VARIANTS
from deploy.loadtest.agents.real import Daemons, RealGrid
from deploy.loadtest.agents.report import (
    cell_line,
    document,
    markdown,
    measured_line,
    measured_table,
    table,
    verdicts,
)
from deploy.loadtest.agents.rows import Cell, Measured
from deploy.loadtest.options import (
    Parser,
    at_least_one,
    from_zero,
    from_zero_number,
    positive,
    writable,
    write,
)
from proto.errors import ConfigError


def main(words: Sequence[str]) -> None:
    """Simulate or measure, print, write the figures."""
    options = _parse(words)
    console = Console(width=120)
    with writable("--json", options.json) as files:
        grid = _real_grid(options) if options.real else _grid(options)
        measured, found = (
            _run_real(grid) if isinstance(grid, RealGrid) else _run_simulated(grid, options)
        )
        write(files, document(grid, measured, found))
    if options.markdown:
        print("\n".join(markdown(found)))
        return
    console.print(measured_table(grid, measured))
    console.print(table(found))
    for line in verdicts(found):
        console.print(line, highlight=False)


def _run_simulated(grid: Grid, options: argparse.Namespace) -> tuple[list[Measured], list[Cell]]:
    """Seed by seed."""
    measured: list[Measured] = []
    found: list[Cell] = []
    with ExitStack() as stack:
        ledger = Ledger(options.ledger)
        programs = (
            Finished(ledger) if options.finished else Programs(stack, options.processes, ledger)
        )
        progress, task = _progress(stack, grid)
        for seed in grid.seeds:
            measured.append(measure(grid, seed, programs))
            found += cells(grid, measured[-1], programs, lambda: progress.advance(task))
    return measured, found


def _run_real(grid: RealGrid) -> tuple[list[Measured], list[Cell]]:
    """Seed by seed. It takes hours, so each figure is said when it is known."""
    measured: list[Measured] = []
    found: list[Cell] = []
    with ExitStack() as stack:
        progress, task = _progress(stack, grid)

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


def _progress(stack: ExitStack, grid: Grid | RealGrid) -> tuple[Progress, TaskID]:
    """Of all cells."""
    number = len(grid.seeds) * len(grid.pools) * len(grid.rates) * len(grid.variants)
    progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
    return progress, progress.add_task("cells", total=number)


def _grid(options: argparse.Namespace) -> Grid:
    return Grid(
        machine=MACHINES[options.machine],
        num_jobs=options.jobs or _JOBS,
        seeds=options.seeds or [0, 1, 2],
        variants=options.policies,
        pools=options.pools or [25, 50, 100],
        rates=options.rates or [70, 90, 110],
        host=options.host,
        others=options.others,
        trace=options.steps_of or "",
    )


def _real_grid(options: argparse.Namespace) -> RealGrid:
    return RealGrid(
        num_jobs=options.jobs or _REAL_JOBS,
        seeds=options.seeds or [0],
        variants=options.policies,
        pools=options.pools or [50],
        rates=options.rates or [90],
        turns=options.turns,
        tool_scale=options.tool_scale,
        serve_flags=options.serve_flags,
    )


_JOBS = 1000
_REAL_JOBS = 120


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


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokend bench agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--jobs", type=at_least_one, metavar="N", help="a seed (1000; --real: 120)")
    add("--seeds", type=_seeds, metavar="N,…", help="of the load (0,1,2; --real: 0)")
    add("--pools", type=_whole, metavar="P,…", help="%% of the working set (25,50,100; --real: 50)")
    add("--rates", type=_whole, metavar="P,…", help="%% of the capacity (70,90,110; --real: 90)")
    add(
        "--policies",
        type=_variants,
        default=list(VARIANTS),
        metavar="NAME,…",
        help=f"side by side: {', '.join(VARIANTS)} (all)",
    )
    add("--json", metavar="FILE", help="write the figures there, too")
    add("--markdown", action="store_true", help="print the cells as the table of a document")
    parser.add_argument("--real", action="store_true", help="a daemon with a model for each cell")
    simulated = _add_simulated(parser.add_argument_group("simulated"))
    real = _add_real(parser.add_argument_group("with --real"))
    parser.add_argument("serve_flags", nargs="*", help="--real, after --: flags of tokend serve")
    options = parser.parse_args(words)
    for action in simulated if options.real else real:
        if getattr(options, action.dest) != action.default:
            kind = "without" if options.real else "with"
            parser.error(f"{action.option_strings[0]} goes {kind} --real")
    if options.serve_flags and not options.real:
        parser.error("flags of tokend serve go with --real")
    return options


def _add_simulated(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    add = group.add_argument
    processes = os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()
    return [
        add(
            "--host",
            type=at_least_one,
            default=100,
            metavar="P",
            help="+host: %% of the working set",
        ),
        add(
            "--others",
            type=from_zero_number,
            default=0.0,
            metavar="X",
            help="requests of others that come for each job, of 1,000 tokens in the mean (0)",
        ),
        add(
            "--machine",
            choices=list(MACHINES),
            default="smollm2-cpu",
            help="step times (smollm2-cpu)",
        ),
        add("--steps-of", metavar="TRACE", help="fit the step times to this trace instead"),
        add(
            "--ledger",
            default="",
            metavar="FILE",
            help="write each replay there when it is over, and take those that are there already",
        ),
        add("--finished", action="store_true", help="show what the ledger has, and play nothing"),
        add(
            "--processes",
            type=at_least_one,
            default=processes or 1,
            metavar="N",
            help="replays at once, at low priority (one for each core)",
        ),
    ]


def _add_real(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    add = group.add_argument
    return [
        add(
            "--tool-scale",
            type=positive,
            default=0.05,
            metavar="X",
            help="tools' times by this (0.05)",
        ),
        add("--turns", type=positive, default=10.0, metavar="N", help="of a job, mean (10)"),
    ]
