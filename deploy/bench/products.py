"""`tokend bench products`: products and attention of a model by all kernels that can compute them.

Each distinct product is timed with the weights, threads and settings of a worker, by every
instruction set that the CPU has, and by oneDNN where the weights are bfloat16; attention under one
KV head with up to 1,024 tokens of context. A worker measures less, once for a model and a machine,
and keeps its choice, which is marked here.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy import flags
from deploy.bench.options import BenchParser, several_counts, writable, write
from deploy.display import open_display
from deploy.environment import HostEnvironment
from deploy.models.store import prepared_model
from deploy.serve import run_worker_program
from proto.errors import TokendError
from proto.messages.lifecycle import ProductsBoot

CHOSEN = "chosen"


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and write the figures where --json says so."""
    options = _parse(words)
    environment = HostEnvironment.of(os.environ)
    config = flags.build(flags.parse(options.serve_flags), environment.settings)
    with writable("--json", options.json) as files:
        with closing(open_display(sys.stderr)) as display:
            model = prepared_model(config.model.model, environment, display)
        boot = ProductsBoot(config=config, model=model, rows=options.rows)
        process = run_worker_program("worker.commands.products", boot, config, environment)
        if process.returncode:
            raise TokendError("the products were not measured")
        figures = json.loads(process.stdout)
        write(files, json.dumps(figures, indent=2) + "\n")
    Console(width=120).print(_table(figures))


def _table(figures: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"milliseconds of a product by rows; {figures['model']}, {figures['device']}, "
        f"{figures['num_threads']} threads"
    )
    table.add_column("product")
    table.add_column("kernels")
    for rows in figures["rows"]:
        table.add_column(str(rows), justify="right")
    for measured in (*figures["products"], figures["attention"]):
        table.add_section()
        for name, times in measured["ms"].items():
            is_chosen = name == measured["chosen"]
            cells = (f"{taken:.3f}" for taken in times)
            by = f"{name}, {CHOSEN}" if is_chosen else name
            table.add_row(measured["name"], by, *cells)
    return table


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="tokend bench products", description=__doc__)
    rows = [1, 8, 32, 128, 512]
    parser.add_argument("--rows", type=several_counts, default=rows, help="(1,8,32,128,512)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: model and flags of tokend serve")
    return parser.parse_args(words)
