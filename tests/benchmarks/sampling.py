"""Measure the time from a step's logits to its tokens, by sampling parameters.

Only sampling is run, in a separate process, on random logits; the cases alternate. The last columns
are relative to the first case, greedy sampling.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deploy.bench.options import BenchParser, at_least_one, writable, write
from deploy.environment import HostEnvironment
from proto.codec import to_json
from proto.messages.logit_edits import LogitEdits
from proto.messages.sampling_params import SamplingParams
from proto.settings.config import DeviceConfig
from tests.benchmarks.command import run
from tests.benchmarks.line_program import worker_program
from tests.benchmarks.messages import SamplingCase, SamplingTimings, SamplingWorkload

_LEAST_VOCABULARY: Final = 4000
_BAD_WORDS: Final = tuple((first, first + 1) for first in range(1000, 1100))


def greedy(**edits: Any) -> SamplingParams:
    """Return greedy sampling after logits edits."""
    changes = LogitEdits(**edits) if edits else None
    return SamplingParams(max_tokens=1 << 20, temperature=0.0, edits=changes)


def drawn(**wishes: Any) -> SamplingParams:
    """Return random sampling."""
    return SamplingParams(**{"max_tokens": 1 << 20, "temperature": 1.0, **wishes})


_PLAIN: Final = greedy()
_PENALISED: Final = greedy(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1)
_ONE_OF_THEM: Final = {
    "penalties": _PENALISED,
    "a bias of 300 tokens": greedy(
        bias_token_ids=tuple(range(0, 3000, 10)), bias_values=(1.0,) * 300
    ),
    "100 bad words": greedy(bad_words=_BAD_WORDS),
    "100 tokens allowed": greedy(allowed_token_ids=tuple(range(0, 1000, 10))),
    "min_tokens": SamplingParams(
        max_tokens=1 << 20, min_tokens=1 << 20, temperature=0.0, eos_token_ids=(2,)
    ),
    "logprobs": SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=5),
}


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and write the timings where --json says so."""
    parser = _parser()
    options = parser.parse_args(words)
    if options.vocab_size < _LEAST_VOCABULARY:
        parser.error(f"--vocab-size must be at least {_LEAST_VOCABULARY}: requests name tokens")
    workload = SamplingWorkload(
        cases=cases(options.rows),
        vocab_size=options.vocab_size,
        context_tokens=options.context_tokens,
        num_steps=options.steps,
        dtype=options.dtype,
        num_threads=options.cpu_threads,
    )
    with writable("--json", options.json) as files:
        timings = measure(workload)
        document = {
            "command": "python -m tests.benchmarks.sampling",
            **json.loads(to_json(timings)),
        }
        write(files, json.dumps(document, indent=2) + "\n")
    Console(width=120).print(_table(timings))


def cases(num_rows: int) -> list[SamplingCase]:
    """Return the cases for this number of rows."""
    others = [_PLAIN] * (num_rows - 1)
    return [
        SamplingCase(name="greedy", rows=[_PLAIN, *others]),
        *(
            SamplingCase(name=f"greedy, one of them with {what}", rows=[one, *others])
            for what, one in _ONE_OF_THEM.items()
        ),
        SamplingCase(name="greedy, all with penalties", rows=[_PENALISED] * num_rows),
        SamplingCase(name="drawn", rows=[drawn()] * num_rows),
        SamplingCase(
            name="drawn, one of them with penalties",
            rows=[drawn(edits=_PENALISED.edits), *[drawn()] * (num_rows - 1)],
        ),
        SamplingCase(
            name="drawn, one of them with top_p",
            rows=[drawn(top_p=0.9), *[drawn()] * (num_rows - 1)],
        ),
        SamplingCase(
            name="drawn, all with top_k and top_p", rows=[drawn(top_k=50, top_p=0.9)] * num_rows
        ),
    ]


def measure(workload: SamplingWorkload) -> SamplingTimings:
    """Run it in a worker process; raise TokendError."""
    device = DeviceConfig(cpu_threads=workload.num_threads)
    around = HostEnvironment.of(os.environ)
    with worker_program("tests.benchmarks.sampling_program", device, around) as program:
        return program.play(workload, SamplingTimings, "sampling")


def _parser() -> BenchParser:
    parser = BenchParser(prog="python -m tests.benchmarks.sampling", description=__doc__)
    parser.add_argument("--rows", type=at_least_one, default=16, help="of a step")
    parser.add_argument("--steps", type=at_least_one, default=300, help="of each case")
    parser.add_argument("--vocab-size", type=at_least_one, default=49_152)
    parser.add_argument("--context-tokens", type=at_least_one, default=500)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--cpu-threads", type=at_least_one, help="as of the daemon")
    parser.add_argument("--json", metavar="FILE", help="write the timings there")
    return parser


def _table(timings: SamplingTimings) -> Table:
    table = Table(
        title=f"microseconds from {timings.cases[0].num_rows} rows of scores to their tokens; "
        f"{timings.kernels}, {timings.num_threads} threads, {timings.num_steps} steps"
    )
    for column in ("rows", "median", "best", "median by the first", "best by the first"):
        table.add_column(column, justify="left" if column == "rows" else "right")
    for each in timings.cases:
        table.add_row(
            each.name,
            f"{each.step_us_median:.0f}",
            f"{each.step_us_min:.0f}",
            f"{each.ratio_median:.2f}",
            f"{each.ratio_min:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(run(main))
