"""Measure how fast a step reads its KV, compared with the memory bandwidth.

Only attention is run, in a separate process, with the shape of SmolLM2: 30 layers, 9 query and
3 KV heads of 64; the first step also on that of Gemma 3's 270m: 18 layers, 4 query heads and
one KV head of 256, here without its window.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, get_args

from rich.console import Console
from rich.table import Table

from deploy.bench.options import BenchParser, at_least_one
from deploy.environment import HostEnvironment
from proto.codec import to_json
from proto.errors import ConfigError
from proto.settings.config import DeviceConfig, KVCacheDType
from tests.benchmarks.command import run
from tests.benchmarks.line_program import worker_program
from tests.benchmarks.messages import AttentionTimings, AttentionWorkload

_SMOLLM2: Final = (30, 9, 3, 64)
_GEMMA3: Final = (18, 4, 1, 256)
_STEPS: Final = {
    "16 decodes, 1000 tokens each": (16, 1000, 1, _SMOLLM2),
    "32 decodes, 320 tokens each": (32, 320, 1, _SMOLLM2),
    "1 decode, 1000 tokens": (1, 1000, 1, _SMOLLM2),
    "512 tokens of a prompt after 512": (1, 1024, 512, _SMOLLM2),
    "16 decodes, 1000 tokens each, Gemma 3's heads": (16, 1000, 1, _GEMMA3),
}
"""Name: sequences, their tokens, new tokens; layers, heads, KV heads, head size."""


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and write the timings where --json says so."""
    parser = _parser()
    options = parser.parse_args(words)
    workloads = [
        AttentionWorkload(
            name=f"{name}, {kv_dtype}",
            num_seqs=num_seqs,
            context_tokens=context,
            query_tokens=new,
            dtype=options.dtype,
            kv_cache_dtype=kv_dtype,
            rounds=options.rounds,
            num_threads=options.cpu_threads,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
        )
        for name, (num_seqs, context, new, shape) in _STEPS.items()
        for layers, heads, kv_heads, head_dim in [shape]
        for kv_dtype in options.kv_cache_dtype or ("bf16", "f32", "int8")
    ]
    with ExitStack() as stack:
        try:  # opened first, so an invalid file name is reported before the measurement
            files = [stack.enter_context(open(name, "w")) for name in options.json]
        except OSError as error:
            raise ConfigError(f"--json: {error}") from None
        timings = measure(workloads)
        for file in files:
            file.write(json.dumps([json.loads(to_json(each)) for each in timings], indent=2))
    Console(width=120).print(_table(timings))


def measure(workloads: Sequence[AttentionWorkload]) -> list[AttentionTimings]:
    """Run workloads in a worker process, all with the same threads; raise TokendError."""
    device = DeviceConfig(cpu_threads=workloads[0].num_threads)
    around = HostEnvironment.of(os.environ)
    with worker_program("tests.benchmarks.attention_program", device, around) as program:
        return [program.play(each, AttentionTimings, each.name) for each in workloads]


def _parser() -> BenchParser:
    parser = BenchParser(prog="python -m tests.benchmarks.attention", description=__doc__)
    parser.add_argument("--rounds", type=at_least_one, default=15)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--kv-cache-dtype",
        action="append",
        choices=get_args(KVCacheDType),
        help="may be given several times; by default bf16, f32 and int8",
    )
    parser.add_argument("--cpu-threads", type=at_least_one, help="as of the daemon")
    parser.add_argument(
        "--json", metavar="FILE", action="append", default=[], help="write the timings there"
    )
    return parser


def _table(timings: Sequence[AttentionTimings]) -> Table:
    first = timings[0]
    table = Table(
        title=f"attention with rotary embedding and KV write, {first.kernels}, "
        f"{first.num_threads} threads; medians"
    )
    for column in ("step", "ms", "best ms", "MB of KV", "GB/s", "read GB/s", "share", "GFLOP/s"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for each in timings:
        table.add_row(
            each.workload,
            f"{each.step_ms_median:.2f}",
            f"{each.step_ms_best:.2f}",
            f"{each.kv_megabytes:.0f}",
            f"{each.kv_gb_per_s_median:.1f}",
            f"{each.read_gb_per_s_median:.1f}",
            f"{each.share_of_read_median:.2f}",
            f"{each.attention_gflop_per_s_best:.0f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(run(main))
