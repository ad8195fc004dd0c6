"""`tokend bench agents`: how long agents' jobs take, under fcfs and under continuum with pins.

A job is a chain of turns with tools between them; its prompt grows with each turn, and its KV is
either there when it comes back or is computed again. By default the real scheduler and KV cache
run on a virtual clock (capacity and working set are measured first, per seed); with --real a daemon
for each policy is sent a smaller load of the same kind.
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.progress import Progress

from deploy.loadtest.agents import real
from deploy.loadtest.agents.grid import Cell, Finished, Grid, Measured, Programs, cells, measure
from deploy.loadtest.agents.ledger import Ledger
from deploy.loadtest.agents.machines import MACHINES, VARIANTS
from deploy.loadtest.agents.report import document, markdown, measured_table, table, verdicts
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
        if options.real:
            found = real.measure_all(_real_load(options))
            console.print(real.table(found))
            write(files, real.document(found))
            return
        grid = _grid(options)
        with ExitStack() as stack:
            ledger = Ledger(options.ledger)
            programs = (
                Finished(ledger) if options.finished else Programs(stack, options.processes, ledger)
            )
            measured, found_cells = _run(grid, programs, console)
        write(files, document(grid, measured, found_cells))
    if options.markdown:
        print("\n".join(markdown(found_cells)))
        return
    console.print(measured_table(grid, measured))
    console.print(table(found_cells))
    for line in verdicts(found_cells):
        console.print(line, highlight=False)


def _run(
    grid: Grid, programs: Programs | Finished, console: Console
) -> tuple[list[Measured], list[Cell]]:
    """Seed by seed."""
    a_seed = len(grid.pools) * len(grid.rates) * len(grid.variants)
    measured: list[Measured] = []
    found: list[Cell] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replays", total=a_seed * len(grid.seeds))
        for seed in grid.seeds:
            measured.append(measure(grid, seed, programs))
            found += cells(grid, measured[-1], programs, lambda: progress.advance(task))
    return measured, found


def _grid(options: argparse.Namespace) -> Grid:
    return Grid(
        machine=MACHINES[options.machine],
        num_jobs=options.jobs or _JOBS,
        seeds=options.seeds,
        variants=options.policies,
        pools=options.pools,
        rates=options.rates,
        host=options.host,
        others=options.others,
        trace=options.steps_of or "",
    )


def _real_load(options: argparse.Namespace) -> real.RealLoad:
    return real.RealLoad(
        num_jobs=options.jobs or _REAL_JOBS,
        seeds=options.seeds,
        variants=options.policies,
        jobs_per_second=options.jobs_per_second,
        tool_scale=options.tool_scale,
        num_blocks=options.num_gpu_blocks_override,
        turns=options.turns,
        serve_flags=options.serve_flags,
    )


_JOBS = 1000
_REAL_JOBS = 40


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
    add("--jobs", type=at_least_one, metavar="N", help="a seed (1000; --real: 40)")
    add("--seeds", type=_seeds, default=[0, 1, 2], metavar="N,…", help="of the load (0,1,2)")
    add(
        "--policies",
        type=_variants,
        default=list(VARIANTS),
        metavar="NAME,…",
        help=f"side by side: {', '.join(VARIANTS)} (all)",
    )
    add("--json", metavar="FILE", help="write the figures there, too")
    group = parser.add_argument_group("simulated")
    add = group.add_argument
    add("--pools", type=_whole, default=[25, 50, 100], metavar="P,…", help="%% of the working set")
    add("--rates", type=_whole, default=[70, 90, 110], metavar="P,…", help="%% of the capacity")
    add("--host", type=at_least_one, default=100, metavar="P", help="+host: %% of the working set")
    add(
        "--others",
        type=from_zero_number,
        default=0.0,
        metavar="X",
        help="requests of others that come for each job, of 1,000 tokens in the mean (0)",
    )
    add("--machine", choices=list(MACHINES), default="smollm2-cpu", help="step times (smollm2-cpu)")
    add("--steps-of", metavar="TRACE", help="fit the step times to this trace instead")
    add(
        "--ledger",
        default="",
        metavar="FILE",
        help="write each replay there when it is over, and take those that are there already",
    )
    add("--finished", action="store_true", help="show what the ledger has, and play nothing")
    add("--markdown", action="store_true", help="print the cells as the table of a document")
    processes = os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()
    add(
        "--processes",
        type=at_least_one,
        default=processes or 1,
        metavar="N",
        help="replays at once, at low priority (one for each core)",
    )
    group = parser.add_argument_group("with a model")
    add = group.add_argument
    add("--real", action="store_true", help="start a daemon for each policy instead")
    add("--jobs-per-second", type=positive, default=1.0, metavar="X", help="arrivals (1)")
    add(
        "--tool-scale", type=positive, default=0.05, metavar="X", help="tools' times by this (0.05)"
    )
    add("--turns", type=positive, default=10.0, metavar="N", help="of a job, mean (10)")
    add(
        "--num-gpu-blocks-override",
        type=at_least_one,
        default=2000,
        metavar="N",
        help="blocks of the daemon's pool (2000)",
    )
    parser.add_argument(
        "serve_flags", nargs="*", help="with --real, after --: flags of tokend serve"
    )
    return parser.parse_args(words)
