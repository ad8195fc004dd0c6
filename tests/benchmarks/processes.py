"""Measure the CPU time and memory of each process of a daemon, per step.

Starts a daemon and loads it in a closed loop; part of `make bench`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.bench.client import Target, first_model
from deploy.bench.datasets import (
    SessionSeeds,
    add_sizes,
    prompt_sessions,
    prompts_of,
    sizes_of,
)
from deploy.bench.figures import AnswerComparison, RunFigures, figures_of, show
from deploy.bench.load import LoadPattern, measure, warm_up
from deploy.bench.options import BenchParser, at_least_one, from_zero, writable, write
from deploy.bench.servers import MeasuredDaemon
from tests.benchmarks.command import run
from tests.benchmarks.usage import ProcessUsage, usage_by_title

CPU_BUDGET_MS: Final = 1.5
"""Limit of the CPU time per step of engine and front end together, with 16 requests."""


def main(words: Sequence[str]) -> None:
    """Measure, print the tables, write the figures."""
    options = _parse(words)
    with writable("--json", options.json) as files:
        with MeasuredDaemon(options.serve_flags) as daemon:
            fields = {"temperature": 0, "ignore_eos": True}
            target = Target(daemon.url, first_model(daemon.url), fields=fields)
            warm_up(target, prompts_of(options), options.warm_ups)
            before, steps_before = usage_by_title(daemon.pid), daemon.num_steps()
            figures = _load(options, target)
            after, num_steps = usage_by_title(daemon.pid), daemon.num_steps() - steps_before
            rows = per_step(before, after, num_steps)
        console = Console(width=150)
        head = [f"start to ready: {daemon.seconds_to_ready:.1f} s"]
        show(console, head, [figures], AnswerComparison())
        console.print(_table(f"{figures.name}, {num_steps:.0f} steps", rows))
        document = {
            "command": "python -m tests.benchmarks.processes",
            "ready_s": daemon.seconds_to_ready,
            "num_steps": num_steps,
            "processes": rows,
            "load": figures.to_dict(),
        }
        write(files, json.dumps(document, indent=2) + "\n")


def per_step(
    before: dict[str, ProcessUsage], after: dict[str, ProcessUsage], num_steps: float
) -> dict[str, dict[str, float]]:
    """Return usage per step by process, and for engine and front end together."""
    rows = {
        title: {
            "cpu_ms_per_step": 1e3 * (now.cpu_seconds - before[title].cpu_seconds) / num_steps,
            "resident_mib": now.resident_mib,
        }
        for title, now in sorted(after.items())
        if title in before
    }
    serving = [row for title, row in rows.items() if "api" in title or "engine" in title]
    rows["engine + front end"] = {
        name: sum(row[name] for row in serving) for name in ("cpu_ms_per_step", "resident_mib")
    }
    return rows


def _load(options: argparse.Namespace, target: Target) -> RunFigures:
    seeds = SessionSeeds(options.seed)
    sessions = prompt_sessions(seeds, sizes_of(options), prompts_of(options))
    pattern = LoadPattern(options.concurrency, max_requests=options.requests)
    name = f"{options.concurrency} at once"
    return figures_of(name, measure(target, sessions, pattern))


def _table(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=title)
    for column in ("process", "CPU ms a step", "of the budget", "resident MiB"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, row in rows.items():
        milliseconds = row["cpu_ms_per_step"]
        budget = f"{milliseconds / CPU_BUDGET_MS:.2f}" if "+" in name else ""
        table.add_row(name, f"{milliseconds:.2f}", budget, f"{row['resident_mib']:.0f}")
    return table


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.processes", description=__doc__)
    parser.add_argument("--concurrency", type=at_least_one, default=16, help="(16)")
    parser.add_argument("--requests", type=at_least_one, default=64, help="(64)")
    parser.add_argument("--warm-ups", type=from_zero, default=4, help="(4)")
    add_sizes(parser, 256, 128)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
