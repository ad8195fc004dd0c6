"""Measure the parts of a worker's step, by the number of sequences.

A worker with the threads and settings of the daemon, without engine and front end.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Final

from rich.console import Console
from rich.table import Table

from deploy import flags
from deploy.bench.options import BenchParser, at_least_one
from deploy.display import open_display
from deploy.environment import HostEnvironment
from deploy.models.store import prepared_model
from proto.codec import to_json_line
from proto.errors import ConfigError
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ServeConfig
from tests.benchmarks.command import run
from tests.benchmarks.line_program import worker_program
from tests.benchmarks.messages import StepTimings, StepWorkload

_TARGETS: Final = {1: 0.20, 16: 0.15}
"""Limit of the share outside products and attention, by the number of sequences."""


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and write the rows where --json says so."""
    options = _parse(words)
    around = HostEnvironment.of(os.environ)
    config = flags.build(flags.parse(options.serve_flags), around.settings)
    most = config.scheduler.max_num_seqs
    if max(options.rows) > most:
        raise ConfigError(f"--rows: at most {most} sequences (--max-num-seqs)", "rows")
    with ExitStack() as stack:
        # Opened first, so an invalid file name is reported before the measurement.
        try:
            files = [stack.enter_context(open(name, "w")) for name in options.json]
        except OSError as error:
            raise ConfigError(f"--json {error.filename}: {error.strerror}", "json") from None
        with closing(open_display(sys.stderr)) as display:
            model = prepared_model(config.model.model, around, display)
        rows = list(_measure(options, config, model, around))
        for file in files:
            document = [json.loads(to_json_line(row)) for row in rows]
            file.write(json.dumps(document, indent=2) + "\n")
    Console(width=120).print(_table(options, rows))


def _measure(
    options: argparse.Namespace, config: ServeConfig, model: PreparedModel, around: HostEnvironment
) -> Iterator[StepTimings]:
    with worker_program("tests.benchmarks.steps_program", config.device, around) as program:
        for num_rows in options.rows:
            workload = StepWorkload(
                config=config,
                model=model,
                num_rows=num_rows,
                context_tokens=options.context,
                warm_up_steps=options.warm_up,
                measured_steps=options.steps,
                computes_prompts=options.prompts,
                temperature=options.temperature,
            )
            yield program.play(workload, StepTimings, f"{num_rows} sequences")


def _table(options: argparse.Namespace, rows: Sequence[StepTimings]) -> Table:
    table = Table(
        title=f"milliseconds a {'prompt' if options.prompts else 'step'}, medians of "
        f"{options.steps}; {options.context} tokens each; "
        f"{rows[0].device}, {rows[0].num_threads} threads"
    )
    for column in ("sequences", "step", "best", "p99", "products", "attention", "rest"):
        table.add_column(column, justify="right")
    for column in ("rest, best", "share of rest", "target", "faults", "waits"):
        table.add_column(column, justify="right")
    for row in rows:
        target = None if options.prompts else _TARGETS.get(row.num_rows)
        table.add_row(
            str(row.num_rows),
            f"{row.step_ms_median:.2f}",
            f"{row.step_ms_min:.2f}",
            f"{row.step_ms_p99:.2f}",
            f"{row.product_ms_median:.2f}",
            f"{row.attention_ms_median:.2f}",
            f"{row.rest_ms_median:.2f}",
            f"{row.rest_ms_min:.2f}",
            f"{row.rest_share_median:.1%}",
            "" if target is None else f"{target:.0%}",
            f"{row.page_faults_a_step:.0f}",
            f"{row.waits_a_step:.0f}",
        )
    return table


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(
        prog="python -m tests.benchmarks.steps",
        description="Measure a worker's steps by themselves: products, attention, the rest.",
    )
    parser.add_argument(
        "--rows", type=_counts, default=[1, 4, 16, 32], help="sequences at once (1,4,16,32)"
    )
    parser.add_argument(
        "--context", type=at_least_one, default=256, help="tokens that each has (256)"
    )
    parser.add_argument("--steps", type=at_least_one, default=100, help="measured (100)")
    parser.add_argument(
        "--prompts",
        action="store_true",
        help="a step computes a prompt of --context tokens, in chunks",
    )
    parser.add_argument("--warm-up", type=at_least_one, default=5, help="steps before them (5)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument(
        "--json", metavar="FILE", action="append", default=[], help="write the rows there, too"
    )
    parser.add_argument("serve_flags", nargs="*", help="after --: model and flags of tokend serve")
    return parser.parse_args(words)


def _counts(text: str) -> list[int]:
    return [at_least_one(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(run(main))
