"""Measure a model's matrix products, by the number of rows.

Weight formats and threads are those of a daemon with the same flags; the time to read the weights
of one row is shown as well. Rows are the tokens of a step.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from deploy import flags
from deploy.bench.options import BenchParser, at_least_one, several_counts, writable, write
from deploy.environment import HostEnvironment
from proto.codec import to_json
from tests.benchmarks.ceilings import Hardware, limits_program
from tests.benchmarks.command import run
from tests.benchmarks.messages import LimitsTimings


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and write the timings where --json says so."""
    options = _parse(words)
    settings = HostEnvironment.of(os.environ).settings
    config = flags.build(flags.parse(options.serve_flags), settings)
    with writable("--json", options.json) as files:
        limits = limits_program(config.model.model, config, options.rows, options.rounds)
        with limits.program:
            hardware = limits.measure()
        document = {
            "command": "python -m tests.benchmarks.products",
            "weights_read_ms": hardware.weights_ms,
            **json.loads(to_json(hardware.timings)),
        }
        write(files, json.dumps(document, indent=2) + "\n")
    console = Console(width=120)
    console.print(_table(hardware))


def _table(hardware: Hardware) -> Table:
    timings, read = hardware.timings, hardware.weights_ms
    table = Table(
        title=f"milliseconds of a step's products; {timings.device}, "
        f"weights {timings.weights}: {timings.weight_bytes / 1e6:.0f} MB, read in {read:.2f} ms "
        f"at {timings.read_gb_per_s:.1f} GB/s"
    )
    for column in ("rows", "layers", "head", "together", "by reading the weights"):
        table.add_column(column, justify="right")
    for rows, layers, head in _rows(timings):
        table.add_row(
            str(rows),
            f"{layers:.2f}",
            f"{head:.2f}",
            f"{layers + head:.2f}",
            f"{(layers + head) / read:.2f}",
        )
    return table


def _rows(timings: LimitsTimings) -> list[tuple[int, float, float]]:
    columns = timings.rows, timings.layer_products_ms, timings.head_product_ms
    return list(zip(*columns, strict=True))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.products", description=__doc__)
    rows = [1, 4, 16, 32, 64, 256, 512]
    parser.add_argument("--rows", type=several_counts, default=rows, help="(1,4,16,32,64,256,512)")
    parser.add_argument("--rounds", type=at_least_one, default=10, help="the best counts (10)")
    parser.add_argument("--json", metavar="FILE", help="write the timings there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: model and flags of tokend serve")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
