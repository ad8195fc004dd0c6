"""Measure the cost of a scheduler step, compared with a peer's.

Both schedulers run each workload alternately, round by round, so that other load on the machine
affects both.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TextIO

from rich.console import Console
from rich.table import Table

from deploy.bench.options import BenchParser
from proto.codec import changed, to_json_line
from proto.errors import ConfigError
from proto.settings.config import CacheConfig, SchedulerConfig
from tests.benchmarks.command import run
from tests.benchmarks.line_program import LineProgram
from tests.benchmarks.messages import (
    RequestRecipe,
    SchedulerFigures,
    SchedulerRow,
    SchedulerTimings,
    SchedulerWorkload,
)

# Programs that run the workloads: our scheduler's and the peer's.


PEER_PROGRAM = Path(__file__).parent / "peers" / "vllm_scheduler.py"


def our_command() -> list[str]:
    """Return the command of our scheduler, set up as in the daemon."""
    return [sys.executable, "-m", "tests.benchmarks.scheduler_program"]


def peer_command(python: str) -> list[str]:
    """Return the command of vLLM's scheduler, in the environment of this interpreter."""
    return [python, str(PEER_PROGRAM)]


# The workloads, row by row.
#
# Settings have their defaults, except those that a row tests: more sequences than the default need
# higher max_num_seqs and max_num_batched_tokens.


MAX_MODEL_LEN: Final = 65_536
_DEFAULTS: Final = SchedulerConfig()
_BLOCK_SIZE: Final = CacheConfig().block_size
_FOREVER: Final = 10_000
"""More output tokens than a row has steps."""
_LONG: Final = 32_768


def all_workloads() -> list[SchedulerWorkload]:
    """Every row, in the order of the table."""
    rows = [_decode(256), _decode(1024), _mixed(), _preempting(), _tenants()]
    rows += [_priority(), _long_prefix(), _hashing()]
    rows += [_decode(number) for number in (16, 64)]
    rows += [_traced(_decode(64)), _traced(_decode(256)), _traced(_mixed())]
    rows += [_full(), _watched(_full())]
    rows += [_waiting(number) for number in (0, 100, 1_000, 10_000)]
    rows += [_blocks(number) for number in (10_000, 100_000, 1_000_000)]
    return rows


def select(names: Sequence[str]) -> list[SchedulerWorkload]:
    """Return the workloads of these names, all if there are none; raise ConfigError."""
    workloads = {each.name: each for each in all_workloads()}
    for name in names:
        if name not in workloads:
            raise ConfigError(f"there is no workload {name!r}; there are: {', '.join(workloads)}")
    return [each for each in workloads.values() if not names or each.name in names]


def _workload(name: str, requests: Sequence[RequestRecipe], **given: Any) -> SchedulerWorkload:
    settings = {
        "num_blocks": 1 << 16,
        "block_size": _BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": _DEFAULTS.max_num_seqs,
        "max_num_batched_tokens": _DEFAULTS.step_tokens,
        "warm_up_steps": 200,
        "measured_steps": 300,
    }
    return SchedulerWorkload(name=name, requests=tuple(requests), **(settings | given))


def _decode(number: int) -> SchedulerWorkload:
    """Requests that all decode and never end."""
    return _workload(
        f"decode{number}",
        [RequestRecipe(((seed, 64),), _FOREVER) for seed in range(number)],
        concurrency=number,
        max_num_seqs=max(number, _DEFAULTS.max_num_seqs),
        max_num_batched_tokens=max(2 * number, _DEFAULTS.step_tokens),
    )


def _traced(workload: SchedulerWorkload) -> SchedulerWorkload:
    """The workload with a trace."""
    return changed(workload, name=f"{workload.name}-traced", traced=True)


def _watched(workload: SchedulerWorkload) -> SchedulerWorkload:
    """The workload with a subscriber of the live view."""
    return changed(workload, name=f"{workload.name}-watched", watched=True)


def _full() -> SchedulerWorkload:
    """64 requests that all decode and hold nearly all blocks of a small pool."""
    return _workload(
        "full64",
        [RequestRecipe(((seed, 2_200),), _FOREVER) for seed in range(64)],
        concurrency=64,
        max_num_batched_tokens=4096,
        num_blocks=11_650,
        warm_up_steps=100,
        measured_steps=480,
    )


def _mixed() -> SchedulerWorkload:
    """Prompts of 64 to 8,192 tokens, most of each the beginning of one of eight documents."""
    rng = random.Random("mixed")
    requests = []
    for seed in range(1_000):
        length = round(64 * 2 ** rng.uniform(0, 7))
        shared = round(length * rng.uniform(0.6, 0.95))
        segments = ((1_000_000 + rng.randrange(8), shared), (seed, length - shared))
        requests.append(RequestRecipe(segments, rng.randint(64, 192)))
    return _workload(
        "mixed", requests, concurrency=48, num_blocks=16_384, warm_up_steps=600, measured_steps=600
    )


def _preempting() -> SchedulerWorkload:
    """A pool that is always full, so that every allocation preempts another request."""
    return _workload(
        "preempt",
        _small_requests("preempt", 1),
        concurrency=64,
        num_blocks=100,
        measured_steps=2_000,
        measure="preempting steps",
    )


def _tenants() -> SchedulerWorkload:
    """The same pressure with two tenants that preempt each other."""
    return _workload(
        "tenants",
        _small_requests("preempt", 1, num_tenants=2),
        concurrency=64,
        num_blocks=100,
        measured_steps=2_000,
        measure="preempting steps",
    )


def _priority() -> SchedulerWorkload:
    """The same pressure with the policy `priority` and ten priorities."""
    return _workload(
        "priority",
        _small_requests("priority", 10),
        concurrency=64,
        num_blocks=100,
        measured_steps=2_000,
        scheduling_policy="priority",
    )


def _small_requests(name: str, num_priorities: int, num_tenants: int = 1) -> list[RequestRecipe]:
    rng = random.Random(name)
    return [
        RequestRecipe(
            ((seed, rng.randint(4, 15)),),
            rng.randint(64, 256),
            rng.randrange(num_priorities),
            seed % num_tenants,
        )
        for seed in range(1_000)
    ]


def _long_prefix() -> SchedulerWorkload:
    """A prompt of 32k tokens, cached except for its last block."""
    return _workload(
        "prefix32k", [RequestRecipe(((0, _LONG),), 1)], concurrency=1, measured_steps=100
    )


def _hashing() -> SchedulerWorkload:
    return _workload("hash1k", [RequestRecipe(((0, 1024),), 1)], concurrency=1, measure="hashing")


def _waiting(number: int) -> SchedulerWorkload:
    """A full batch of short requests, and this many in the queue."""
    return _workload(f"waiting{number}", _passing(), concurrency=_DEFAULTS.max_num_seqs + number)


def _blocks(number: int) -> SchedulerWorkload:
    """Short requests over a pool of this many blocks."""
    return _workload(
        f"blocks{number}", _passing(), concurrency=_DEFAULTS.max_num_seqs, num_blocks=number
    )


def _passing() -> list[RequestRecipe]:
    rng = random.Random("passing")
    return [RequestRecipe(((seed, 64),), rng.randint(64, 192)) for seed in range(12_000)]


_TIMES: Final = ("schedule", "update", "encode", "decode", "hash", "view")
_BEST_ROUNDS: Final = ("schedule", "update", "hash")


def main(words: Sequence[str]) -> None:
    """Measure, print the tables, and write the rows where --json says so."""
    options = _parse(words)
    console = Console(width=120)
    with ExitStack() as stack:
        # Opened first, so an invalid file name is reported before the measurement.
        files = [stack.enter_context(_create(name)) for name in options.json]
        rows = measure(select(options.workload), options.rounds, options.peer_python)
        for file in files:
            file.write(_document(rows))
    console.print(_table(rows))
    if options.peer_python:
        console.print(_comparison(rows))


def measure(
    workloads: Sequence[SchedulerWorkload], rounds: int, peer_python: str | None
) -> list[SchedulerRow]:
    """A row for each workload."""
    commands = [our_command()] + ([peer_command(peer_python)] if peer_python else [])
    with ExitStack() as stack:
        players = [stack.enter_context(LineProgram(command)) for command in commands]
        played: dict[str, list[list[SchedulerTimings]]] = {each.name: [] for each in workloads}
        for number in range(1, rounds + 1):
            for workload in workloads:
                print(f"round {number}: {workload.name}", file=sys.stderr, flush=True)
                played[workload.name].append(
                    [each.play(workload, SchedulerTimings, workload.name) for each in players]
                )
    return [_row(name, each) for name, each in played.items()]


def _row(name: str, played: list[list[SchedulerTimings]]) -> SchedulerRow:
    ours, *peers = [_figures(list(rounds)) for rounds in zip(*played, strict=True)]
    row: dict[str, Any] = {"workload": name, "rounds": len(played), **ours}
    if not peers:
        return SchedulerRow(**row)
    (theirs,) = peers
    return SchedulerRow(
        **row,
        peer=SchedulerFigures(**theirs),
        ratio=_ratio(ours, theirs, "median"),
        ratio_min=_ratio(ours, theirs, "min"),
    )


def _ratio(ours: dict[str, float], theirs: dict[str, float], which: str) -> float | None:
    """Return the ratio, None if one of them had no step that counts."""
    cost, peer_cost = _cost(ours, which), _cost(theirs, which)
    return cost / peer_cost if cost and peer_cost else None


def _figures(rounds: list[SchedulerTimings]) -> dict[str, float]:
    """The fields of SchedulerFigures that this workload has."""
    figures = {
        "num_scheduled": statistics.median(each.num_scheduled for each in rounds),
        "num_preempted": statistics.median(each.num_preempted for each in rounds),
    }
    for name in (*_TIMES, "wire_bytes"):
        timings = [getattr(each, name) for each in rounds]
        if None in timings:
            continue
        label = name if name == "wire_bytes" else f"{name}_us"
        medians = [each.median for each in timings]
        figures[f"{label}_median"] = statistics.median(medians)
        if name in _TIMES:
            figures[f"{label}_p99"] = statistics.median(each.p99 for each in timings)
        if name in _BEST_ROUNDS:
            figures[f"{label}_min"] = min(medians)
    return figures


def _cost(figures: dict[str, float], which: str) -> float:
    """Return the figure of the target: a whole step, or the hashing."""
    return sum(figures.get(f"{name}_us_{which}", 0.0) for name in _BEST_ROUNDS)


def _table(rows: Sequence[SchedulerRow]) -> Table:
    table = Table(title="microseconds a step: median (99th percentile); bytes of its messages")
    times = ("schedule", "update", "encode", "decode")
    _columns(table, "workload", "requests", *times, "bytes", "hash", "view")
    for row in rows:
        table.add_row(
            row.workload,
            _number(row.num_scheduled, 1),
            *[_pair(row, name) for name in times],
            _number(row.wire_bytes_median),
            _pair(row, "hash"),
            _pair(row, "view"),
        )
    return table


def _comparison(rows: Sequence[SchedulerRow]) -> Table:
    table = Table(title="beside vLLM's own scheduler, median (best round)")
    _columns(table, "workload", "requests", "theirs", "schedule+update", "theirs", "ratio")
    for row in rows:
        if row.peer is None or row.ratio is None or row.ratio_min is None:
            continue
        table.add_row(
            row.workload,
            _number(row.num_scheduled, 1),
            _number(row.peer.num_scheduled, 1),
            _sum(row),
            _sum(row.peer),
            f"{row.ratio:.3f} ({row.ratio_min:.3f})",
        )
    return table


def _columns(table: Table, first: str, *others: str) -> None:
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")


def _sum(figures: SchedulerFigures) -> str:
    fields = {
        name: getattr(figures, name) or 0.0 for name in figures.__struct_fields__ if "_us_" in name
    }
    return f"{_cost(fields, 'median'):.0f} ({_cost(fields, 'min'):.0f})"


def _pair(row: SchedulerFigures, name: str) -> str:
    median, p99 = getattr(row, f"{name}_us_median"), getattr(row, f"{name}_us_p99")
    return "" if median is None else f"{median:.0f} ({p99:.0f})"


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _document(rows: Sequence[SchedulerRow]) -> str:
    """Return a list with an object for each row."""
    return json.dumps([json.loads(to_json_line(row)) for row in rows], indent=2) + "\n"


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(
        prog="python -m tests.benchmarks.scheduler",
        description="Measure the scheduler without a model: every step is answered at once.",
        epilog="Pin it to one core: taskset -c 1 python -m tests.benchmarks.scheduler",
    )
    parser.add_argument("workload", nargs="*", help="rows to measure; all by default")
    parser.add_argument(
        "--json", metavar="FILE", action="append", default=[], help="write the rows there, too"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each is played (3)")
    parser.add_argument(
        "--peer-python",
        metavar="PATH",
        help="interpreter of an environment that has vLLM; its scheduler is measured in turn",
    )
    options = parser.parse_args(words)
    if options.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {options.rounds}", "rounds")
    return options


def _create(name: str) -> TextIO:
    try:
        return open(name, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {name}: {error.strerror}", "json") from None


if __name__ == "__main__":
    sys.exit(run(main))
